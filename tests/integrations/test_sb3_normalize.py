"""Merging ``VecNormalize``: whatever ranks see, and however often they meet, all hold the statistics of everything."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from lockstep.integrations.sb3.normalize import MergedStatistics, running_statistics, since


class Still(gymnasium.Env):
    """Spaces and nothing else."""

    def __init__(self, space):
        self.observation_space, self.action_space = space, spaces.Discrete(2)


def environment(space: Any = None, **options: Any) -> Any:
    space = space or spaces.Box(-1, 1, (2,), np.float32)
    return VecNormalize(DummyVecEnv([lambda: Still(space)]), **options)


class Together:
    """Ranks in one process: :meth:`merge` gives every one the parts of all."""

    def __init__(self, envs):
        self._parts, self._round = [[] for _ in envs], 0
        self.ranks = [MergedStatistics(env, self._gather(rank)) for rank, env in enumerate(envs)]

    def _gather(self, rank):
        def gather(part):
            self._parts[rank].append(part)
            return (
                torch.stack([parts[-1] for parts in self._parts]) if self._ready else part.expand(len(self._parts), -1)
            )

        return gather

    def merge(self):
        """Twice on copies: first everybody says its part, then everybody reads all."""
        before = [[statistics.copy() for statistics in rank._statistics] for rank in self.ranks]
        bases = [[statistics.copy() for statistics in rank._base] for rank in self.ranks]
        for self._ready in (False, True):
            for rank, statistics, base in zip(self.ranks, before, bases, strict=True):
                for now, was in zip(rank._statistics, statistics, strict=True):
                    now.mean, now.var, now.count = was.mean.copy(), was.var.copy(), was.count
                rank._base = [one.copy() for one in base]
                rank.merge()


def arrays(statistics):
    return np.concatenate([np.ravel(statistics.mean), np.ravel(statistics.var), [statistics.count]])


ROLLOUTS = st.lists(
    st.lists(st.integers(0, 5), min_size=3, max_size=3), min_size=1, max_size=4
)  # samples by rollout and rank


@given(rollouts=ROLLOUTS, seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 1e4]))
def test_ranks_hold_the_statistics_of_all_samples(rollouts, seed, scale):
    draws = np.random.default_rng(seed)
    envs = [environment() for _ in range(3)]
    together, whole = Together(envs), RunningMeanStd(shape=(2,))
    seen = []
    for counts in rollouts:
        for env, count in zip(envs, counts, strict=True):
            samples = draws.normal(3.0, 2.0, (count, 2)) * scale
            for sample in samples:
                env.obs_rms.update(sample[None])
                seen.append(sample)
        together.merge()
        same = [arrays(env.obs_rms) for env in envs]
        assert all(np.array_equal(one, same[0]) for one in same)
    if seen:
        whole.update(np.stack(seen))
    assert arrays(envs[0].obs_rms) == pytest.approx(arrays(whole), rel=1e-6, abs=1e-6 * scale**2)


def test_merging_twice_adds_nothing():
    envs = [environment() for _ in range(2)]
    together = Together(envs)
    envs[1].obs_rms.update(np.ones((4, 2)))
    together.merge()
    once = arrays(envs[0].obs_rms)
    together.merge()
    assert np.array_equal(arrays(envs[0].obs_rms), once)
    assert once[-1] == pytest.approx(4, abs=1e-3)


def test_what_was_added_is_found_behind_a_long_history():
    draws = np.random.default_rng(0)
    base = RunningMeanStd(shape=(1,))
    base.update_from_moments(np.array([5.0]), np.array([4.0]), 1e8)
    now, added = base.copy(), draws.normal(6.0, 1.0, (1000, 1))
    now.update(added)
    count, mean, variance = since(base, now)
    assert count == 1000
    assert mean == pytest.approx(added.mean(0), rel=1e-6)
    assert variance == pytest.approx(added.var(0), rel=1e-4)


def test_constant_samples_have_no_negative_variance():
    base = RunningMeanStd(shape=(1,))
    base.update(np.full((1000, 1), 0.1))
    now = base.copy()
    now.update(np.full((7, 1), 0.1))
    assert since(base, now)[2] >= 0


@pytest.mark.parametrize("change", ["none", "other", "fewer", "fresh"])
def test_statistics_that_were_replaced_between_two_calls_are_taken_anew(change):
    env, first = environment(), np.array([7.0, 7.0])

    def gather(part):
        """Another rank, the first one, has seen 10 samples; its own statistics weren't replaced."""
        if part.dtype == torch.bool:
            return torch.stack([torch.zeros_like(part), part])
        theirs = torch.cat([torch.tensor([10.0, *first, 1.0, 1.0]), torch.tensor([0.0, 0.0, 0.0])])
        return torch.stack([theirs.to(part.dtype), part])

    env.obs_rms.update(np.ones((50, 2)))
    merged = MergedStatistics(env, gather)
    if change == "other":
        env.obs_rms = RunningMeanStd(shape=(2,))
        env.obs_rms.update(np.ones((90, 2)))
    elif change == "fewer":
        env.obs_rms.count = 3.0
    merged.go_on(change == "fresh")
    if change == "none":
        assert env.obs_rms.count == pytest.approx(60, abs=1e-3)
    else:
        assert (env.obs_rms.count, env.obs_rms.mean.tolist()) == (10.0, first.tolist())


def test_all_ranks_go_on_from_the_first_ones_statistics():
    envs = [environment() for _ in range(2)]
    envs[0].obs_rms.update(np.ones((3, 2)))
    envs[1].obs_rms.update(np.zeros((9, 2)))
    first = torch.from_numpy(
        np.concatenate([[s.count, *s.mean.ravel(), *s.var.ravel()] for s in running_statistics(envs[0])])
    )
    for env in envs:
        MergedStatistics(env, lambda part: torch.stack([first, part])).take_from_the_first_rank()
    assert np.array_equal(arrays(envs[0].obs_rms), arrays(envs[1].obs_rms))
    assert envs[1].obs_rms.count == pytest.approx(3, abs=1e-3)


def test_every_statistic_around_an_environment_is_found():
    keys = spaces.Dict({name: spaces.Box(-1, 1, (2,), np.float32) for name in ("b", "a")})
    inner = environment(keys, norm_obs_keys=["b", "a"])
    assert running_statistics(inner) == [inner.obs_rms["a"], inner.obs_rms["b"], inner.ret_rms]
    only_returns = environment(norm_obs=False)
    outer = VecNormalize(VecFrameStack(only_returns, 2))
    assert running_statistics(outer) == [outer.obs_rms, outer.ret_rms, only_returns.ret_rms]
    assert running_statistics(outer.unwrapped) == []
    assert MergedStatistics(outer.unwrapped, lambda part: pytest.fail("a collective for nothing")).merge() is None
