"""Times of steps on the host, and what they make of a rollout."""

from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.envs.describe import describe
from lockstep.envs.registry import make_envs
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
def _clock(monkeypatch):
    """A clock that goes on in steps of environments alone: by a millisecond, and ten microseconds for each of them."""
    now = 0.0

    def made(*wanted):
        envs = make_envs(*wanted)
        step = envs.step

        def timed():
            nonlocal now
            step()
            now += 1e-3 + 1e-5 * envs.num_envs

        monkeypatch.setattr(envs, "step", timed)
        return envs

    monkeypatch.setattr(host_steps, "make_envs", made)
    monkeypatch.setattr(host_steps, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(host_steps, "SECONDS", 0.05)


def test_a_mask_that_allows_nothing_is_named_and_not_what_the_environment_raises_then():
    config = EnvConfig(id="straying:Straying-v0", action_mask="legal", kwargs={"kind": "mask", "refuses": True})
    with pytest.raises(EnvironmentFailureError, match="gave an action mask that allows nothing in step 3"):
        measure_host_steps(config, describe(config))


def test_a_pool_is_timed_as_a_whole_with_its_own_threads(monkeypatch):
    """EnvPool steps all environments of a shard in one call."""
    seen = []

    def times(config, description, envs):
        seen.append((config.workers, envs))
        return np.full(3, 1e-3 + 1e-6 * envs)

    monkeypatch.setattr(host_steps, "_times", times)
    description = describe(EnvConfig(id="CartPole-v1"))  # as EnvPool's, no arrays
    found = measure_host_steps(EnvConfig(id="Pong-v5", backend="envpool", workers=2), description)
    assert seen == [(2, 1), (2, host_steps.MANY)]
    assert (found.one, found.each) == (pytest.approx((1e-3,)), pytest.approx(1e-6))


@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize(
    ("env_id", "one", "each"), [("CartPole-v1", 1.01e-3, None), ("lockstep/CartPole-v1", 1e-3, pytest.approx(1e-5))]
)
def test_steps_are_measured_where_they_are_taken(env_id, one, each):
    config = EnvConfig(id=env_id)
    found = measure_host_steps(config, describe(config))
    assert found.one == pytest.approx((one,) * len(found.one))
    assert len(found.one) == (30 if each is None else 1)  # of fifty steps but for the first twenty
    assert found.each == each
