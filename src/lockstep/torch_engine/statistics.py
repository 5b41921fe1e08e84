"""Shares what shards must know of each other once an iteration: moments, counts, stop codes; and makes metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lockstep.core.episodes import EPISODE_COLUMNS, EnvMetrics
from lockstep.core.normalizers import merge_shards, shard_moments
from lockstep.core.shards import ShardPlan
from lockstep.torch_engine.advantages import counted_moments, merge_counts, summed_alone
from lockstep.torch_engine.batch import Batch
from lockstep.torch_engine.nets.memory import on_host
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.setup.clock import Laps, RankTimes
from lockstep.torch_engine.state import TrainState
from lockstep.training.limits import RETURN_ROUNDING, non_finite_statistics

if TYPE_CHECKING:
    from lockstep.torch_engine.distributed.communicator import Communicator


@dataclass
class SharedStatistics:
    """Holds every shard's statistics of one iteration, the same on all ranks.

    Attributes:
        advantage_moments: float64 ``[num_shards, num_epochs, num_minibatches, 3]``, count, mean and M2.
        value_moments: float64 ``[num_shards, 2, 2]``, mean and M2 of returns and of returns minus values; with an
            accelerator it is on the host once the update has been read.
        observations: float64 ``[num_shards, 2, size]``, mean and M2, or empty.
        returns: float64 ``[num_shards, 2, 1]``, mean and M2 of discounted returns, or empty.
        episodes: the largest number of episodes that ended in one shard.
        stop: the highest stop code of any rank.
        samples: the number of samples that counted, by shard: int64 ``[num_shards]``.
        has_env_metrics: whether an environment gave metrics of its own.
    """

    advantage_moments: Tensor
    value_moments: Tensor
    observations: np.ndarray
    returns: np.ndarray
    episodes: int
    stop: int
    samples: np.ndarray
    has_env_metrics: bool


def sample_counts(rollout: Rollout, plan: ShardPlan) -> np.ndarray:
    """Counts the steps of each local shard, float64 ``[k]``, without dead ones."""
    counted = np.ones(rollout.done.shape) if rollout.dead is None else (~rollout.dead).astype(np.float64)
    return counted.sum(0).reshape(plan.local_num_shards, -1).sum(1)


def _counting_columns(array: np.ndarray, rollout: Rollout, plan: ShardPlan) -> list[np.ndarray]:
    """Does what :func:`_shard_columns` does, without dead steps."""
    columns = _shard_columns(array, plan)
    if rollout.dead is None:
        return columns
    return [x[~dead] for x, dead in zip(columns, _shard_columns(rollout.dead, plan), strict=True)]


def _shard_columns(array: np.ndarray, plan: ShardPlan) -> list[np.ndarray]:
    """Cuts a host array ``[T, E, …]`` into each local shard's samples ``[T·rows, …]``."""
    rows = plan.envs_per_shard
    parts = [array[:, s * rows : (s + 1) * rows] for s in range(plan.local_num_shards)]
    return [part.reshape(-1, *array.shape[2:]) for part in parts]


def normalizer_moments(state: TrainState, rollout: Rollout, plan: ShardPlan) -> np.ndarray:
    """Computes mean and M2 of observations and of discounted returns by shard: float64 ``[k, 2·size + 2]``."""
    parts = [np.zeros((plan.local_num_shards, 0))]
    if state.observation_normalizer is not None and rollout.moments is not None:
        parts.append(rollout.moments)
    elif state.observation_normalizer is not None:
        layout = state.net.observation
        vectors = layout.floats(rollout.raw_rows())[..., : layout.vector_size]
        parts.append(np.stack([shard_moments(x).ravel() for x in _counting_columns(vectors, rollout, plan)]))
    if state.return_normalizer is not None:
        running = state.return_normalizer.discounted_returns(rollout.rewards, rollout.done)[..., None]
        parts.append(np.stack([shard_moments(x).ravel() for x in _counting_columns(running, rollout, plan)]))
    return np.concatenate(parts, 1)


def split_normalizer_moments(state: TrainState, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Splits ``[num_shards, …]`` into observations ``[num_shards, 2, size]`` and returns ``[num_shards, 2, 1]``."""
    width = 2 * state.net.observation.vector_size if state.observation_normalizer is not None else 0
    observations, returns = (part.reshape(len(rows), 2, part.shape[1] // 2) for part in np.split(rows, [width], 1))
    return observations, returns


def moments_of_values(batch: Batch) -> Tensor:
    """Computes mean and M2 of returns and of returns minus values by shard: float64 ``[k, 2, 2]``; 0: no critic."""
    if batch.returns is None or batch.values is None:
        return torch.zeros((len(batch.advantages), 2, 2), dtype=torch.float64, device=batch.advantages.device)
    if summed_alone(batch.returns.device):
        valid = None if batch.valid is None else batch.valid.flatten(1)
        returns, values = batch.returns.flatten(1), batch.values.flatten(1)
        both = [counted_moments(x, valid)[:, 1:] for x in (returns, returns.double() - values.double())]
        return torch.stack(both, 1)
    per_shard = []
    for shard, (returns, values) in enumerate(zip(batch.returns.flatten(1), batch.values.flatten(1), strict=True)):
        valid = None if batch.valid is None else batch.valid[shard].flatten()
        both = [counted_moments(x, valid)[1:] for x in (returns, returns.double() - values.double())]
        per_shard.append(torch.stack(both))
    return torch.stack(per_shard)


def share(
    state: TrainState,
    rollout: Rollout,
    batch: Batch,
    advantage_moments: Tensor,
    finished: np.ndarray,
    stop: int,
    plan: ShardPlan,
    communicator: Communicator,
) -> SharedStatistics:
    """Gathers every shard's statistics and the ranks' stop codes, once, in shard order.

    ``advantage_moments`` are those of the local shards. What was computed on an accelerator stays there, and is
    gathered in a collective of its own.
    """
    k, rows = plan.local_num_shards, plan.envs_per_shard
    shard_of = (finished[:, 1].astype(np.int64) // rows) - plan.shards.start
    counts = np.bincount(shard_of, minlength=k).astype(np.float64)
    metrics_given = np.full(k, float(bool(rollout.env_metrics)))
    flags = np.stack([counts, np.full(k, float(stop)), sample_counts(rollout, plan), metrics_given], 1)
    normal = normalizer_moments(state, rollout, plan)
    value_moments = moments_of_values(batch).reshape(k, -1)
    computed = torch.cat([advantage_moments.reshape(k, -1), value_moments], 1)
    known = torch.from_numpy(np.concatenate([flags, normal], 1))
    computed, known = _gathered(computed, known, communicator)
    adv, all_value_moments = torch.split(computed, [advantage_moments[0].numel(), value_moments.shape[1]], 1)
    flag, norm = torch.split(known, [flags.shape[1], normal.shape[1]], 1)
    observations, returns = split_normalizer_moments(state, norm.numpy())
    return SharedStatistics(
        advantage_moments=adv.reshape(-1, *advantage_moments.shape[1:]),
        value_moments=all_value_moments.reshape(-1, 2, 2),
        observations=observations,
        returns=returns,
        episodes=int(flag[:, 0].max()),
        stop=int(flag[:, 1].max()),
        samples=flag[:, 2].numpy().astype(np.int64),
        has_env_metrics=bool(flag[:, 3].any()),
    )


def _gathered(computed: Tensor, known: Tensor, communicator: Communicator) -> tuple[Tensor, Tensor]:
    """Gathers what the policy's device and what the host computed, ``[local shards, …]`` each; at once on a CPU."""
    if not on_host(computed.device):
        return communicator.gather_shards(computed), communicator.gather_shards(known)
    together = communicator.gather_shards(torch.cat([computed, known], 1))
    first, second = torch.split(together, [computed.shape[1], known.shape[1]], 1)
    return first, second


def explained_variance(value_moments: Tensor, counts: np.ndarray) -> float | None:
    """Computes 1 - Var(returns - values) / Var(returns) over all samples; each shard has ``counts`` of them.

    Returns None if returns vary by no more than float32 rounds them; they are made of residuals and values.
    """
    each = torch.from_numpy(counts.astype(np.float64)).view(-1, 1, 1).expand(-1, 2, 1)
    _, mean, std = merge_counts(torch.cat([each, value_moments.cpu()], -1))
    if std[0] <= RETURN_ROUNDING * (mean.abs().sum() + std[1]):
        return None
    returns, residuals = std.square().tolist()
    return 1.0 - residuals / returns


def merge_normalizers(
    state: TrainState, observations: np.ndarray, returns: np.ndarray, counts: np.ndarray, iteration: int
) -> None:
    """Merges the shards' moments, of ``counts`` samples each, into the normalisers, after the iteration is over.

    Raises:
        NonFiniteError: on all ranks, if the moments aren't finite afterwards.
    """
    if state.observation_normalizer is not None:
        merge_shards(state.observation_normalizer.moments, observations, counts)
        state.observation_normalizer.freeze()
    if state.return_normalizer is not None:
        merge_shards(state.return_normalizer.moments, returns, counts)
    for name, normalizer in (("observations", state.observation_normalizer), ("returns", state.return_normalizer)):
        if normalizer is not None and not normalizer.moments.finite:
            raise non_finite_statistics(iteration, name)


def initial_statistics(state: TrainState, rollout: Rollout, plan: ShardPlan, communicator: Communicator) -> None:
    """Gives the normalisers their first statistics, from a rollout of random actions."""
    measured = normalizer_moments(state, rollout, plan)
    local = torch.from_numpy(np.concatenate([sample_counts(rollout, plan)[:, None], measured], 1))
    rows = communicator.gather_shards(local).numpy()
    merge_normalizers(state, *split_normalizer_moments(state, rows[:, 1:]), rows[:, 0].astype(np.int64), 0)
    if state.return_normalizer is not None:
        state.return_normalizer.running = np.zeros(plan.local_num_envs)


def share_metrics(
    finished: np.ndarray,
    episodes: int,
    laps: Laps,
    durations: list[float],
    plan: ShardPlan,
    communicator: Communicator,
) -> tuple[np.ndarray, RankTimes]:
    """Gathers the episodes (see :meth:`EpisodeCounter.finished`) and the times of all ranks in one collective.

    ``episodes`` is the largest number that ended in one shard. ``durations`` are the seconds of each of this rank's
    collectives; every rank has made the same number.
    """
    table = np.zeros((plan.tree.most_shards * episodes, EPISODE_COLUMNS))
    table[: len(finished)] = finished
    numbers = laps.numbers()
    local = torch.from_numpy(np.concatenate([[len(finished)], numbers, durations, table.ravel()]))
    everyone = communicator.gather_ranks(local).numpy()
    ends = np.cumsum([1, len(numbers), len(durations)])
    counts, laps_of_all, spent, tables = np.split(everyone, ends, 1)
    rows = [rows.reshape(-1, EPISODE_COLUMNS)[: int(n)] for rows, n in zip(tables, counts[:, 0], strict=True)]
    return np.concatenate(rows), RankTimes.of(laps_of_all, spent)


def share_env_metrics(env_metrics: EnvMetrics, communicator: Communicator) -> EnvMetrics:
    """Gathers the environments' own metrics of all ranks; a collective, only for iterations in which there are any."""
    everyone = communicator.gather_json([[*key, dict(said)] for key, said in env_metrics.items()])
    return {(step, env): said for rows in everyone for step, env, said in rows}
