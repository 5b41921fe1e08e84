"""Checkpoints of any pytree: what is saved comes back bit for bit, and what doesn't fit or is damaged says so."""

import json
import re
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.jax import checkpoint as pytree_checkpoint
from lockstep.jax.checkpoint import ARRAYS, load_checkpoint, save_checkpoint
from lockstep.runs.checkpoint import MANIFEST, CheckpointError, aside_of, problem_with


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
    assert problem_with(tmp_path / "c", pytree_checkpoint.FILES) is None
    assert [f.name for f in tmp_path.iterdir()] == ["c"]


def test_a_device_axis_must_be_there_to_be_dropped(tmp_path):
    with pytest.raises(ValueError, match="no device axis"):
        save_checkpoint(tmp_path / "c", {"step": 3}, unreplicate=True)
    save_checkpoint(tmp_path / "c", {"step": jnp.array([3, 3])}, unreplicate=True)
    assert load_checkpoint(tmp_path / "c", {"step": jnp.int32(0)})["step"] == 3
