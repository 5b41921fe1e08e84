import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import DesyncError, RunError
from lockstep.core.fingerprint import array_digest, compare_ranks, fingerprints, sha256_of


def example(seed=0):
    random = np.random.default_rng(seed)
    return {
        "policy/w": random.normal(size=(4, 3)).astype(np.float32),
        "policy/b": np.zeros(4, np.float32),
        "optimizer/step": np.array([3.0], np.float32),
        "normalizers/mean": random.normal(size=2),
    }


def flipped(array, bit):
    raw = bytearray(array.tobytes())
    raw[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)


# ---- digests


def test_equal_arrays_have_equal_fingerprints_wherever_they_lie():
    a, b = example(), example()
    np.testing.assert_array_equal(fingerprints(a), fingerprints(b))
    strided = {name: np.asfortranarray(array) for name, array in a.items()}
    np.testing.assert_array_equal(fingerprints(strided), fingerprints(a))
    assert sha256_of(strided) == sha256_of(a)


@given(st.integers(0, 4 * 3 * 32 - 1))
def test_one_flipped_bit_shows_in_its_tensor_and_in_no_other(bit):
    arrays = example()
    other = arrays | {"policy/w": flipped(arrays["policy/w"], bit)}
    assert (fingerprints(other) != fingerprints(arrays)).tolist() == [True, False, False, False]
    assert sha256_of(other) != sha256_of(arrays)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros(4, np.float32), -np.zeros(4, np.float32)),
        (np.zeros(4, np.float32), np.zeros((2, 2), np.float32)),
        (np.zeros(4, np.float32), np.zeros(4, np.int32)),
        (np.zeros(2, np.float64), np.zeros(4, np.float32)),
        (np.zeros(0, np.float32), np.zeros((0, 3), np.float32)),
        (np.zeros((), np.float32), np.zeros(1, np.float32)),
        (np.array([1.0, 2.0]), np.array([2.0, 1.0])),  # a sum wouldn't see it
        (np.array([1.0, -1.0]), np.array([2.0, -2.0])),
    ],
)
def test_sign_shape_dtype_and_order_count(a, b):
    assert array_digest(a) != array_digest(b)
    assert sha256_of({"x": a}) != sha256_of({"x": b})
    assert array_digest(a) == array_digest(a.copy())


def test_the_digest_of_all_arrays_counts_names_and_borders_but_no_order():
    arrays = example()
    assert sha256_of(dict(reversed(arrays.items()))) == sha256_of(arrays)
    renamed = {name.replace("policy/b", "policy/c"): array for name, array in arrays.items()}
    assert sha256_of(renamed) != sha256_of(arrays)
    assert sha256_of({"a": np.array([1.0, 2.0]), "b": np.array([3.0])}) != sha256_of(
        {"a": np.array([1.0]), "b": np.array([2.0, 3.0])}
    )
    assert sha256_of({"a": np.ones(2), "b": np.zeros(2)}) != sha256_of({"a": np.zeros(2), "b": np.ones(2)})


def test_the_digest_stays_as_it_is():
    """It is written into summary.json, where people compare it across machines and versions."""
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(2)}
    assert sha256_of(arrays) == "e45dfda2fe853c1a60f0dd426bac3891d0d1681498f9b774e3a3798fc097ae92"


@pytest.mark.parametrize(
    ("array", "digest", "sha256"),
    [
        (np.arange(6, dtype=np.float32).reshape(2, 3), "04cc513571271456", "49db61d34ed476c7"),
        (np.arange(3, dtype=np.int64), "65b669fb5c599638", "b6c7db064a9fff79"),
        (np.array([True, False]), "dc39958b6bd4be2a", "cff93cddd761fa43"),
        (np.array(2.5), "cb0c8fe43ab1f9db", "71a6973144f655e5"),
        (np.zeros((0, 3), np.float16), "0c15fd9dd69b334f", "a8cefae622c0dcee"),
        (np.array(["a", "bc"]), "127778a5465db80c", "67a8be663e324637"),
        (np.zeros(2, [("a", "i4"), ("b", "f8")]), "423205293f7f4860", None),
    ],
)
def test_the_digest_of_one_array_stays_as_it_is(array, digest, sha256):
    assert array_digest(array).hex() == digest
    assert sha256 is None or sha256_of({"x": array}).startswith(sha256)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "int4"])
def test_dtypes_that_numpy_does_not_have_count_bit_for_bit(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
    other = array.copy()
    other[1, 2] = 1
    for digest in (array_digest, lambda each: sha256_of({"x": each})):
        assert digest(array) == digest(np.asfortranarray(array)) != digest(other)
        assert digest(array[0, 0]) != digest(array[0, 1])  # without dimensions
        assert digest(array[:0]) != digest(array[:, :0])
    same_bits = np.zeros(3, ml_dtypes.float8_e5m2), np.zeros(3, ml_dtypes.float8_e4m3fn)
    assert array_digest(same_bits[0]) != array_digest(same_bits[1])


def test_there_is_one_fingerprint_for_each_array_in_order():
    arrays = example()
    rows = fingerprints(arrays)
    assert (rows.dtype, rows.shape) == (np.int64, (4,))
    assert rows.tolist() == [int.from_bytes(array_digest(a), "little", signed=True) for a in arrays.values()]
    assert fingerprints({}).shape == (0,)


# ---- ranks against each other


def rows_of(*states):
    return list(states[0]), np.stack([fingerprints(state) for state in states])


def test_ranks_that_agree_pass():
    compare_ranks(*rows_of(example(), example(), example()), "at iteration 3")
    compare_ranks(*rows_of(example()), "at iteration 3")


def test_one_rank_that_differs_in_one_tensor():
    other = example() | {"policy/b": np.ones(4, np.float32)}
    with pytest.raises(DesyncError) as caught:
        compare_ranks(*rows_of(example(), example(), other, example()), "at iteration 3")
    assert str(caught.value) == (
        "ranks are out of sync at iteration 3: rank 2 of 4 holds other bytes than rank 0 in 1 of 4 tensors, "
        "first policy/b"
    )
    assert isinstance(caught.value, RunError)


def test_several_ranks_that_differ_in_several_tensors():
    with pytest.raises(DesyncError) as caught:
        compare_ranks(*rows_of(example(0), example(1), example(0), example(2)), "at the end")
    assert str(caught.value) == (
        "ranks are out of sync at the end: ranks 1, 3 of 4 hold other bytes than rank 0 in 2 of 4 tensors, "
        "first policy/w"
    )


@given(st.integers(2, 6), st.integers(1, 5), st.data())
def test_any_single_difference_is_noticed(world_size, tensors, data):
    rows = np.tile(np.arange(tensors), (world_size, 1))
    names = [f"t{i}" for i in range(tensors)]
    compare_ranks(names, rows, "now")
    rank, tensor = data.draw(st.integers(0, world_size - 1)), data.draw(st.integers(0, tensors - 1))
    rows[rank, tensor] += 1
    with pytest.raises(DesyncError, match=f"first t{tensor}$"):
        compare_ranks(names, rows, "now")
