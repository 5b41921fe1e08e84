"""Training on several devices of one process: collectives of the compiled program, blocks, periods, FSDP."""

from collections import Counter
from functools import cache, partial

import jax
import numpy as np
import pytest
from compiled_collectives import by_kind, collectives, unordered
from kinds_of_training import CHANGES, STEPS
from mishaps import rotated_over_devices, shuffled_over_devices
from small_programs import (
    apart,
    arrays_of,
    bytes_on_devices,
    compiled_text,
    copies_equal,
    opened,
    program_of,
    small_config,
    trained,
)
from variants import variants

from lockstep.core import tree as trees
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import Topology
from lockstep.jax_engine import periodic, session
from lockstep.jax_engine.distributed import mesh as meshes
from lockstep.jax_engine.host.runner import HostRunner
from lockstep.jax_engine.program.iterations import Inputs
from lockstep.jax_engine.shards import blocks
from lockstep.jax_engine.state import init_state, place_state, state_specs
from lockstep.jax_engine.update import Update

pytestmark = pytest.mark.quick

SHARDS_OF_FOUR = {"num_envs": 32, "num_shards": 8}
TERMS = 5
HALF = 0.55  # biases and the like stay whole


@cache
def begun(kind: str, devices: int = 2, fsdp: int = 1):
    """A run that has begun; compiled once for all checks that don't train it."""
    changes = CHANGES[kind]
    return opened(small_config(devices, **changes), devices, fsdp)


@cache
def after_one_iteration(kind: str, devices: int = 2, fsdp: int = 1):
    """Arrays of the training state after one iteration, and the run."""
    run = begun(kind, devices, fsdp)
    trained(run)
    return arrays_of(run), run


@pytest.fixture
def cut_everything(monkeypatch):
    """FSDP of small networks."""
    monkeypatch.setattr(session, "fsdp_sharding", partial(meshes.fsdp_sharding, min_size_mbytes=0))


# --- collectives of the compiled program ----------------------------------------------------------------------------


def counted(run):
    """Collectives of an iteration in the update (float32) and before it (float64), and all by kind."""
    found = collectives(compiled_text(run))
    f32 = {c: n for c, n in found.items() if c.dtype == "f32"}
    f64 = {c: n for c, n in found.items() if c.dtype == "f64"}
    assert len(f32) + len(f64) == len(found)
    return f32, f64, by_kind(found)


@pytest.mark.parametrize(
    ("kind", "kinds", "copies"),
    [("exact", {"lockstep_tree_sum": STEPS, "lockstep_gather": 1}, 1), ("exact by xla", {"all-gather": STEPS + 1}, 2)],
)
def test_exact_brings_together_one_gradient_a_minibatch_and_the_statistics_once(kind, kinds, copies):
    run = begun(kind)
    update_, statistics, found = counted(run)
    assert found == kinds
    ((gradient, times),) = update_.items()
    assert times == STEPS
    assert gradient.nbytes == copies * 4 * (run.program.layout.size + TERMS)
    ((moments, once),) = statistics.items()
    assert once == 1
    assert moments.nbytes == 8 * (2 + 8 * (3 * STEPS + 6))  # stop codes; count, mean, M2 of 8 shards' minibatches, fit


IN_MEMORY, BY_XLA = ("lockstep_tree_sum", "lockstep_gather"), ("all-gather", "all-gather")
SUMS = [("", IN_MEMORY, 1), (" by xla", BY_XLA, 2)]


@pytest.mark.parametrize(("by", "kinds", "copies"), SUMS)
def test_fast_sums_one_gradient_a_minibatch(by, kinds, copies):
    run = begun(f"fast{by}")
    update_, statistics, found = counted(run)
    assert Counter(found) == Counter({kinds[0]: STEPS}) + Counter({kinds[1]: 1})
    ((gradient, times),) = update_.items()
    assert (gradient.kind, times) == (kinds[0], STEPS)
    assert gradient.nbytes == copies * 4 * (run.program.layout.size + TERMS)
    assert sum(statistics.values()) == 1


@pytest.mark.parametrize(("by", "kinds", "copies"), SUMS)
def test_a_period_of_four_has_a_quarter_of_the_collectives(by, kinds, copies):
    run = begun(f"periodic{by}")
    update_, _, found = counted(run)
    assert Counter(found) == Counter({kinds[0]: STEPS // 4}) + Counter({kinds[1]: 1})
    ((averaged, _),) = update_.items()
    assert averaged.nbytes == copies * 4 * (3 * run.program.layout.size + TERMS + 2)  # parameters and two moments


@pytest.mark.parametrize(
    ("mistake", "kind"), [(shuffled_over_devices, "lockstep_gather"), (rotated_over_devices, "collective-permute")]
)
def test_samples_that_cross_devices_are_counted(monkeypatch, mistake, kind):
    monkeypatch.setattr(Update, "__call__", mistake)
    found = collectives(compiled_text(begun("exact")))
    (crossing,) = [c for c in found if c.dtype == "u32"]
    assert crossing.kind == kind
    samples = 8 * 16 * 4 * (4 + 1 + 1 + 1 + 1 + 1)  # observations, action, log-probability, advantage, value, return
    assert crossing.nbytes == (samples if kind == "lockstep_gather" else samples // 2)
    assert by_kind(found) == Counter({"lockstep_tree_sum": STEPS, "lockstep_gather": 1}) + Counter([kind])


ORDERED = [kind for kind in CHANGES if kind != "fsdp"]


@pytest.mark.parametrize(
    ("kind", "devices", "sliced"),
    variants(
        [*((kind, 2, False) for kind in ORDERED), *((kind, 3, sliced) for kind in ORDERED for sliced in (False, True))],
        [
            *((kind, 2, False) for kind in ("exact", "exact by xla")),
            ("exact by xla", 3, True),
        ],
    ),
)
def test_a_device_never_waits_in_two_collectives_at_once(kind, devices, sliced, monkeypatch):
    """Devices share as many threads as there are, see ``set_up.lean_pool``; and in memory they meet in their order."""
    monkeypatch.setattr(trees, "SLICED_BYTES", 0 if sliced else 1 << 60)
    run = begun(kind, devices)
    texts = [compiled_text(run), lowered(run._initial, run.state._replace(envs=None), run.owned)]
    assert [unordered(text) for text in texts] == [[], []]
    found = by_kind(collectives(texts[0]))
    assert found
    assert (found.get("all-to-all", 0) > 0) == (sliced and "by xla" in kind)


def test_nor_where_environments_are_stepped_on_the_host():
    changes = {**CHANGES["normalized"], "env": {"id": "CartPole-v1"}}
    config = small_config(2, **changes)
    program = program_of(config, 2)
    state = init_state(config, program.net, program.layout)
    run = HostRunner(program, state, ShardPlan(config.envs, config.shards, 2, 0, 2), 2)
    try:
        rollout, discounted = run._placed()
        inputs = Inputs(np.int32(0), np.float32(0))  # pyright: ignore[reportArgumentType]
        rest = (discounted, inputs, np.zeros(2, np.int32), run.owned)
        texts = [lowered(run._learn, run.state, rollout, *rest), lowered(run._first, run.state, rollout, *rest[::3])]
    finally:
        run.close()
    assert [unordered(text) for text in texts] == [[], []]
    assert all(collectives(text) for text in texts)


def lowered(program, *arguments):
    """A jitted function, compiled, as the compiler prints it."""
    program = program if hasattr(program, "lower") else program.__wrapped__
    return program.lower(*arguments).compile().as_text()


def test_programs_whose_collectives_have_no_order_get_more_threads(cut_everything):
    run = begun("fsdp", 2, 2)
    assert unordered(compiled_text(run))
    alone, exact = Topology(), begun("exact").program
    assert session.pool_of(run.program.config, 2, alone, run.program.description) == 4
    assert session.pool_of(exact.config, 2, alone, exact.description) == 2


# --- the same agent --------------------------------------------------------------------------------------------------


def test_fast_is_exact_up_to_summation_order():
    exact, run = after_one_iteration("exact")
    fast, _ = after_one_iteration("fast")
    assert 0 < apart(exact, fast) < 1e-5
    assert copies_equal(run)


@pytest.mark.parametrize(
    ("kind", "fsdp"), variants([("fast", 1), ("fast by xla", 1), ("fsdp", 1), ("fsdp", 3)], [("fast", 1)])
)
def test_fast_on_devices_with_different_numbers_of_shards_is_up_to_summation_order(kind, fsdp, cut_everything):
    one, _ = after_one_iteration("fast")
    other, run = after_one_iteration(kind, 3, fsdp)
    assert 0 < apart(one, other) < 1e-5
    assert copies_equal(run)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["periodic", "remainder"])
def test_devices_with_different_numbers_of_shards_agree_after_each_period(kind):
    run = opened(small_config(3, **CHANGES[kind]), 3)
    for number in range(2):
        trained(run, first=number)
        assert copies_equal(run)


def in_blocks(kind, large_enough, monkeypatch, fsdp=1):
    """Arrays after one iteration of ``fast`` on two devices of four shards of four environments, and the run."""
    monkeypatch.setattr(blocks, "CPU_BLOCK_ENVS", large_enough)
    run = opened(small_config(2, **{**CHANGES[kind], **SHARDS_OF_FOUR, "reduction": "fast"}), 2, fsdp)
    trained(run)
    return arrays_of(run), run


@pytest.mark.parametrize(
    ("kind", "fsdp"),
    variants(
        [("recurrent, normalized by shard", 1), ("periodic", 1), ("grpo", 1), ("dropout", 1), ("fsdp", 2)],
        [("fsdp", 2)],
    ),
)
def test_blocks_of_several_shards_make_the_iteration_of_one(kind, fsdp, monkeypatch, cut_everything):
    whole, one = in_blocks(kind, 16, monkeypatch, fsdp)
    parts, two = in_blocks(kind, 8, monkeypatch, fsdp)
    found = [(run.program.blocks.count, run.program.blocks.together) for run in (one, two)]
    assert found == [(1, 4), (2, 2)]
    difference = apart(whole, parts)
    assert difference > 1e-4 if kind == "dropout" else difference < 1e-5  # masks are drawn by block
    assert copies_equal(two)
    if kind == "periodic":  # gradients of all blocks are one; statistics are by block
        assert counted(one)[::2] == counted(two)[::2]


@pytest.mark.parametrize(
    ("kind", "large_enough"),
    variants([("normalized", 1), *(("recurrent, normalized by shard", size) for size in (1, 16))], [("normalized", 1)]),
)
def test_blocks_of_shards_make_the_iteration_of_exact(kind, large_enough, monkeypatch):
    found, run = in_blocks(kind, large_enough, monkeypatch)
    assert run.program.blocks.count == (4 if large_enough == 1 else 1)
    exact = opened(small_config(2, **{**CHANGES[kind], **SHARDS_OF_FOUR}), 2)
    trained(exact)
    assert 0 < apart(arrays_of(exact), found) < 1e-5


def test_devices_agree_after_each_iteration_of_periods():
    run = begun("periodic")
    before = arrays_of(run)
    for number in range(2):
        trained(run, first=number)
        assert copies_equal(run)
    assert apart(before, arrays_of(run)) > 1e-3


def test_without_averaging_devices_would_drift_apart(monkeypatch):
    monkeypatch.setattr(periodic, "sum_devices", lambda x: x * 2)
    run = opened(small_config(2, **CHANGES["periodic"]), 2)
    trained(run)
    assert not copies_equal(run)


# --- FSDP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "fsdp"), variants([(2, 2), (4, 2)], [(4, 2)]), ids=["fsdp 2", "batch 2 x fsdp 2"])
def test_fsdp_trains_as_pure_data_parallelism(cut_everything, devices, fsdp):
    replicated, whole = after_one_iteration("fast")
    sharded, run = after_one_iteration("fsdp", devices, fsdp)
    assert dict(run.program.mesh.shape) == {"batch": devices // fsdp, "fsdp": fsdp}
    assert apart(replicated, sharded) < 1e-5
    assert apart(arrays_of(begun("periodic")), replicated) > 1e-3
    held = bytes_on_devices(run.state.parameters, run.state.optimizer.mu, run.state.optimizer.nu)
    full = bytes_on_devices(whole.state.parameters, whole.state.optimizer.mu, whole.state.optimizer.nu)
    assert set(full) == {3 * 4 * whole.program.layout.size}
    assert len(held) == devices
    assert max(held) < 0.7 * full[0]  # 8 units: biases, which stay whole, are a fifth
    assert copies_equal(run)


def held_by_each(config, devices, fsdp):
    program = program_of(config, devices, fsdp)
    state = init_state(config, program.net, program.layout)
    placed = place_state(state, state_specs(state, program.layout.specs), program.mesh)
    return bytes_on_devices(placed.parameters, placed.optimizer.mu, placed.optimizer.nu), program


def test_a_large_network_takes_half_of_the_memory_on_each_of_two():
    large = {"network": {"hidden_sizes": (1024, 1024)}}  # 4 MiB: cut without being asked
    full, _ = held_by_each(small_config(2, **CHANGES["fast"], **large), 2, 1)
    held, program = held_by_each(small_config(2, **CHANGES["fsdp"], **large), 2, 2)
    assert [axis for axis in program.layout.axes.values() if axis is not None] == [0, 0]  # actor's and critic's
    assert full == [3 * 4 * program.layout.size] * 2
    assert max(held) < HALF * full[0]


def test_a_small_network_is_not_cut():
    held, program = held_by_each(small_config(2, **CHANGES["fsdp"]), 2, 2)
    assert set(program.layout.axes.values()) == {None}
    assert held == [3 * 4 * program.layout.size] * 2


def test_what_is_measured_is_what_lies_on_each_device():
    mesh = meshes.make_mesh(2, 2)
    tree = [np.zeros((4, 4), np.float32), np.zeros(3, np.float32)]
    placed = jax.tree.map(jax.device_put, tree, meshes.fsdp_sharding(tree, mesh, min_size_mbytes=0))
    assert bytes_on_devices(placed) == [4 * 8 + 12] * 2
