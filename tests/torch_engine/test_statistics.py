"""What the shards tell each other once an iteration, and the metrics made of it: the same for every number of ranks."""

import dataclasses

import numpy as np
import pytest
import torch
from small_runs import (
    ScriptedEnvs,
    actions_of,
    alone,
    described,
    of_rank,
    plan_of,
    random_batch,
    run_ranks,
    small_config,
    small_state,
    vectors,
)

from lockstep.config.run import Config
from lockstep.core.errors import NonFiniteError
from lockstep.core.normalizers import shard_moments
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine import minibatches, statistics
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.distributed.communicator import Communicator
from lockstep.torch_engine.minibatches import advantage_moments, minibatch_indices
from lockstep.torch_engine.nets.shards import to_shards
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.setup.clock import Laps, RankTimes
from lockstep.torch_engine.state import make_net
from lockstep.torch_engine.statistics import (
    SharedStatistics,
    initial_statistics,
    merge_normalizers,
    moments_of_values,
    normalizer_moments,
    share,
    share_metrics,
    split_normalizer_moments,
)

NORMALIZE = [{}, {"observations": True}, {"returns": True}, {"observations": True, "returns": True}]
with_every_normaliser = pytest.mark.parametrize("normalize", NORMALIZE, ids=lambda n: "+".join(n) or "none")


def random_rollout(config: Config, plan: ShardPlan) -> Rollout:
    """A rank's part of a rollout of random numbers of two components."""
    rng, ids = np.random.default_rng(0), slice(plan.env_ids.start, plan.env_ids.stop)
    net = make_net(config, vectors(2), actions_of(True, 3))
    out = Rollout.empty(config.num_steps, ScriptedEnvs(plan.env_ids), net, normalized=True)
    out.raw[:] = rng.normal(3.0, 2.0, (config.num_steps, config.envs, 2))[:, ids]
    out.rewards[:] = rng.normal(size=(config.num_steps, config.envs))[:, ids]
    out.terminated[:] = (rng.random((config.num_steps, config.envs)) < 0.3)[:, ids]
    return out


def test_every_shard_has_the_moments_of_its_own_samples():
    config = small_config(num_shards=4, normalize=NORMALIZE[3])
    state, plan = small_state(config, described(size=2)), plan_of(config)
    rollout = random_rollout(config, plan)
    observations, returns = split_normalizer_moments(state, normalizer_moments(state, rollout, plan))
    state.return_normalizer.running[:] = 0.0  # pyright: ignore[reportOptionalMemberAccess]
    running = state.return_normalizer.discounted_returns(rollout.rewards, rollout.done)  # pyright: ignore[reportOptionalMemberAccess]
    assert (observations.shape, returns.shape) == ((4, 2, 2), (4, 2, 1))
    for shard in range(4):
        ids = slice(2 * shard, 2 * shard + 2)
        np.testing.assert_array_equal(observations[shard], shard_moments(rollout.raw[:, ids].reshape(-1, 2)))
        np.testing.assert_array_equal(returns[shard], shard_moments(running[:, ids].reshape(-1, 1)))
    assert not np.array_equal(observations[0], observations[1])


@with_every_normaliser
def test_only_what_is_normalised_is_measured_and_merged(normalize):
    config = small_config(num_shards=4, normalize=normalize)
    state, plan = small_state(config, described(size=2)), plan_of(config)
    rows = normalizer_moments(state, random_rollout(config, plan), plan)
    observations, returns = split_normalizer_moments(state, rows)
    assert observations.shape == (4, 2, 2 if "observations" in normalize else 0)
    assert returns.shape == (4, 2, 1 if "returns" in normalize else 0)
    merge_normalizers(state, observations, returns, np.full(4, 8), 1)
    for name, normalizer in (("observations", state.observation_normalizer), ("returns", state.return_normalizer)):
        assert (normalizer is not None) == (name in normalize)
        assert normalizer is None or normalizer.moments.count == 32


@pytest.mark.parametrize("name", ["observations", "returns"])
def test_statistics_of_numbers_too_large_to_be_squared_end_the_run_in_the_iteration_that_gave_them(name):
    config = small_config(num_shards=4, normalize=NORMALIZE[3])
    state = small_state(config, described(size=2))
    parts = {"observations": np.ones((4, 2, 2)), "returns": np.ones((4, 2, 1))}
    merge_normalizers(state, parts["observations"], parts["returns"], np.full(4, 8), 6)
    parts[name][2] = np.inf
    with pytest.raises(NonFiniteError, match=f"after iteration 7, of normalize.{name}: "):
        merge_normalizers(state, parts["observations"], parts["returns"], np.full(4, 8), 7)


def test_first_statistics_are_those_of_all_random_steps_and_leave_no_return_running():
    config = small_config(num_shards=4, normalize=NORMALIZE[3])
    whole = random_rollout(config, plan_of(config)).raw.reshape(-1, 2).astype(np.float64)

    def rank(plan: ShardPlan, communicator: Communicator) -> tuple[bytes, ...]:
        state = small_state(config, described(size=2), plan)
        initial_statistics(state, random_rollout(config, plan), plan, communicator)
        assert state.observation_normalizer is not None
        assert state.return_normalizer is not None
        moments = state.observation_normalizer.moments
        np.testing.assert_allclose(moments.mean, whole.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.variance, whole.var(0), rtol=1e-12)
        np.testing.assert_allclose(state.observation_normalizer(whole.astype(np.float32)).std(0), 1.0, rtol=1e-4)
        assert not state.return_normalizer.running.any()
        return moments.mean.tobytes(), moments.m2.tobytes(), state.return_normalizer.moments.m2.tobytes()

    assert len({result for world_size in (1, 2, 3, 4) for result in run_ranks(config, world_size, rank)}) == 1


EPISODES = np.array(
    [[0, 1, 5.0, 10, 1], [0, 6, 7.0, 20, -1], [1, 0, -1.0, 3, 0], [1, 1, 2.0, 2, 1], [3, 5, 4.0, 9, -1]]
)


def of_plan(episodes: np.ndarray, plan: ShardPlan) -> np.ndarray:
    return episodes[np.isin(episodes[:, 1], plan.env_ids)]


@with_every_normaliser
def test_what_is_shared_is_the_same_for_every_number_of_ranks(normalize):
    config = small_config(num_shards=4, normalize=normalize)
    batch = random_batch(config, small_state(config, described(size=2)).net)

    def rank(plan: ShardPlan, communicator: Communicator) -> SharedStatistics:
        state, mine = small_state(config, described(size=2), plan), of_rank(batch, plan)
        moments = advantage_moments(mine, minibatch_indices(config, plan, 0))
        finished, stop = of_plan(EPISODES, plan), 15 if plan.rank == plan.world_size - 1 else 0
        return share(state, random_rollout(config, plan), mine, moments, finished, stop, plan, communicator)

    (expected,) = run_ranks(config, 1, rank)
    assert (expected.episodes, expected.stop) == (3, 15)  # environments 0 and 1 are one shard, with three episodes
    assert expected.advantage_moments.shape == (4, 2, 2, 3)
    for world_size in (2, 3, 4):
        for ours in run_ranks(config, world_size, rank):
            for field in dataclasses.fields(SharedStatistics):
                a, b = (np.asarray(getattr(shared, field.name)) for shared in (ours, expected))
                np.testing.assert_array_equal(a, b, err_msg=f"{field.name}, {world_size} ranks")


@pytest.mark.parametrize("episodes", [EPISODES, EPISODES[:0]], ids=["some", "none"])
def test_every_rank_learns_of_all_episodes(episodes):
    config = small_config(num_shards=4)

    def rank(plan: ShardPlan, communicator: Communicator) -> np.ndarray:
        most = 3 if len(episodes) else 0
        return share_metrics(of_plan(episodes, plan), most, Laps(), [], plan, communicator)[0]

    for world_size in (1, 2, 3, 4):
        for gathered in run_ranks(config, world_size, rank):
            assert sorted(gathered.tolist()) == sorted(episodes.tolist())


def test_times_by_hand():
    # Two ranks, two collectives: 1 s and 2 s on rank 0, 3 s and 1 s on rank 1. Even the last to arrive spent
    # 1 + 1 = 2 s inside; rank 0 spent 3 - 2 = 1 s more, waiting, and rank 1 4 - 2 = 2 s.
    config = small_config()

    def rank(plan: ShardPlan, communicator: Communicator) -> RankTimes:
        laps = [
            Laps(4.0, 7.0, 0.0, total=14.0, ended=99.0, bytes_sent=80, bytes_received=70, peak_memory_mb=300.0),
            Laps(6.0, 3.0, 1.0, total=14.5, ended=98.0, bytes_sent=70, bytes_received=80, peak_memory_mb=200.0),
        ]
        durations = [[1.0, 2.0], [3.0, 1.0]]
        return share_metrics(of_plan(EPISODES, plan), 3, laps[plan.rank], durations[plan.rank], plan, communicator)[1]

    first, second = run_ranks(config, 2, rank)
    assert first == second
    assert first.metrics(32) == pytest.approx(
        {
            "time/waited_for": 0,
            "time/t_rollout": 5.0,
            "time/t_comm": 2.0,
            "time/t_wait": 1.5,
            "time/t_learn": 5.0,
            "time/t_other": 0.5,
            "time/t_iter": 14.25,
            "time/global_fps": 32 / 14.25,
        }
    )
    assert first.by_rank(7, 32) == {
        "iteration": 7,
        "steps": 32,
        "ended": 99.0,
        "collectives": 2,
        "t_iter": [14.0, 14.5],
        "t_rollout": [4.0, 6.0],
        "t_learn": [7.0, 3.0],
        "t_comm": [2.0, 2.0],
        "t_wait": [1.0, 2.0],
        "t_other": [0.0, 1.0],
        "bytes": [80, 70],
        "bytes_received": [70, 80],
        "peak_memory_mb": [300.0, 200.0],
        "peak_gpu_memory_mb": [0.0, 0.0],
    }


def test_a_single_rank_spends_no_time_on_others():
    config = small_config()
    laps = Laps(rollout=1.0, learn=2.0, other=1.0, total=4.0)
    times = share_metrics(EPISODES, 3, laps, [], plan_of(config), alone(config))[1].metrics(32)
    assert (times["time/t_comm"], times["time/t_wait"], times["time/global_fps"]) == (0.0, 0.0, 8.0)
    assert "time/waited_for" not in times


def batch_of_shards(columns: dict[str, torch.Tensor], shards: int) -> Batch:
    """A batch of columns ``[T, E]``, laid out as a run lays them out."""
    laid = {name: to_shards(x, shards) for name, x in columns.items()}
    return Batch(observations=laid["values"], actions=laid["values"], log_probs=laid["values"], **laid)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 3, 8, 16])
def test_moments_of_all_shards_at_once_have_the_bits_of_each_alone(monkeypatch, shards, rows, masked):
    steps, rng = 128, np.random.default_rng(shards)
    names = ["advantages", "returns", "values"] + ["valid"] * masked
    columns = {name: torch.from_numpy(rng.normal(size=(steps, shards * rows)).astype(np.float32)) for name in names}
    if masked:
        columns["valid"] = (columns["valid"] > -1.0).float()
    indices = np.stack([rng.permutation(steps * rows) for _ in range(2 * shards)])
    indices = indices.reshape(2, shards, 4, -1).swapaxes(1, 2)

    def moments_of(shard: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        some = slice(None) if shard is None else slice(shard * rows, (shard + 1) * rows)
        batch = batch_of_shards({name: x[:, some] for name, x in columns.items()}, shards if shard is None else 1)
        own = indices if shard is None else indices[:, :, shard : shard + 1]
        return advantage_moments(batch, own), moments_of_values(batch)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    together = moments_of(None)
    alone = [torch.cat(each) for each in zip(*map(moments_of, range(shards)), strict=True)]
    for module in (minibatches, statistics):
        monkeypatch.setattr(module, "summed_alone", lambda _: False)
    for whole, parts, one_by_one in zip(together, alone, moments_of(None), strict=True):
        assert torch.equal(whole, parts)
        assert torch.equal(whole, one_by_one)
