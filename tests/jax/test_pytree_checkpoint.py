"""Checkpoints of any pytree: what is saved comes back bit for bit, and what doesn't fit or is damaged says so."""

import json
import math
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.jax.checkpoints import pytrees
from lockstep.jax.checkpoints.pytrees import ARRAYS, load_checkpoint, load_metadata, save_checkpoint
from lockstep.jax.copies import replicate
from lockstep.runs.checkpoint import MANIFEST, CheckpointError, problem_with
from lockstep.runs.checkpoint_writer import aside_of


class State(NamedTuple):
    network: eqx.nn.MLP
    moments: optax.OptState
    key: jax.Array
    count: int
    rate: float
    history: np.ndarray
    half: jax.Array


def a_state(seed):
    network = eqx.nn.MLP(3, 2, 8, 1, key=jax.random.key(seed))
    moments = optax.adam(1e-3).init(eqx.filter(network, eqx.is_array))
    half = jnp.linspace(seed, seed + 1, 5).astype(jnp.bfloat16)
    return State(network, moments, jax.random.key(seed), seed, 0.1 + seed, np.arange(3.0) + seed, half)


def bits(tree):
    leaves = [x for x in jax.tree.leaves(tree) if not callable(x)]
    raw = [jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x for x in leaves]
    return [(np.asarray(x).dtype, np.asarray(x).shape, np.asarray(x).tobytes()) for x in raw]


def test_any_pytree_comes_back_bit_for_bit(tmp_path):
    saved, fresh = a_state(1), a_state(2)
    assert save_checkpoint(tmp_path / "c", saved) == tmp_path / "c"
    loaded = load_checkpoint(tmp_path / "c", fresh)
    assert bits(loaded) == bits(saved)
    assert bits(loaded) != bits(fresh)
    assert jax.tree.structure(loaded) == jax.tree.structure(fresh)
    assert (type(loaded.count), type(loaded.rate), type(loaded.history)) == (int, float, np.ndarray)
    loaded.history[0] = 5.0
    assert np.array_equal(loaded.network(jnp.ones(3)), saved.network(jnp.ones(3)))


def test_shapes_are_template_enough(tmp_path):
    saved = {"w": jnp.arange(6.0).reshape(2, 3), "k": jax.random.split(jax.random.key(0, impl="rbg"), 2)}
    save_checkpoint(tmp_path / "c", saved)
    shapes = jax.eval_shape(lambda: saved)
    assert bits(load_checkpoint(tmp_path / "c", shapes)) == bits(saved)


def test_its_files_are_safe_and_named_by_path(tmp_path):
    save_checkpoint(tmp_path / "c", {"a": [jnp.ones(2), {"b": 3}]})
    assert sorted(f.name for f in (tmp_path / "c").iterdir()) == ["kinds.json", MANIFEST, ARRAYS]
    assert json.loads((tmp_path / "c" / "kinds.json").read_text()) == {"a/0": "float32", "a/1/b": "int64"}


@pytest.mark.parametrize(
    ("saved", "template", "expected"),
    [
        (jnp.int32(7), 0, 7),
        (np.uint8(7), 0, 7),
        (jnp.float32(0.5), 0.0, 0.5),
        (jnp.bfloat16(0.5), 0.0, 0.5),
        (jnp.bool_(True), False, True),
        (jnp.complex64(2j), 0j, 2j),
        (7, jnp.int32(0), jnp.int32(7)),
        (7, jax.ShapeDtypeStruct((), jnp.uint8), jnp.uint8(7)),
        (0.1, jnp.float32(0), jnp.float32(0.1)),
        (math.inf, jnp.float32(0), jnp.float32(math.inf)),
        (2j, jnp.complex64(0), jnp.complex64(2j)),
    ],
)
def test_numbers_of_pythons_and_arrays_of_one_stand_for_one_another(tmp_path, saved, template, expected):
    save_checkpoint(tmp_path / "c", {"n": saved})
    loaded = load_checkpoint(tmp_path / "c", {"n": template})["n"]
    assert (type(loaded), jnp.result_type(loaded)) == (type(expected), jnp.result_type(expected))
    assert loaded == expected


@pytest.mark.parametrize(
    ("saved", "template", "said"),
    [
        (jnp.int32(7), 0.0, "n is int32 and the template's is float64"),
        (jnp.float32(7), 0, "n is float32 and the template's is int64"),
        (jnp.bool_(True), 0, "n is bool and the template's is int64"),
        (jnp.ones(1, jnp.int32), 0, "n has shape (1,) and the template's is ()"),
        (jax.random.key(0), 0, "n is key<fry> and the template's is int64"),
        (0, jax.random.key(0), "n is int64 and the template's is key<fry>"),
        (7, jnp.float32(0), "n is int64 and the template's is float32"),
        (jnp.int32(7), jnp.uint8(0), "n is int32 and the template's is uint8"),
        (0.1, np.float32(0), "n is float64 and the template's is float32"),
        (np.arange(3), jnp.arange(3), "n is int64 and the template's is int32"),
        (2**40, jnp.int32(0), "n is 1099511627776 and the template's is int32, which can't hold it"),
        (-1, jnp.uint32(0), "n is -1 and the template's is uint32, which can't hold it"),
        (1e300, jnp.float32(0), "n is 1e+300 and the template's is float32, which can't hold it"),
    ],
)
def test_numbers_of_another_kind_and_those_that_dont_fit_are_refused(tmp_path, saved, template, said):
    save_checkpoint(tmp_path / "c", {"n": saved})
    with pytest.raises(CheckpointError, match=re.escape(f"checkpoint: {said}")):
        load_checkpoint(tmp_path / "c", {"n": template})


def test_a_state_that_counts_from_a_python_zero_is_loaded_into_a_fresh_one(tmp_path):
    fresh = {"step": 0, "rate": 0.1, "w": jnp.zeros(2)}
    trained = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state))(fresh)
    save_checkpoint(tmp_path / "c", trained)
    loaded = load_checkpoint(tmp_path / "c", fresh)
    assert (loaded["step"], type(loaded["step"])) == (1, int)
    save_checkpoint(tmp_path / "r", replicate(fresh, 1), unreplicate=True)
    assert load_checkpoint(tmp_path / "r", fresh)["step"] == 0
    save_checkpoint(tmp_path / "f", fresh)
    assert load_checkpoint(tmp_path / "f", jax.eval_shape(lambda: fresh))["step"].dtype == jnp.int32


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"w": jnp.ones((3, 2)), "n": 1}, "w has shape (2, 3) and the template's is (3, 2)"),
        ({"w": jnp.ones((2, 3), jnp.int32), "n": 1}, "w is float32 and the template's is int32"),
        ({"w": jnp.ones((2, 3))}, "n is not in the template"),
        ({"w": jnp.ones((2, 3)), "n": 1, "more": 1}, "more is not in the checkpoint"),
        ({"w": jax.random.key(0), "n": 1}, "w is float32 and the template's is key<fry>"),
    ],
)
def test_what_doesnt_fit_is_named(tmp_path, template, message):
    save_checkpoint(tmp_path / "c", {"w": jnp.ones((2, 3)), "n": 1})
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(tmp_path / "c", template)


def test_a_name_that_is_lost_in_a_file_is_refused(tmp_path):
    """Safetensors have metadata of their own under it, so that the whole checkpoint could not be read again."""
    with pytest.raises(CheckpointError, match=r"a leaf of the pytree is named __metadata__, .*; rename it$"):
        save_checkpoint(tmp_path / "c", {"__metadata__": jnp.ones(2)})
    save_checkpoint(tmp_path / "c", {"a": {"__metadata__": jnp.ones(2)}})
    assert load_checkpoint(tmp_path / "c", {"a": {"__metadata__": jnp.zeros(2)}})["a"]["__metadata__"].all()


def test_two_leaves_of_one_name_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="two leaves of the pytree are named a/b"):
        save_checkpoint(tmp_path / "c", {"a": {"b": 1}, "a/b": 2})


@pytest.mark.parametrize("name", [ARRAYS, "kinds.json", MANIFEST])
def test_damage_is_noticed(tmp_path, name):
    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})
    content = bytearray((tmp_path / "c" / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "c" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "c"))):
        load_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})


def test_a_checkpoint_that_isnt_there(tmp_path):
    with pytest.raises(CheckpointError, match="no valid manifest"):
        load_checkpoint(tmp_path / "none", {"w": jnp.ones(3)})


def test_it_replaces_checkpoints_only(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})
    save_checkpoint(tmp_path / "c", {"w": jnp.zeros(3)})
    assert np.array_equal(load_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})["w"], [0, 0, 0])
    assert [f.name for f in tmp_path.iterdir()] == ["c"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="something else than a checkpoint"):
        save_checkpoint(tmp_path / "thesis", {"w": jnp.ones(3)})
    with pytest.raises(CheckpointError, match="something else than a checkpoint"):
        save_checkpoint(tmp_path / "thesis" / "chapter.tex", {"w": jnp.ones(3)})
    (tmp_path / "thesis" / ARRAYS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="something else than a checkpoint"):
        save_checkpoint(tmp_path / "thesis", {"w": jnp.ones(3)})
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "precious"


def test_a_failure_leaves_the_one_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            save_checkpoint(tmp_path / "c", {"w": jnp.zeros(3)})
    assert np.array_equal(load_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})["w"], [1, 1, 1])


def test_a_crash_between_the_renames_loses_nothing(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": jnp.ones(3)})
    (tmp_path / "c").rename(aside_of(tmp_path / "c"))
    assert np.array_equal(load_checkpoint(tmp_path / "c", {"w": jnp.zeros(3)})["w"], [1, 1, 1])
    save_checkpoint(tmp_path / "c", {"w": jnp.full(3, 2.0)})
    assert np.array_equal(load_checkpoint(tmp_path / "c", {"w": jnp.zeros(3)})["w"], [2, 2, 2])
    assert problem_with(tmp_path / "c", pytrees.FILES) is None
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def test_a_device_axis_must_be_there_to_be_dropped(tmp_path):
    with pytest.raises(ValueError, match="no device axis"):
        save_checkpoint(tmp_path / "c", {"step": 3}, unreplicate=True)
    save_checkpoint(tmp_path / "c", {"step": jnp.array([3, 3])}, unreplicate=True)
    assert load_checkpoint(tmp_path / "c", {"step": jnp.int32(0)})["step"] == 3


# --- steps, metadata, what is nested ---------------------------------------------------------------------------------


def weights(x):
    return {"w": jnp.full(3, float(x))}


def test_checkpoints_of_steps_with_metadata(tmp_path):
    facts = {"env": "CartPole-v1", "returns": [1.5, 2.0]}
    assert save_checkpoint(tmp_path, weights(1), step=10, metadata=facts) == tmp_path / "step_10"
    save_checkpoint(tmp_path, weights(2), step=20)
    assert load_checkpoint(tmp_path, like=weights(0), step=10)["w"][0] == 1
    assert load_checkpoint(tmp_path, weights(0), step=20)["w"][0] == 2
    assert load_metadata(tmp_path, step=10) == facts
    assert load_metadata(tmp_path, step=20) is None
    line = f"checkpoint: {tmp_path} holds none of step 30, but of steps 20, 10; give step=20"
    with pytest.raises(CheckpointError, match=f"^{re.escape(line)}$"):
        load_checkpoint(tmp_path, weights(0), step=30)
    with pytest.raises(CheckpointError, match=f"^{re.escape(line)}$"):
        load_metadata(tmp_path, step=30)


def test_a_directory_of_steps_alone_says_which_there_are(tmp_path):
    for step in range(1, 8):
        save_checkpoint(tmp_path, weights(step), step=step)
    line = f"checkpoint: {tmp_path} holds none of its own, but of steps 7, 6, 5, 4, 3 and 2 more; give step=7"
    with pytest.raises(CheckpointError, match=f"^{re.escape(line)}$"):
        load_checkpoint(tmp_path, weights(0))
    (tmp_path / "step_7" / MANIFEST).write_text("{}")  # damaged, and asked for
    with pytest.raises(CheckpointError, match="step_7 has no valid manifest"):
        load_checkpoint(tmp_path, weights(0), step=7)
    save_checkpoint(tmp_path, weights(9))
    assert load_checkpoint(tmp_path, weights(0))["w"][0] == 9


def test_a_step_is_given_by_name(tmp_path):
    untyped: Any = save_checkpoint
    for wrong, named in ((4, "step=4"), ("x", "step=4")):
        with pytest.raises(ValueError, match=f"unreplicate: {wrong!r} was given, .* give a step by name, {named}$"):
            untyped(tmp_path / "c", weights(1), wrong)
    assert not (tmp_path / "c").exists()
    save_checkpoint(tmp_path / "c", {"w": jnp.ones((2, 3))}, True)
    assert load_checkpoint(tmp_path / "c", weights(0))["w"].shape == (3,)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"step": -1}, "step: -1 must be a whole number, at least 0"),
        ({"step": "a"}, "step: 'a' must be"),
        ({"metadata": {"f": len}}, "metadata: it is saved as JSON, which this isn't"),
    ],
)
def test_steps_and_metadata_that_are_none_are_one_line(tmp_path, settings, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        save_checkpoint(tmp_path / "c", weights(1), **settings)
    assert not (tmp_path / "c").exists()


def test_a_template_is_given_once(tmp_path):
    save_checkpoint(tmp_path / "c", weights(1))
    several: list[dict[str, Any]] = [{}, {"template": weights(0), "like": weights(0)}]
    for given in several:
        with pytest.raises(ValueError, match="give a template of the same structure"):
            load_checkpoint(tmp_path / "c", **given)


def test_what_is_nested_in_a_checkpoint_stays(tmp_path):
    folder = tmp_path / "c"
    save_checkpoint(folder, weights(1), step=10)
    save_checkpoint(folder, weights(2))  # among checkpoints of steps
    save_checkpoint(folder, weights(3), step=20)
    (folder / "notes.txt").write_text("precious")
    (folder / ".step_30.77.tmp").mkdir()
    for x in (4, 5):
        save_checkpoint(folder, weights(x))
        assert load_checkpoint(folder, weights(0))["w"][0] == x
        assert [load_checkpoint(folder, weights(0), step=n)["w"][0] for n in (10, 20)] == [1, 3]
        assert (folder / "notes.txt").read_text() == "precious"
    (tmp_path / "mine" / "step_1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="something else than a checkpoint"):
        save_checkpoint(tmp_path / "mine", weights(1))


@pytest.mark.parametrize("moved", [0, 1])
def test_a_crash_on_the_way_loses_nothing_that_is_nested(tmp_path, monkeypatch, moved):
    folder = tmp_path / "c"
    save_checkpoint(folder, weights(1))
    for step in (10, 20):
        save_checkpoint(folder, weights(step), step=step)
    rename, left = pytrees.Path.rename, [moved]

    def dies(self, target):
        if self.parent.name == ".c.old":
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", dies)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(folder, weights(2))
    assert load_checkpoint(folder, weights(0))["w"][0] == 2
    assert [load_checkpoint(folder, weights(0), step=n)["w"][0] for n in (10, 20)] == [10, 20]
    save_checkpoint(folder, weights(3))
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["step_10", "step_20"]
    assert [load_checkpoint(folder, weights(0), step=n)["w"][0] for n in (10, 20)] == [10, 20]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_template_that_isnt_bound_to_a_device_gives_arrays_that_arent(tmp_path):
    save_checkpoint(tmp_path / "c", weights(1))
    assert not load_checkpoint(tmp_path / "c", weights(0))["w"].committed
    bound = jax.device_put(jnp.zeros(3), jax.devices()[1])
    loaded = load_checkpoint(tmp_path / "c", {"w": bound})["w"]
    assert loaded.committed
    assert loaded.sharding == bound.sharding


def test_complex_numbers_come_back_bit_for_bit(tmp_path):
    grid = np.arange(12.0).reshape(3, 4) + 1j * np.linspace(-1.0, 1.0, 12).reshape(3, 4)
    saved = {
        "number": 1.5 - 0.25j,
        "scalar": np.complex128(complex(np.inf, -0.0)),
        "grid": grid.T,
        "empty": grid[:0],
        "small": jnp.asarray(grid.astype(np.complex64)),
    }
    save_checkpoint(tmp_path / "c", saved)
    fresh = {
        "number": 0j,
        "scalar": np.complex128(0),
        "grid": np.zeros_like(grid.T),
        "empty": grid[:0],
        "small": jnp.zeros((3, 4), np.complex64),
    }
    loaded = load_checkpoint(tmp_path / "c", fresh)
    assert bits(loaded) == bits(saved)
    assert (type(loaded["number"]), type(loaded["scalar"])) == (complex, np.complex128)
    with pytest.raises(CheckpointError, match="grid has shape"):
        load_checkpoint(tmp_path / "c", fresh | {"grid": grid})


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (2**70, "1180591620717411303424 is more than 64 bits hold"),
        (np.array([None, 1], object), "its dtype is object"),
        (np.zeros(2, np.longdouble), f"its dtype is {np.dtype(np.longdouble)}"),
        (np.array(["abc"]), "its dtype is <U3"),
        (np.array(["a"]), "its dtype is <U1"),  # 32 bits, which were saved, and could not be read again
        (np.zeros(2, [("x", "f4")]), "its dtype is [('x', '<f4')]"),
    ],
)
def test_a_leaf_that_no_checkpoint_can_hold_is_named(tmp_path, leaf, said):
    save_checkpoint(tmp_path / "c", {"w": np.ones(2)})
    for tree, name in (({"w": np.ones(2), "deep": [0, leaf]}, "deep/1"), (leaf, "the leaf")):
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(tmp_path / "c", tree)
        assert str(caught.value) == f"checkpoint: {name} can't be saved: {said}"
    assert load_checkpoint(tmp_path / "c", {"w": np.zeros(2)})["w"].tolist() == [1.0, 1.0]
