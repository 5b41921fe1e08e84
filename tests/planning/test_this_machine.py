"""Predictions of this machine from runs of one rank, whose times are written out by hand."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.temporary import sweep_temporary
from lockstep.envs.describe import describe
from lockstep.planning import measure as measuring
from lockstep.planning import this_machine
from lockstep.planning.measure import RankTimes, part_of_rank
from lockstep.planning.this_machine import Machine, Measured, predict

CONFIG = resolve(Config.model_validate({"num_envs": 16, "num_steps": 16, "ppo": {"num_minibatches": 2}}))
MACHINE = Machine(per_host=8, copy=1e9)
ROOT = Path(__file__).parents[2]
SUMS, PAGE = ROOT / "benchmarks" / "results" / "collectives.md", ROOT / "docs" / "plan.md"


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch):
    monkeypatch.setattr(this_machine, "available_cores", lambda: 8)


def times(rollout, learn, other=(0.0,), memory=0.0):
    arrays = [np.array(x, np.float64) for x in (rollout, learn, other)]
    total = arrays[0].mean() + arrays[1].mean() + arrays[2].mean()
    return RankTimes(np.array([total]), *arrays, memory=memory)


def predicted(ranks, *own, machine=MACHINE, memory: Any = None, config=CONFIG):
    measured = Measured(ranks, min(ranks, machine.per_host), own)
    return predict(config, describe(config.env), measured, machine, memory or {"parameters": 4000.0})


def test_one_rank_takes_what_it_took():
    found = predicted(1, times([1.0, 3.0], [0.5], [0.25]))
    assert found.seconds["likely"] == found.seconds["worst"] == pytest.approx(2.75)


def test_the_slowest_rank_decides_not_the_mean():
    found = predicted(2, times([1.0, 2.0], [0.5]), times([1.0, 2.0], [0.5]))
    assert found.parts["rollout"] == pytest.approx(1.5)
    assert found.parts["waiting"] == pytest.approx(0.25)  # the slower of two takes 1.75
    assert found.seconds["best"] < found.seconds["likely"] <= found.seconds["worst"]


def test_the_rank_that_owns_more_is_waited_for():
    found = predicted(3, times([3.0], [3.0]), times([3.0], [3.0]), times([2.0], [2.0]))
    assert found.parts["rollout"] == 3.0
    assert found.parts["waiting"] == 0.0


def test_ranks_that_share_cores_beyond_what_was_measured_take_turns(monkeypatch):
    monkeypatch.setattr(this_machine, "available_cores", lambda: 2)
    alone, crowd = predicted(2, times([1.0], [1.0])), predicted(8, times([1.0], [1.0]), times([1.0], [1.0]))
    assert crowd.parts["rollout"] == pytest.approx(4 * alone.parts["rollout"])


def test_latencies_are_those_of_small_sums_that_were_measured():
    rows = [line.strip("| ").split(" | ") for line in SUMS.read_text().splitlines() if line.startswith("| 2 |")]
    small = [row for row in rows if int(row[1].replace(",", "")) <= 10_000]  # of two ranks, each with a core
    memory, gloo = ([1e-6 * float(row[column].replace(",", "")) for row in small] for column in (2, 4))
    assert min(memory) - 1e-6 <= this_machine.MEMORY_LATENCY <= max(memory)
    assert min(gloo) <= this_machine.TCP_LATENCY <= max(gloo)
    said = " ".join(PAGE.read_text().split())
    assert f"{1e6 * this_machine.MEMORY_LATENCY:g} µs for each further rank in memory" in said
    assert f"{1e3 * this_machine.TCP_LATENCY:g} ms with gloo" in said


def test_a_slow_network_is_in_the_collectives():
    own = times([1.0], [1.0]), times([1.0], [1.0])
    near = predicted(2, *own, memory={"parameters": 4e6})
    far = predicted(2, *own, machine=Machine(1, 12.5e6), memory={"parameters": 4e6})
    steps = CONFIG.ppo.num_epochs * 2
    # each step a rank sends a gradient of 4 MB at 12.5 MB/s, of which data get 94 %
    assert far.limits["links"] == pytest.approx(steps * 4e6 / (12.5e6 * 0.94), rel=0.01)
    assert near.parts["collectives"] < 0.1 * far.parts["collectives"]


@pytest.mark.parametrize(("hosts", "per_host", "of_gradient"), [(2, 1, 0.5 * 2), (2, 4, 2 * 4 * 4 / 8)])
def test_sums_by_gloo_leave_a_host_by_one_card(hosts, per_host, of_gradient):
    """Two ranks gather two gradients, half of it each in a ring; eight send slices, and sums of them, to all others.

    A host's four ranks have four eighths of a gradient for the other host, in each of the two rounds.
    """
    ranks, own = hosts * per_host, times([1.0], [1.0])
    found = predicted(ranks, own, machine=Machine(per_host, 12.5e6), memory={"parameters": 4e6})
    steps = CONFIG.ppo.num_epochs * 2
    assert found.limits["links"] == pytest.approx(steps * of_gradient * 4e6 / (12.5e6 * 0.94), rel=0.01)


def test_fsdp_cuts_what_a_rank_holds_and_sends_all_of_it():
    found = predicted(4, times([1.0], [1.0]), config=CONFIG.model_copy(update={"fsdp": True, "reduction": "fast"}))
    assert found.memory["parameters"] == 1000.0
    assert [x.bytes for x in found.collectives if x.purpose == "parameters"] == [4000.0]


def test_a_program_that_tells_no_parts_is_one():
    whole = RankTimes(np.array([2.0, 4.0]), *(np.zeros(0),) * 3, memory=5e6)
    found = predicted(2, whole, whole)
    assert found.parts["other"] == 3.0
    assert found.parts["waiting"] == pytest.approx(0.5)
    assert found.memory["process"] == pytest.approx(5e6 - 4000)


def test_one_process_steps_the_environments_of_all_ranks_of_a_host():
    """With engine jax they take turns, and what ranks would wait for each other only hosts do."""
    own, process = (times([1.0, 2.0], [0.5]),) * 2, times([2.0, 4.0], [1.0])
    alone, near, far = (
        predict(CONFIG, describe(CONFIG.env), measured, machine, {"parameters": 4000.0})
        for measured, machine in (
            (Measured(2, 2, own), MACHINE),
            (Measured(2, 2, own, process), MACHINE),
            (Measured(4, 2, own, process), Machine(2)),
        )
    )
    assert (alone.parts["rollout"], alone.parts["waiting"]) == pytest.approx((1.5, 0.25))
    assert (near.parts["rollout"], near.parts["waiting"]) == pytest.approx((3.0, 0.0))
    assert (far.parts["rollout"], far.parts["waiting"]) == pytest.approx((3.0, 0.5))  # the slower of two takes 3.5
    assert near.parts["gradients"] == alone.parts["gradients"] == 0.5


@pytest.mark.parametrize(
    ("engine", "size", "here", "rollout", "asked"),
    [
        ("jax", 4, 4, [1.0], [(4, 4), (1, 1)]),
        ("jax", 4, 2, [1.0], [(2, 4), (1, 2)]),
        ("jax", 4, 4, [], [(4, 4)]),  # the program steps them
        ("jax", 2, 1, [1.0], [(1, 2)]),
        ("torch", 4, 4, [1.0], [(4, 4)]),
    ],
)
def test_such_a_process_is_measured_where_there_is_one(monkeypatch, engine, size, here, rollout, asked):
    """As a rank of as many as there are hosts."""
    seen = []

    def measured(config, parts, ranks, *_):
        seen.append((len(parts), ranks))
        return [RankTimes(np.ones(1), np.array(rollout), *(np.ones(1),) * 2, memory=0.0)] * len(parts)

    monkeypatch.setattr(this_machine, "measure_ranks", measured)
    found = this_machine.measure(CONFIG.model_copy(update={"engine": engine}), size, here, 1, 1, lambda _: None)
    assert seen == asked
    assert (found.process is not None) == (len(asked) == 2)


def test_a_rank_alone_has_its_shards_at_their_shape():
    parts = [part_of_rank(CONFIG, rank, 3) for rank in range(3)]
    assert [(x.num_shards, x.num_envs) for x in parts] == [(3, 6), (3, 6), (2, 4)]
    assert all(x.ppo == CONFIG.ppo and x.log.timing and not x.checkpoint.interval for x in parts)


def test_runs_of_one_rank_are_measured_and_leave_nothing(tmp_path):
    found = measuring.measure_ranks(CONFIG, range(1), 8, tmp_path / "runs", 1, 2)
    assert len(found) == 1
    assert len(found[0].rollout) >= 2
    assert (found[0].total > 0).all()
    assert found[0].memory > 0
    assert not (tmp_path / "runs").exists()


def test_runs_whose_measuring_was_killed_are_swept(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "base"))

    def measured(config, parts, ranks, directory, warmup_iters, iters):
        directory.mkdir()
        shutil.copytree(directory.parent, f"{directory.parent}-killed")  # nobody holds this one
        return [times([1.0], [1.0])]

    monkeypatch.setattr(this_machine, "measure_ranks", measured)
    this_machine.measure(CONFIG, 1, 1, 1, 1, lambda _: None)
    assert [path.name.endswith("-killed") for path in (tmp_path / "base").iterdir()] == [True]
    sweep_temporary()
    assert not list((tmp_path / "base").iterdir())


def test_a_run_of_one_rank_that_fails_is_said(tmp_path):
    broken = CONFIG.model_copy(update={"env": CONFIG.env.model_copy(update={"id": "nothing:Nothing-v0"})})
    with pytest.raises(RuntimeError, match=r"a run of one rank failed: .*nothing"):
        measuring.measure_ranks(broken, range(1), 8, tmp_path / "runs", 1, 2)
