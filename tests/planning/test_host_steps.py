"""Times of steps on the host, and what they make of a rollout."""

import pytest

from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.planning import host_steps
from lockstep.planning.host_steps import WORKER_SECONDS, HostSteps, measure_host_steps


def test_a_rank_that_steps_by_itself_adds_its_environments():
    assert HostSteps((0.001,)).rollout(envs=8, steps=16, workers=0, ranks=4) == pytest.approx(0.128)


def test_workers_share_the_environments_of_a_step():
    assert HostSteps((0.001,)).rollout(8, 16, 4, 1) == pytest.approx(16 * (0.002 + WORKER_SECONDS))
    # more workers than environments help nobody
    assert HostSteps((0.001,)).rollout(2, 16, 8, 1) == pytest.approx(16 * (0.001 + WORKER_SECONDS))


def test_the_slowest_worker_is_waited_for_at_each_step():
    steps = HostSteps((0.001, 0.003))
    # one environment a worker: the expected slowest of eight times, 3 ms but for 1 in 256
    expected = 0.003 - 0.002 / 256
    assert steps.rollout(8, 100, 8, 1) == pytest.approx(100 * (expected + WORKER_SECONDS), rel=0.02)
    assert steps.rollout(8, 100, 0, 1) == pytest.approx(8 * 100 * 0.002)


def test_arrays_are_stepped_all_at_once():
    assert HostSteps((0.001,), each=1e-6).rollout(1000, 10, 0, 8) == pytest.approx(10 * 0.002)


@pytest.fixture
def _short(monkeypatch):
    monkeypatch.setattr(host_steps, "SECONDS", 0.0)


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(("env_id", "arrays"), [("CartPole-v1", False), ("lockstep/CartPole-v1", True)])
def test_steps_are_measured_where_they_are_taken(env_id, arrays):
    config = EnvConfig(id=env_id)
    found = measure_host_steps(config, describe(config))
    assert found.mean >= 0.0
    assert (found.each is not None) == arrays
