"""Checks that settings fit together; an error is one line with the key, the value and what would work."""

from __future__ import annotations

import json

from lockstep.config.engines import check_engine
from lockstep.config.redact import shown_value
from lockstep.config.run import Config
from lockstep.config.sections import MOST, SERVICES
from lockstep.core.shards import check_shards, check_world_size, default_num_shards, nearest_divisors


def resolve(config: Config, world_size: int = 1) -> Config:
    """Fixes ``num_envs`` and ``num_shards`` for ``world_size`` ranks (JAX engine: devices) and checks the config.

    Raises:
        ValueError: one line with the key, the value and the nearest values that work.
    """
    num_envs, num_shards = envs_and_shards(config, world_size)
    size, config = config.ppo.batch_size, in_steps_and_minibatches(config, num_envs, num_shards)
    if config.num_shards is None:
        _check_enough(config, world_size, num_envs, num_shards)
    check_world_size(world_size, num_shards, *(("devices", "devices") if config.engine == "jax" else ()))
    _check_minibatches(config, num_envs // num_shards, num_shards, size)
    _check_normalization(config, num_envs // num_shards, num_shards, world_size, size)
    _check_choices(config)
    if config.cuda_graphs is True and world_size > 1:
        raise ValueError(
            f"cuda_graphs: true, but optimiser steps of {world_size} ranks can't be captured; leave it out, or "
            "resume with --no-cuda-graphs"
        )
    return config.model_copy(update={"num_envs": num_envs, "num_envs_per_rank": None, "num_shards": num_shards})


def _check_enough(config: Config, world_size: int, num_envs: int, num_shards: int) -> None:
    """Refuses too few default shards for ``world_size`` ranks, and suggests settings that give enough."""
    if num_shards >= world_size:
        return
    ranks = f"{world_size} {'devices' if config.engine == 'jax' else 'ranks'}"
    units = num_envs // config.group_size  # because groups don't cross shards
    fits = [n for n in range(world_size, units + 1) if units % n == 0]
    if fits:
        what = f"--num-shards {fits[0]}"
    else:
        what = f"num_envs {-(-num_envs // (world_size * config.group_size)) * world_size * config.group_size}"
        what += f" with --num-shards {world_size}"
    raise ValueError(
        f"num_envs: {num_envs} environments make {num_shards} shard{'s' if num_shards > 1 else ''} by default and "
        f"{ranks} need one each; for a new run use {what}, or at most {num_shards} of them"
    )


def in_steps_and_minibatches(config: Config, num_envs: int, num_shards: int = 1) -> Config:
    """Replaces ``total_iterations`` by ``total_steps`` and ``ppo.batch_size`` by ``ppo.num_minibatches``.

    ``num_envs`` is the number of environments of the whole run, and ``num_shards`` that of the shards which share the
    sizes that an error offers. Raises the errors of :func:`resolve`.
    """
    samples, size = num_envs * config.num_steps, config.ppo.batch_size
    if size is not None:
        if samples % size:
            every = num_shards * config.sequence_length
            every = 1 if samples % every else every
            raise ValueError(
                f"ppo.batch_size: {size} doesn't divide num_envs {num_envs} x num_steps {config.num_steps} = {samples} "
                f"samples; nearest that work: {nearest_divisors(samples // every, size / every, every)}"
            )
        ppo = config.ppo.model_copy(update={"num_minibatches": samples // size, "batch_size": None})
        config = config.model_copy(update={"ppo": ppo})
    if config.total_iterations is None:
        return config
    if config.total_iterations * samples > MOST:
        raise ValueError(
            f"total_iterations: {config.total_iterations} x num_envs {num_envs} x num_steps {config.num_steps} is more "
            f"than {MOST} steps; give at most {MOST // samples}"
        )
    return config.model_copy(update={"total_steps": config.total_iterations * samples, "total_iterations": None})


def envs_and_shards(config: Config, world_size: int) -> tuple[int, int]:
    """Returns the numbers of environments and shards of a run on ``world_size`` ranks; errors as :func:`resolve`."""
    num_envs, num_shards = config.num_envs, config.num_shards
    if config.num_envs_per_rank is not None:
        if isinstance(config.num_envs_per_rank, str):
            raise ValueError(
                f"num_envs_per_rank: {config.num_envs_per_rank} is made a number by lockstep train alone; give a number"
            )
        if num_envs is not None:
            raise ValueError(
                f"num_envs_per_rank: {config.num_envs_per_rank} given together with num_envs {num_envs}; give one"
            )
        num_envs = config.num_envs_per_rank * world_size
        num_shards = num_shards or world_size
    num_envs = num_envs or 8
    num_shards = num_shards or default_num_shards(max(1, num_envs // config.group_size))
    check_shards(num_envs, num_shards)
    return num_envs, num_shards


def _check_minibatches(config: Config, envs_per_shard: int, num_shards: int, size: int | None) -> None:
    """Checks what divides a shard's samples; ``size`` is the batch size that stands for ``num_minibatches``, if any."""
    length = config.sequence_length
    if config.num_steps % length:
        raise ValueError(
            f"network.sequence_length: {length} doesn't divide num_steps {config.num_steps}; nearest that work: "
            f"{nearest_divisors(config.num_steps, length)}"
        )
    units, wanted = envs_per_shard * config.num_steps // length, config.ppo.num_minibatches
    what = f"= {units} samples" if length == 1 else f"/ {length} = {units} sequences"
    if units % wanted and not (config.ppo.drop_remainder and wanted <= units):
        given, fitting = f"ppo.num_minibatches: {wanted} doesn't divide", nearest_divisors(units, wanted)
        if size is not None:
            every = num_shards * length  # a minibatch has as many sequences of every shard
            given = f"ppo.batch_size: {size} makes {wanted} minibatches, and {wanted} doesn't divide"
            fitting = nearest_divisors(units, size / every, every)
        raise ValueError(
            f"{given} a shard's {envs_per_shard} environments x {config.num_steps} steps {what}; nearest that work: "
            f"{fitting}"
        )
    part = units // wanted
    if part % config.ppo.gradient_accumulation:
        raise ValueError(
            f"ppo.gradient_accumulation: {config.ppo.gradient_accumulation} doesn't divide a shard's minibatch of "
            f"{part}; nearest that work: {nearest_divisors(part, config.ppo.gradient_accumulation)}"
        )
    if envs_per_shard % config.group_size:
        raise ValueError(
            f"grpo.group_size: {config.group_size} doesn't divide a shard's {envs_per_shard} environments (groups "
            f"don't cross shards); nearest that work: {nearest_divisors(envs_per_shard, config.group_size)}"
        )


def _check_normalization(
    config: Config, envs_per_shard: int, num_shards: int, world_size: int, size: int | None
) -> None:
    """Refuses to normalise the advantage of a single sample, which always gives 0 and so trains nothing."""
    over, wanted = config.ppo.advantage_normalization, config.ppo.num_minibatches
    if config.algorithm == "grpo" or over == "off":
        return
    units = envs_per_shard * config.num_steps // config.sequence_length
    shards = {"global": num_shards, "rank": num_shards // world_size, "local": 1}[over]
    if units // wanted * config.sequence_length * shards > 1:
        return
    rank = "device" if config.engine == "jax" else "rank"
    place = {"global": "", "rank": f"a {rank}'s part of ", "local": "a shard's part of "}[over]
    fewer = max((n for n in range(1, wanted) if units % n == 0), default=None)
    instead = ["more num_steps" if fewer is None else f"ppo.num_minibatches {fewer}"]
    if fewer is not None and size is not None:
        instead = [f"ppo.batch_size {envs_per_shard * num_shards * config.num_steps // fewer}"]
    instead += [] if num_shards == 1 or over == "global" else ["global"]
    raise ValueError(
        f"ppo.advantage_normalization: {over}, but {place}a minibatch is 1 sample, whose advantage would always be "
        f"normalised to 0; it takes 2 at least: use {', '.join(instead)} or off"
    )


def _check_choices(config: Config) -> None:
    tables = {"env.kwargs": config.env.kwargs, "network.custom_kwargs": config.network.custom_kwargs}
    for name, table in (tables | {"ppo.loss_kwargs": config.ppo.loss_kwargs}).items():
        try:
            plain = json.loads(json.dumps(table, allow_nan=False)) == table
        except (TypeError, ValueError):
            plain = False
        if not plain:
            raise ValueError(
                f"{name}: {shown_value(table)!r} is more than JSON can hold (text as keys, finite numbers, lists)"
            )
    check_engine(config)
    if config.backend == "nccl" and config.device != "cuda":
        raise ValueError(
            f"backend: nccl works on CUDA GPUs only and device is {config.device}; use backend gloo or device cuda"
        )
    if config.collectives == "shared" and config.device != "cpu" and config.backend != "gloo":
        raise ValueError(
            f"collectives: shared, but backend {config.backend} keeps tensors on the GPU; use backend gloo or "
            "collectives auto"
        )
    _check_scale(config)
    if any(size < 1 for size in config.network.hidden_sizes):
        raise ValueError(f"network.hidden_sizes: {list(config.network.hidden_sizes)} has a layer below 1 unit")
    if config.network.custom is not None and config.network.recurrent is not None:
        raise ValueError(
            f"network.recurrent: {config.network.recurrent}, but network.custom {config.network.custom} stands in "
            "place of all networks; leave one of them out"
        )
    if config.algorithm == "grpo" and config.normalize.returns:
        raise ValueError(
            "normalize.returns: GRPO's advantages are relative to the group and need no scale; leave it out"
        )
    _check_log(config)
    if config.ppo.loss_kwargs and config.ppo.loss is None:
        raise ValueError(
            f"ppo.loss_kwargs: {config.ppo.loss_kwargs}, but there is no ppo.loss to be called with them; give one, "
            "e.g. --ppo.loss my_losses:mine"
        )
    if config.network.custom_kwargs and config.network.custom is None:
        raise ValueError(
            f"network.custom_kwargs: {shown_value(config.network.custom_kwargs)}, but there is no network.custom to be "
            "made with them; give one, e.g. --network.custom my_nets:Mine"
        )
    if config.ppo.entropy_schedule != "constant" and not config.ppo.entropy_coef:
        raise ValueError(
            f"ppo.entropy_schedule: {config.ppo.entropy_schedule}, but ppo.entropy_coef is 0 and there is nothing to "
            "schedule; give one, e.g. --ppo.entropy-coef 0.01"
        )
    if not all(0 <= beta < 1 for beta in config.ppo.adam_betas):
        raise ValueError(f"ppo.adam_betas: {list(config.ppo.adam_betas)} must lie in [0, 1)")


def _check_scale(config: Config) -> None:
    if config.fsdp and config.reduction == "exact":
        raise ValueError(
            "fsdp: true sums gradients in an order that depends on the ranks, which reduction exact doesn't allow; "
            "use reduction fast"
        )
    if config.sync_period > 1 and config.reduction == "exact":
        raise ValueError(
            f"sync_period: {config.sync_period} makes the agent depend on the number of ranks, which reduction exact "
            "doesn't allow; use reduction fast or sync_period 1"
        )
    if config.ppo.advantage_normalization == "rank" and config.reduction == "exact":
        raise ValueError(
            "ppo.advantage_normalization: rank makes the agent depend on the number of ranks, which reduction exact "
            "doesn't allow; use reduction fast, or global or local (by shard)"
        )
    if config.fsdp and config.sync_period > 1:
        raise ValueError(
            f"sync_period: {config.sync_period} needs whole parameters on every rank and fsdp shards them; leave "
            "one out"
        )
    if config.cuda_graphs is True and (reason := ungraphed(config)) is not None:
        raise ValueError(f"cuda_graphs: true, but {reason}; leave it out")


def ungraphed(config: Config) -> str | None:
    """Says why a run's steps can't be captured as graphs, which replay without the host; None if they can."""
    if config.device == "cpu":
        return "device is cpu, which has no graphs"
    if config.network.custom is not None:
        return f"network.custom {config.network.custom} is keyed by the host at every step"
    if config.fsdp:
        return "with fsdp the host takes part in every step"
    if config.sync_period > 1:
        return f"with sync_period {config.sync_period} the host takes part in every step"
    return None


def _check_log(config: Config) -> None:
    log = config.log
    if config.eval.record_video and not config.eval.interval:
        raise ValueError("eval.record_video: there are no evaluations (eval.interval 0); e.g. --eval.interval 10")
    if log.entity is not None and not log.wandb:
        raise ValueError(f"log.entity: {log.entity} is for Weights & Biases, which is off; add --log.wandb")
    given = [key for key in ("project", "group", "tags") if getattr(log, key)]
    if given and not any(getattr(log, service) for service in SERVICES):
        options = [f"--log.{service}" for service in SERVICES]
        raise ValueError(f"log.{given[0]}: no tracker takes it; add {', '.join(options[:-1])} or {options[-1]}")
