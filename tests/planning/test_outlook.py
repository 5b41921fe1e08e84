"""An outlook as a whole: what of the counts and of the machine is said in it."""

import numpy as np
import pytest

from lockstep.config.run import Config
from lockstep.core.host import cgroups
from lockstep.planning import outlook
from lockstep.planning.hardware import Case, parse_target
from lockstep.planning.host_steps import HostSteps
from lockstep.planning.measure import RankTimes
from lockstep.planning.prediction import Outlook, Prediction
from lockstep.planning.request import PlanRequest
from lockstep.planning.this_machine import Measured
from lockstep.training.costs import Costs, Kernel, Part

CONFIG = Config.model_validate({"num_envs": 8, "num_steps": 16, "ppo": {"num_minibatches": 2}})
ADDITIONS = Part("optimizer", (Kernel(7.0, 84.0, 10.0),), "additions", 8)
MEMORY = {"parameters": 4e3, "moments": 8e3, "gradients": 8e3, "rollout": 1e3, "activations": 1e3}


def planned(monkeypatch, target, sizes=None):
    costs = Costs(2, (ADDITIONS,), MEMORY, notes=("its simulator isn't counted",))
    monkeypatch.setattr(outlook, "count_costs", lambda *_: costs)
    request = PlanRequest(CONFIG, (parse_target(target),), sizes)
    (found,) = outlook.outlooks(request, lambda _: None)
    return found


def test_what_was_not_counted_is_noted(monkeypatch):
    assert "h100:4: its simulator isn't counted" in planned(monkeypatch, "h100:4").notes


def test_an_iteration_is_that_of_the_most_devices(monkeypatch):
    # seven additions in three rounds were counted, of which a device of two shards makes one, ten times
    found = planned(monkeypatch, "h100:4")
    assert (round(found.flops), round(found.bytes)) == (10, 120)


def test_what_a_machine_lacks_doesnt_fit(monkeypatch):
    times = RankTimes(*(np.array([1.0]) for _ in range(4)), memory=3e9)
    monkeypatch.setattr(outlook.this_machine, "measure", lambda *_: Measured(1, 1, (times,)))
    monkeypatch.setattr(outlook, "_host_memory", lambda: 2e9)
    found = planned(monkeypatch, "cpu:1").to_json()
    (row,) = found["predictions"]
    assert row["share_of_memory"] == 1.5
    assert not row["fits"]
    assert not any("simulator" in note for note in found["notes"])  # it was measured


@pytest.mark.parametrize(("limit", "capacity"), [("2048000\n", 2e3), ("max\n", 8e3), ("9223372036854771712\n", 8e3)])
def test_a_containers_memory_is_no_more_than_its_limit(monkeypatch, tmp_path, limit, capacity):
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemFree: 10 kB\n")
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("1000000\n")  # which says nothing of what a run may have
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(outlook, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    times = RankTimes(*(np.array([1.0]) for _ in range(4)), memory=4e3 * 1024)
    monkeypatch.setattr(outlook.this_machine, "measure", lambda *_: Measured(1, 1, (times,)))
    (row,) = planned(monkeypatch, "cpu:1").to_json()["predictions"]
    assert row["share_of_memory"] == 4e3 / capacity
    assert row["fits"] is (capacity > 4e3)


def test_ranks_of_a_processor_share_its_memory_as_many_as_there_are(monkeypatch):
    times = RankTimes(*(np.array([1.0]) for _ in range(4)), memory=1e9)
    monkeypatch.setattr(
        outlook.this_machine, "measure", lambda _, size, here, *rest: Measured(size, here, (times,) * size)
    )
    monkeypatch.setattr(outlook, "_host_memory", lambda: 4e9)
    rows = planned(monkeypatch, "cpu:8", (1, 2, 8)).to_json()["predictions"]
    assert [row["share_of_memory"] for row in rows] == [0.25, 0.5, 2.0]
    assert [row["fits"] for row in rows] == [True, True, False]


def test_a_target_for_another_engine_is_of_the_environment_that_engine_steps(monkeypatch):
    counted = []

    def count(configs, *rest):
        (config,) = configs.values()
        counted.append((config.engine, config.env.id))
        return Costs(2, (ADDITIONS,), MEMORY, host_steps=config.engine == "torch")

    described, predict = [], outlook.accelerators.predict

    def predicted(work):
        described.append(work.description.id)
        return predict(work)

    monkeypatch.setattr(outlook, "count_costs", count)
    monkeypatch.setattr(outlook.accelerators, "predict", predicted)
    targets = tuple(map(parse_target, ("h100:1", "tpu:v5e:2x2")))
    monkeypatch.setattr(outlook, "measure_host_steps", lambda *_: HostSteps((1e-4,)))
    found = list(outlook.outlooks(PlanRequest(CONFIG, targets, (1,)), lambda _: None))
    assert counted == [("torch", "CartPole-v1"), ("jax", "lockstep/CartPole-v1")]
    assert described == ["CartPole-v1", "lockstep/CartPole-v1"]
    assert "is stepped inside the compiled program as lockstep/CartPole-v1" in "\n".join(found[1].notes)


@pytest.mark.parametrize(("total_steps", "iterations"), [(1, 1), (1000, 1), (1001, 2), (10_000, 10)])
def test_a_run_costs_whole_iterations(total_steps, iterations):
    seconds: dict[Case, float] = {"best": 3.0, "likely": 6.0, "worst": 9.0}
    one, eight = (Prediction(devices, 8, 1000, seconds, {}, {}, {}, (), {}) for devices in (1, 8))
    found = Outlook("h100:8", "H100", "torch", "", 8, 8e10, (one, eight), price=1200.0, total_steps=total_steps)
    assert found.cost(eight) == pytest.approx((iterations, 2 * iterations, 3 * iterations))
    assert found.cost(one) == pytest.approx((iterations / 8, 2 * iterations / 8, 3 * iterations / 8))
