"""The mesh, what lies on it, sums over it and copies of it, on up to eight devices of one process."""

import contextlib
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from refusals import error_of

from lockstep.config.checks import resolve
from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import DesyncError
from lockstep.core.topology import Topology
from lockstep.jax import PPOConfig, RunnerConfig, make, training
from lockstep.jax.checkpoints.pytrees import load_checkpoint, save_checkpoint
from lockstep.jax_engine import session
from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.distributed import placement, processes
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, TIME_SHARDED
from lockstep.jax_engine.distributed.reductions import (
    AXES,
    device_index,
    gather_shards,
    materialized,
    sum_shards,
    tree_sum,
)
from lockstep.jax_engine.nets.parameters import SlicedLayout
from lockstep.jax_engine.program.fingerprints import Copies, check_copies
from lockstep.jax_engine.setup import set_up
from lockstep.jax_engine.state import TrainState

pytestmark = pytest.mark.optimized

FLAGS_OF_THE_USER = "--xla_cpu_multi_thread_eigen=false"


@pytest.fixture(params=[(1, 8), (2, 8), (8, 8), (1, 3)], ids=lambda p: f"fsdp{p[0]}of{p[1]}")
def mesh(request):
    fsdp, devices = request.param
    return meshes.make_mesh(fsdp, devices)


# --- the mesh -------------------------------------------------------------------------------------------------------


def test_devices_are_counted_and_not_invented():
    assert meshes.get_num_devices() == 8
    assert meshes.get_num_devices(3) == 3
    assert {"9", "8"} <= set(re.findall(r"\d+", error_of(meshes.get_num_devices, 9)))
    assert "at least 1" in error_of(meshes.get_num_devices, 0)
    assert "2.5 must be a whole number" in error_of(meshes.get_num_devices, 2.5)


def test_a_mesh_has_its_axes_in_the_order_of_devices():
    mesh = meshes.make_mesh(num_fsdp_devices=2)
    assert mesh.axis_names == ("batch", "fsdp")
    assert dict(mesh.shape) == {"batch": 4, "fsdp": 2}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
    assert [device.id for device in mesh.devices.flat] == list(range(8))
    assert dict(meshes.make_mesh(num_devices=3).shape) == {"batch": 3, "fsdp": 1}


@pytest.mark.parametrize(
    ("fsdp", "devices", "numbers"), [(3, None, {"3", "8"}), (2, 3, {"2", "3"}), (0, 4, {"0", "4"})]
)
def test_an_fsdp_axis_must_divide(fsdp, devices, numbers):
    message = error_of(meshes.make_mesh, fsdp, devices)
    assert "num_fsdp_devices" in message
    assert set(numbers) <= set(re.findall(r"\d+", message))


def test_more_devices_than_present():
    assert {"16", "8"} <= set(re.findall(r"\d+", error_of(meshes.make_mesh, 1, 16)))


def test_the_active_mesh_is_that_of_the_innermost_block():
    outer, inner = meshes.make_mesh(), meshes.make_mesh(2, 4)
    assert meshes.active_mesh() is None
    with meshes.set_mesh(outer) as given:
        assert given is outer
        with contextlib.suppress(ZeroDivisionError), meshes.set_mesh(inner):
            assert meshes.active_mesh() is inner
            assert jax.sharding.get_mesh() == inner
            raise ZeroDivisionError
        assert meshes.active_mesh() is outer
    assert meshes.active_mesh() is None


# --- shardings ------------------------------------------------------------------------------------------------------


def spec_of(shape, parts, dtype=jnp.float32, **kwargs):
    leaf = jax.ShapeDtypeStruct(shape, dtype)
    return tuple(meshes.fsdp_sharding({"x": leaf}, meshes.make_mesh(parts), **kwargs)["x"].spec)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((1024, 1024), ("fsdp", None)),  # exactly 4 MiB; the first among equals
        ((1024, 1023), ()),  # just below
        ((512, 4096), (None, "fsdp")),  # the largest
        ((3000, 1023, 2), ("fsdp", None, None)),
        ((5000001, 2), (None, "fsdp")),  # the largest that divides
        ((1025, 1027), ()),  # none divides
        ((4 * 2**20,), ()),  # one dimension
        ((), ()),
        ((0, 4096), ()),
    ],
)
def test_the_largest_dimension_that_divides_is_cut(shape, spec):
    assert spec_of(shape, 2) == spec


def test_the_threshold_is_in_bytes():
    assert spec_of((1024, 1024), 2, jnp.bfloat16) == ()
    assert spec_of((1024, 1024), 2, jnp.bfloat16, min_size_mbytes=2) == ("fsdp", None)
    assert spec_of((8, 4), 2, min_size_mbytes=0) == ("fsdp", None)


def mesh_of_kinds(*kinds) -> Any:
    devices = np.array([types.SimpleNamespace(device_kind=kind) for kind in kinds]).reshape(-1, 1)
    return types.SimpleNamespace(devices=devices, size=devices.size)


def test_devices_of_different_kinds_are_no_mesh_of_a_run(monkeypatch):
    meshes.check_one_kind(mesh_of_kinds("H100", "H100"))
    mixed = mesh_of_kinds("H100", "A100", "H100")
    line = error_of(meshes.check_one_kind, mixed)
    assert line.startswith("num_devices: 3 devices of different kinds (1 x A100, 2 x H100)")
    monkeypatch.setattr(session, "make_mesh", lambda *_: mixed)
    config = resolve(Config.model_validate({"engine": "jax", "env": "lockstep/CartPole-v1"}), 3)
    assert error_of(session.open_program, config, Topology(), RunOptions(simulate_devices=8)) == line


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_librarys_exact_training_is_on_devices_of_one_kind(reduction, monkeypatch):
    checked = []
    monkeypatch.setattr(training, "check_one_kind", checked.append)
    runner = RunnerConfig(8, num_devices=2, num_envs=1, reduction=reduction)
    made = training.Training(*make("CartPole-v1"), PPOConfig(n_steps=4), runner)
    assert checked == [made.program.mesh] * (reduction == "exact")


def test_an_fsdp_axis_of_one_cuts_nothing():
    assert spec_of((4096, 4096), 1) == ()
    assert spec_of((4096, 4096), 2) == ("fsdp", None)


def test_keys_of_random_numbers_are_not_cut():
    tree = {"w": jnp.ones((4, 8)), "key": jax.random.split(jax.random.key(0), (4, 8))}
    found = meshes.fsdp_sharding(tree, meshes.make_mesh(2), min_size_mbytes=0)
    assert {name: tuple(sharding.spec) for name, sharding in found.items()} == {"w": (None, "fsdp"), "key": ()}


def test_fsdp_holds_its_part_only():
    mesh = meshes.make_mesh(4)
    parameters = {"w": jnp.ones((1024, 2048)), "b": jnp.ones(2048)}
    placed = jax.tree.map(placement.place, parameters, meshes.fsdp_sharding(parameters, mesh))
    assert placed["w"].addressable_shards[0].data.shape == (1024, 512)
    assert placed["b"].addressable_shards[0].data.shape == (2048,)


def test_activations_are_kept_cut():
    mesh = meshes.make_mesh(2)
    x = placement.replicate_on_mesh(jnp.ones((16, 3)), mesh)

    def network(x, given):
        return meshes.activation_sharding_constraint(x * 2, given)

    cut = jax.jit(network, static_argnums=1)(x, mesh)
    assert cut.sharding.shard_shape(cut.shape) == (2, 3)
    whole = jax.jit(network, static_argnums=1)(x, None)
    assert whole.sharding.shard_shape(whole.shape) == (16, 3)
    with meshes.set_mesh(mesh):
        active = jax.jit(lambda x: meshes.activation_sharding_constraint(x + 1))(x)
    assert active.sharding.shard_shape(active.shape) == (2, 3)
    assert {"12", "8"} <= set(re.findall(r"\d+", error_of(meshes.activation_sharding_constraint, jnp.ones(12), mesh)))


# --- placing --------------------------------------------------------------------------------------------------------


def test_rows_are_cut_in_the_order_of_devices(mesh):
    rows = np.arange(mesh.size * 2)
    tree = placement.shard_pytree({"a": rows, "b": jnp.ones((mesh.size, 3))}, mesh)
    for i, device in enumerate(mesh.devices.flat):
        (part,) = [s.data for s in tree["a"].addressable_shards if s.device == device]
        assert np.array_equal(part, [2 * i, 2 * i + 1])
    assert tree["b"].sharding.shard_shape(tree["b"].shape) == (1, 3)


def test_environments_that_dont_divide():
    mesh = meshes.make_mesh(num_devices=3)
    message = error_of(placement.shard_pytree, {"obs": np.zeros((10, 4))}, mesh)
    assert message == "obs: 10 environments don't divide over 3 devices (they must be divisible by them); use 9 or 12"
    assert "2 environments" in error_of(placement.shard_pytree, np.zeros(2), mesh)
    assert "scalar" in error_of(placement.shard_pytree, {"step": 3}, mesh)
    assert placement.shard_pytree(np.zeros((9, 4)), mesh).shape == (9, 4)


def test_host_rows_come_back_as_they_went(mesh):
    rows = np.random.default_rng(0).normal(size=(5, mesh.size * 2, 3)).astype(np.float32)
    placed = jax.device_put(rows, meshes.named_sharding(mesh, TIME_SHARDED))
    assert np.array_equal(placement.fetch_rows(placed, axis=1), rows)
    first = placement.shard_rows(rows[0], mesh)
    assert first.sharding.is_equivalent_to(meshes.named_sharding(mesh, SHARDED), 2)
    assert np.array_equal(placement.fetch_rows(first), rows[0])
    assert np.array_equal(placement.fetch_rows(placement.replicate_on_mesh(jnp.asarray(rows), mesh)), rows)
    assert str(mesh.size) in error_of(placement.shard_rows, rows[0, 1:], mesh)


def test_a_copy_for_each_device_and_back(mesh):
    tree = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "n": 4, "key": jax.random.key(3)}
    copies = placement.replicate(tree, mesh)
    assert copies["w"].shape == (mesh.size, 2, 3)
    assert copies["w"].sharding.shard_shape(copies["w"].shape) == (1, 2, 3)
    assert all(np.array_equal(s.data[0], tree["w"]) for s in copies["w"].addressable_shards)
    back = placement.unreplicate(copies)
    assert np.array_equal(back["w"], tree["w"])
    assert back["n"] == 4
    assert back["key"] == tree["key"]
    assert np.array_equal(placement.unreplicate(np.array([[1, 2], [3, 4]])), [1, 2])
    assert "scalar" in error_of(placement.unreplicate, {"n": jnp.ones(())})


def test_a_row_that_is_cut_further_comes_back_whole():
    mesh = meshes.make_mesh(4)
    values = np.arange(24.0, dtype=np.float32).reshape(2, 12)
    cut = placement.place(values, meshes.named_sharding(mesh, PartitionSpec("batch", "fsdp")))
    assert cut.addressable_shards[0].data.shape == (1, 3)
    assert np.array_equal(placement.unreplicate(cut), values[0])


def state_with_slices(mesh, changed=()):
    """A training state of one cut and one whole parameter; devices in ``changed`` hold another slice of the cut one."""
    values = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    layout = SlicedLayout({"w": (8, 4), "b": (3,)}, {"w": 0, "b": None})

    def held():
        whole = placement.place(values, meshes.named_sharding(mesh, meshes.cut_along(0)))
        parts = [
            jax.device_put(s.data + 1 if number in changed else s.data, s.device)
            for number, s in enumerate(whole.addressable_shards)
        ]
        cut = jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, parts)
        return {"w": cut, "b": placement.replicate_on_mesh(np.ones(3, np.float32), mesh)}

    count, rate = (placement.replicate_on_mesh(x, mesh) for x in (jnp.int32(0), jnp.float32(1)))
    return TrainState(held(), optax.ScaleByAdamState(count, held(), held()), rate), layout


def test_copies_of_a_slice_are_compared_with_one_another():
    state, layout = state_with_slices(meshes.make_mesh(4))
    names, rows = Copies.of(state, layout).fingerprints()
    assert "policy/w" in names
    assert (rows == rows[0]).all()
    check_copies(Copies.of(state, layout), "now")
    for device in (6, 1):
        with pytest.raises(DesyncError, match=r"first policy/w"):
            check_copies(Copies.of(*state_with_slices(meshes.make_mesh(4), (device,))), "now")
    names, _ = Copies.of(*state_with_slices(meshes.make_mesh(8))).fingerprints()
    assert "policy/w" not in names  # each slice is held once
    assert "policy/b" in names


def test_replicate_takes_the_active_mesh():
    with meshes.set_mesh(meshes.make_mesh(1, 3)):
        assert placement.replicate(jnp.ones(2)).shape == (3, 2)
        assert placement.split_key_across_devices(jax.random.key(0)).shape == (3,)
    assert placement.replicate(jnp.ones(2)).shape == (8, 2)


@pytest.mark.parametrize("devices", [2, 8])
def test_copies_are_made_and_joined_whatever_mesh_is_active(devices, tmp_path):
    """JAX refuses a program whose mesh has other devices than its arrays, as a state of a training has."""
    key, state = jax.random.key(3), {"w": jnp.arange(3.0), "key": jax.random.key(4)}
    there = jax.device_put((key, state), jax.devices()[5])
    copies = placement.replicate(state, meshes.make_mesh(num_devices=4))
    with meshes.set_mesh(meshes.make_mesh(num_devices=devices)) as active:
        again = placement.replicate(there[1])
        keys, back = placement.split_key_across_devices(there[0]), placement.unreplicate(copies)
        save_checkpoint(tmp_path / "c", copies, unreplicate=True)
        assert meshes.active_mesh() is active
    assert again["w"].sharding.mesh == active
    assert keys.shape == (devices,)
    assert back["key"] == state["key"]
    assert back["w"].tolist() == load_checkpoint(tmp_path / "c", state)["w"].tolist() == [0.0, 1.0, 2.0]


def test_copies_are_made_and_checkpoints_loaded_under_a_guard(tmp_path):
    key = jax.random.key(3)
    save_checkpoint(tmp_path / "c", {"w": jnp.arange(3.0), "key": key})
    template = jax.device_put({"w": jnp.zeros(3), "key": key}, jax.devices()[0])
    with jax.transfer_guard("disallow"):
        loaded = load_checkpoint(tmp_path / "c", template)
        keys, copies = placement.split_key_across_devices(key, 2), placement.replicate(3)
    assert loaded["w"].tolist() == [0.0, 1.0, 2.0]
    assert (keys.shape, np.shape(copies)) == ((2,), (8,))


def test_a_traced_copy_is_joined_too():
    assert jax.jit(placement.unreplicate)({"w": jnp.ones((4, 3))})["w"].shape == (3,)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_each_device_has_a_key_of_its_own(make):
    keys = placement.split_key_across_devices(make(5), 4)
    expected = jax.random.split(make(5), 4)
    assert len(keys.addressable_shards) == 4
    assert bool((keys == expected).all())
    assert len({str(jax.random.uniform(key)) for key in expected}) == 4
    assert "8" in error_of(placement.split_key_across_devices, make(5), 9)


# --- inside a program -----------------------------------------------------------------------------------------------

DEVICES = [(1, 1), (1, 2), (2, 4), (1, 8), (4, 8)]


def summed(mesh, x, y, tree):
    def of_a_device(x, y):
        products = jax.lax.map(lambda rows: {"p": rows[0] * rows[1], "q": jnp.sin(rows[0])[:3]}, (x, y))
        return tree(products | {"unmapped": x * y, "count": jnp.ones(len(x), int)})

    program = jax.jit(meshes.over_mesh(of_a_device, mesh, SHARDED, REPLICATED))
    return jax.tree.map(placement.fetch, program(x, y)), program.lower(x, y).compile().as_text() or ""


def unprotected(tree):
    return jax.tree.map(lambda x: tree_sum(jax.lax.all_gather(tree_sum(x), AXES)), tree)


def shards(seed=0, num_shards=8):
    random = np.random.default_rng(seed)
    return [random.normal(size=(num_shards, 40, 50)).astype(np.float32) for _ in range(2)]


def test_the_tree_gives_the_same_bits_on_any_number_of_devices():
    x, y = shards()
    first, _ = summed(meshes.make_mesh(*DEVICES[0]), x, y, sum_shards)
    assert np.allclose(first["p"], (x.astype(float) * y).sum(0), atol=1e-5)
    assert first["count"] == 8
    for devices in DEVICES[1:]:
        result, program = summed(meshes.make_mesh(*devices), x, y, sum_shards)
        assert all(np.array_equal(result[name], first[name]) for name in first), devices
        gathers = re.findall(r"= (\S+)\[.*? all-gather\(", program)
        assert len(gathers) == 2, gathers  # one a dtype


def test_without_its_protection_it_would_not():
    x, y = shards()
    results = [
        summed(meshes.make_mesh(*devices), x, y, unprotected)[0]["unmapped"] for devices in (DEVICES[0], DEVICES[3])
    ]
    assert not np.array_equal(*results)


def test_shards_meet_in_their_order(mesh):
    local = 2
    x = np.arange(mesh.size * local, dtype=np.int32)

    def of_a_device(x):
        first = device_index() * local
        return gather_shards({"x": x, "twice": 2 * x}), x == first + jnp.arange(local)

    program = jax.jit(meshes.over_mesh(of_a_device, mesh, SHARDED, (REPLICATED, SHARDED)))
    gathered, owned = program(x)
    assert np.array_equal(gathered["x"], x)
    assert np.array_equal(gathered["twice"], 2 * x)
    assert np.asarray(owned).all()


def test_arrays_without_elements_are_not_handed_to_what_a_device_does():
    """JAX 0.11's compiler died of them, where they were used."""
    mesh = meshes.make_mesh(1, 4)

    def add(x, empty):
        return x + 1.0, empty * 2.0

    def used(program):
        (mapped,) = jax.make_jaxpr(program)(*given).eqns
        inner = mapped.params["jaxpr"]
        return [any(var is x for eqn in inner.eqns for x in eqn.invars) for var in inner.invars]

    given = jnp.arange(8.0), jnp.zeros((8, 0))
    specs = ((SHARDED, SHARDED), (SHARDED, SHARDED))
    ours = meshes.over_mesh(add, mesh, *specs)
    assert used(ours) == [True, False]
    assert used(jax.shard_map(add, mesh=mesh, in_specs=specs[0], out_specs=specs[1])) == [True, True]
    moved, empty = jax.jit(ours)(*given)
    np.testing.assert_array_equal(moved, np.arange(1.0, 9.0))
    assert empty.shape == (8, 0)


def test_what_is_written_to_memory_is_unchanged():
    tree = {"f": jnp.arange(4.0), "i": jnp.arange(4), "empty": jnp.zeros((0, 2)), "b": jnp.array([True])}
    out = jax.jit(materialized)(tree)
    assert all(np.array_equal(out[name], tree[name]) for name in tree)
    bad = jax.jit(materialized)(jnp.array([1.0, jnp.inf, jnp.nan]))
    assert np.array_equal(bad, [1.0, np.inf, np.nan], equal_nan=True)
    assert np.isnan(jax.jit(materialized)(jnp.array([jnp.nan, 1.0]))[0])


# --- set-up ---------------------------------------------------------------------------------------------------------


def test_set_up_is_done_once(monkeypatch):
    processes.set_up_jax(threads=1, platform="cpu", simulate_devices=8, topology=Topology())
    processes.set_up_jax(threads=1, platform="cpu", simulate_devices=4, topology=Topology())  # a run takes the first
    message = error_of(processes.set_up_jax, 1, "cpu", 16, Topology())
    assert {"16", "8"} <= set(re.findall(r"\d+", message))
    assert "finds none here" in error_of(processes.set_up_jax, 1, "cuda", None, Topology())
    monkeypatch.setattr(jax, "devices", lambda platform: [platform])  # there is one, but JAX has begun without it
    assert "fresh" in error_of(processes.set_up_jax, 1, "cuda", None, Topology())


def test_facts_of_the_machine():
    facts = processes.machine_facts()
    assert facts["device"] == "cpu"
    assert facts["jax"] == jax.__version__
    assert FLAGS_OF_THE_USER in facts["xla flags"]
    processes.check_ranks_alike({"config": "config"})


def test_a_process_says_of_what_kinds_its_own_devices_are(monkeypatch):
    """All processes' devices begin with those of the first, which each of them would tell alike."""
    monkeypatch.setattr(jax, "local_devices", lambda: list(mesh_of_kinds("H100", "A100", "H100").devices.flat))
    monkeypatch.setattr(set_up, "_platform_version", lambda: "")
    assert processes.machine_facts()["device"] == "A100, H100"


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_checkpoints_move_between_numbers_of_devices(tmp_path):
    values = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    on_four = placement.place(values, meshes.data_sharding(meshes.make_mesh(2, 4)))
    save_checkpoint(tmp_path / "c", {"w": on_four})
    one = load_checkpoint(tmp_path / "c", {"w": jnp.zeros((8, 16))})["w"]
    assert len(one.sharding.device_set) == 1
    assert np.array_equal(one, values)
    save_checkpoint(tmp_path / "c", {"w": one})
    back = load_checkpoint(tmp_path / "c", {"w": jnp.zeros_like(on_four)})["w"]
    assert back.sharding.is_equivalent_to(on_four.sharding, 2)
    assert np.array_equal(back, values)


def test_checkpoints_with_a_device_axis(tmp_path):
    state = {"w": jnp.arange(3.0), "key": jax.random.key(2), "act": jax.nn.tanh, "step": jnp.int32(4)}
    saved = {name: value if callable(value) else placement.replicate(value) for name, value in state.items()}
    save_checkpoint(tmp_path / "c", saved, unreplicate=True)
    assert np.array_equal(load_checkpoint(tmp_path / "c", state)["w"], [0, 1, 2])
    spread = load_checkpoint(tmp_path / "c", state, replicate_to=4)
    assert spread["w"].shape == (4, 3)
    assert len(spread["w"].sharding.device_set) == 4
    assert bool((spread["key"] == state["key"]).all())
    assert spread["act"] is jax.nn.tanh
    whole = load_checkpoint(tmp_path / "c", state, replicate_to=meshes.make_mesh(2))
    assert whole["w"].shape == (3,)
    assert whole["w"].sharding.is_fully_replicated
    assert len(whole["w"].sharding.device_set) == 8
    assert "8" in error_of(load_checkpoint, tmp_path / "c", state, replicate_to=9)
