"""Evaluation: whole episodes, each counted to its own end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.policies.evaluation import run_episodes, summarize


class Countdown(HostEnvs):
    """Environment ``e`` pays 10 to the power ``e`` a step and ends after ``lengths[e]`` steps, then begins again.

    It says at the end of an episode that it succeeded if that was 5 steps long, and nothing before.
    """

    def __init__(self, lengths: list[int], end: str = "terminated") -> None:
        description = EnvDescription(
            "Countdown-v0", ObservationLayout((Leaf("", "vector", (1,)),)), ActionLayout("discrete", (2,), (0,))
        )
        super().__init__(description, range(len(lengths)))
        self._lengths, self._end, self.steps = np.array(lengths), end, 0

    def reset(self) -> None:
        self.steps = 0
        self._left = self._lengths.copy()
        self.buffers.observations[:, 0] = self._left

    def step(self) -> None:
        self.steps += 1
        self._left -= 1
        ended = self._left == 0
        self.buffers.rewards[:] = np.where(self.buffers.actions == 1, 10.0 ** np.arange(self.num_envs), 0.0)
        getattr(self.buffers, self._end)[:] = ended
        self.buffers.successes[:] = np.where(ended, np.where(self._lengths >= 5, 1, -1), 0)
        self._left = np.where(ended, self._lengths, self._left)
        self.buffers.observations[:, 0] = self._left

    def save_states(self) -> list[dict[str, np.ndarray] | None]:
        raise NotImplementedError

    def restore(self, env: int, actions: np.ndarray, hashes: np.ndarray, state: dict[str, np.ndarray]) -> bool:
        raise NotImplementedError


def always(action: int):
    return lambda observations: np.full(len(observations), action)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_each_episode_is_counted_to_its_own_end_and_no_further(end):
    envs = Countdown([1, 3, 5], end)
    assert run_episodes(envs, always(1), 100)[:, :3].tolist() == [[1, 1, -1], [30, 3, -1], [500, 5, 1]]
    assert envs.steps == 5  # until the longest has ended


def test_longer_episodes_are_cut():
    envs = Countdown([1, 3, 5])
    assert run_episodes(envs, always(1), 2)[:, :3].tolist() == [[1, 1, -1], [20, 2, 0], [200, 2, 0]]
    assert envs.steps == 2


@pytest.mark.parametrize(
    ("reward", "what"), [(np.nan, "reward nan"), (-np.inf, "reward -inf"), (1.5e308, "rewards that add up to inf")]
)
def test_a_return_that_is_not_finite_is_refused_where_it_must_be(reward, what):
    class Faulty(Countdown):
        def step(self) -> None:
            super().step()
            self.buffers.rewards[1] = reward if self.steps >= 2 else 1e308

    envs = Faulty([1, 5, 5])
    envs.buffers.rewards = envs.buffers.rewards.astype(np.float64)
    with np.errstate(over="ignore"):
        assert not np.isfinite(run_episodes(envs, always(0), 100)[1, 0])
        with pytest.raises(EnvironmentFailureError) as caught:
            run_episodes(envs, always(0), 100, finite=True)
    line = f"environment Countdown-v0 gave {what} in step 2 of episode 1; lockstep check Countdown-v0 looks for such"
    assert str(caught.value).startswith(line)


def test_rewards_after_an_episode_are_nobodys_matter():
    class Late(Countdown):
        def step(self) -> None:
            super().step()
            self.buffers.rewards[0] = np.nan if self.steps > 1 else 7

    assert run_episodes(Late([1, 3]), always(0), 100, finite=True)[:, 0].tolist() == [7, 0]


def test_what_is_observed_after_an_episode_is_nobodys_matter():
    class Over(Countdown):
        """Observes an index, which is -1 or 9 once its episode is over."""

        def __init__(self, *words):
            super().__init__(*words)
            layout = ObservationLayout((Leaf("", "one_hot", (1,), (6,), (0,)),))
            self.description = replace(self.description, observation=layout)

        def step(self) -> None:
            super().step()
            self.buffers.observations[:, 0] = np.where(self.steps >= self._lengths, -1, self._left)

    seen = []

    def act(observations: np.ndarray) -> np.ndarray:
        seen.append(observations[:, 0].tolist())
        return np.zeros(len(observations), int)

    assert run_episodes(Over([1, 3]), act, 100)[:, 1].tolist() == [1, 3]
    assert seen == [[1, 3], [0, 2], [0, 1]]
    going_on = Over([1, 3], "rewards")  # which says of no end
    with pytest.raises(EnvironmentFailureError, match=r"^environment Countdown-v0 gave observation -1 "):
        run_episodes(going_on, act, 100)


def test_the_policy_decides_and_sees_the_current_observations():
    envs, seen = Countdown([2, 3]), []

    def act(observations: np.ndarray) -> np.ndarray:
        seen.append(observations[:, 0].tolist())
        return (observations[:, 0] == 2).astype(int)

    assert run_episodes(envs, act, 100)[:, :3].tolist() == [[1, 2, -1], [10, 3, -1]]
    assert seen == [[2, 3], [1, 2], [2, 1]]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "lockstep/CartPole-v1"])
def test_an_evaluation_can_be_repeated_and_belongs_to_a_seed(env_id):
    config = EnvConfig(id=env_id)

    def evaluation(seed: int) -> HostEnvs:
        return make_envs(config, describe(config), seed, range(6), pytest.fail, "eval")

    envs = evaluation(0)
    first = run_episodes(envs, always(1), 100)
    np.testing.assert_array_equal(run_episodes(envs, always(1), 100), first)
    np.testing.assert_array_equal(run_episodes(evaluation(0), always(1), 100), first)
    np.testing.assert_array_equal(first[:, 0], first[:, 1])  # CartPole pays 1 a step
    assert (first[:, 1] < 15).all()  # pushing one way only, the pole falls soon
    starts = []
    for seed in (0, 1):
        envs = evaluation(seed)
        envs.reset()
        starts.append(envs.buffers.observations.copy())
    assert not np.array_equal(starts[0], starts[1])


def test_summary_by_hand():
    # Returns 1, 2, 6: mean 3, population variance (4 + 1 + 9) / 3.
    summary = summarize(np.array([[1.0, 10.0, 0.0, np.nan], [2.0, 20.0, 0.0, np.nan], [6.0, 60.0, 0.0, np.nan]]))
    assert summary == {
        "episodes": 3,
        "return_mean": 3.0,
        "return_std": pytest.approx(np.sqrt(14 / 3)),
        "return_min": 1.0,
        "return_max": 6.0,
        "length_mean": 30.0,
    }


def test_the_success_rate_is_of_the_episodes_that_say():
    episodes = np.array(
        [[1.0, 10.0, 1.0, 3.0], [2.0, 20.0, -1.0, 4.0], [6.0, 60.0, -1.0, 8.0], [6.0, 60.0, 0.0, np.nan]]
    )
    assert summarize(episodes)["success_rate"] == pytest.approx(1 / 3)
    assert "success_rate" not in summarize(episodes[3:])


def test_scores_are_there_where_all_episodes_have_one():
    episodes = np.array(
        [[1.0, 10.0, 1.0, 3.0], [2.0, 20.0, -1.0, 4.0], [6.0, 60.0, -1.0, 8.0], [6.0, 60.0, 0.0, np.nan]]
    )
    found = {name: value for name, value in summarize(episodes[:3]).items() if name.startswith("score")}
    assert found == {"score_mean": 5.0, "score_std": pytest.approx(np.sqrt(14 / 3)), "score_min": 3.0, "score_max": 8.0}
    assert not any(name.startswith("score") for name in summarize(episodes))
