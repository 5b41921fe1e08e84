"""The typed, immutable config: what a run is a function of. Imports no framework.

``Config`` holds what decides the run, ``RunOptions`` how and where it is executed. Files and command line are read
by :mod:`lockstep.config_sources`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lockstep.shards import check_shards, check_world_size, default_num_shards

MAX_SEQUENCE = 32


class Section(BaseModel):
    """A frozen group of settings that knows every one of its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _scientific(cls, values: Any) -> Any:
        """Whole numbers may be written as 1e6 (which YAML takes for text)."""
        if not isinstance(values, dict):
            return values
        whole = {name for name, info in cls.model_fields.items() if info.annotation in (int, int | None)}
        pattern = re.compile(r"\d+(\.\d+)?[eE]\+?\d{1,2}")
        return {
            k: float(v) if k in whole and isinstance(v, str) and pattern.fullmatch(v) else v for k, v in values.items()
        }


class EnvConfig(Section):
    """The environment."""

    id: str = Field(
        default="CartPole-v1", min_length=1, description="Gymnasium id ('module:Id-v0' imports module first)"
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment, as JSON")
    max_episode_steps: int | None = Field(
        default=None, ge=1, description="time limit in steps; None: the environment's own"
    )
    action_mask: str | None = Field(
        default=None,
        min_length=1,
        description="which actions are allowed: info (info['action_mask']), method (env.action_masks()), or an entry "
        "of a Dict observation; None: all",
    )
    workers: int = Field(
        default=0, ge=0, description="worker processes per rank that step environments; 0: in the rank itself"
    )
    timeout: float = Field(default=60.0, gt=0, description="seconds an environment may take for a step or a reset")

    @model_validator(mode="before")
    @classmethod
    def _from_id(cls, value: Any) -> Any:
        return {"id": value} if isinstance(value, str) else value


class PPOConfig(Section):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    learning_rate: float = Field(default=3e-4, gt=0, description="Adam's step size")
    schedule: Literal["constant", "linear", "adaptive"] = Field(
        default="linear",
        description="of the learning rate: linear falls to 0 over total_steps, adaptive follows desired_kl",
    )
    gamma: float = Field(default=0.99, ge=0, le=1, description="discount per step")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="lambda of GAE (Schulman et al. 2016)")
    num_epochs: int = Field(default=4, ge=1, description="passes over each rollout")
    num_minibatches: int = Field(default=4, ge=1, description="minibatches (optimiser steps) per epoch")
    gradient_accumulation: int = Field(
        default=1, ge=1, description="parts in which a minibatch goes through the networks, to save memory"
    )
    clip_range: float = Field(default=0.2, gt=0, description="clipping of the probability ratio")
    value_clip_range: float | None = Field(default=None, gt=0, description="clipping of the value's change; None: off")
    advantage_normalization: Literal["global", "local", "off"] = Field(
        default="global", description="over the global minibatch, over each shard's part of it, or not at all"
    )
    entropy_coef: float = Field(default=0.0, ge=0, description="weight of the entropy bonus")
    value_coef: float = Field(
        default=0.5,
        ge=0,
        description="weight of the value loss 0.5*(v-return)^2 (as in CleanRL; SB3's vf_coef is half of it)",
    )
    max_grad_norm: float | None = Field(
        default=0.5, gt=0, description="clipping by global norm, after the reduction; None: off"
    )
    target_kl: float | None = Field(
        default=None, gt=0, description="stop an update above 1.5 times this approx_kl; None: off"
    )
    desired_kl: float = Field(default=0.01, gt=0, description="what the adaptive schedule aims at")
    adam_eps: float = Field(default=1e-5, gt=0, description="Adam's epsilon")
    adam_betas: tuple[float, float] = Field(default=(0.9, 0.999), description="Adam's decay rates")


class GRPOConfig(Section):
    """Group-relative policy optimisation (Shao et al. 2024); it takes its optimisation from the ppo section."""

    group_size: int = Field(
        default=8, ge=2, description="environments that start each iteration from the same seeded state"
    )
    normalize_std: bool = Field(
        default=True, description="divide by the group's standard deviation (Liu et al. 2025 leave that out)"
    )
    kl_coef: float = Field(default=0.0, ge=0, description="weight of the KL divergence from the reference policy")
    reference: str | None = Field(
        default=None, min_length=1, description="run or checkpoint of the reference policy; None: the initial one"
    )


class ImageConfig(Section):
    """Convolutions for image observations."""

    kind: Literal["auto", "nature", "impala", "simple"] = Field(
        default="auto",
        description="nature (Mnih et al. 2015), impala (Espeholt et al. 2018), simple (3x3 at full resolution, for "
        "small grids); auto: nature from 36 pixels on, else simple",
    )
    width: float = Field(default=1.0, gt=0, description="channels and features are multiplied by it")
    depth: int = Field(default=2, ge=1, description="residual blocks per stage (impala) or layers (simple)")

    @model_validator(mode="before")
    @classmethod
    def _from_kind(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class NetworkConfig(Section):
    """Actor and critic: image encoder, recurrent core, hidden layers, head; what isn't needed is left out."""

    hidden_sizes: tuple[int, ...] = Field(
        default=(64, 64), description="units of each hidden layer, of actor and critic"
    )
    activation: Literal["tanh", "relu", "elu", "silu", "gelu"] = Field(
        default="tanh", description="after each hidden layer"
    )
    shared: bool = Field(default=False, description="actor and critic share all but their heads")
    log_std_init: float = Field(default=0.0, description="initial log standard deviation of continuous actions")
    state_dependent_std: bool = Field(
        default=False, description="the actor gives the standard deviation too, instead of one parameter per component"
    )
    squash: bool = Field(
        default=False, description="tanh squashes continuous actions into their bounds; else they are clipped"
    )
    image: ImageConfig = ImageConfig()
    recurrent: Literal["lstm", "gru"] | None = Field(
        default=None, description="recurrent core before the hidden layers"
    )
    recurrent_size: int = Field(default=128, ge=1, description="units of the recurrent core")
    sequence_length: int | None = Field(
        default=None,
        ge=1,
        description="steps through which gradients flow back; divides num_steps (default: its largest such, up to 32)",
    )
    custom: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:[\w.]+$",
        description="a torch.nn.Module in place of all this, as 'module:Class'; see docs/networks.md",
    )
    custom_kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the custom module, as JSON")


class NormalizeConfig(Section):
    """Running normalisation; its statistics are frozen during an iteration."""

    observations: bool = Field(default=False, description="to zero mean and unit variance")
    returns: bool = Field(
        default=False, description="rewards divided by the standard deviation of the discounted return"
    )
    clip_observations: float = Field(default=10.0, gt=0, description="limit of a normalised observation's components")
    clip_rewards: float = Field(default=10.0, gt=0, description="limit of a normalised reward")


class CheckpointConfig(Section):
    """Checkpoints."""

    interval: int = Field(default=50, ge=0, description="iterations between checkpoints; 0: only at the end")
    keep_last: int = Field(default=3, ge=1, description="newest checkpoints to keep")
    keep_best: bool = Field(default=True, description="keep the checkpoint with the best return as well")
    replay_limit: int = Field(
        default=10_000, ge=0, description="longest live episode, in steps, that is restored by replaying it"
    )


class EvalConfig(Section):
    """Evaluation during training."""

    interval: int = Field(default=0, ge=0, description="iterations between evaluations; 0: none")
    episodes: int = Field(
        default=16, ge=1, description="episodes of an evaluation, rounded up to a multiple of num_shards"
    )
    max_steps: int = Field(default=10_000, ge=1, description="longer episodes are cut here")
    record_video: bool = Field(
        default=False, description="record an episode of each evaluation as videos/step_<n>.mp4, for trackers too"
    )


class LogConfig(Section):
    """Trackers; metrics.jsonl and metrics.csv are always written."""

    tensorboard: bool = Field(default=True, description="write TensorBoard event files")
    jsonl: str | None = Field(default=None, description="a second metrics.jsonl at this path")
    timing: bool = Field(default=False, description="write each rank's times, bytes and memory to timing.jsonl")
    wandb: bool = Field(default=False, description="log to Weights & Biases; WANDB_MODE=offline: to files only")
    trackio: bool = Field(default=False, description="log to Trackio")
    mlflow: bool = Field(default=False, description="log to MLflow; to <runs_dir>/mlflow.db or MLFLOW_TRACKING_URI")
    project: str | None = Field(
        default=None, min_length=1, description="project of W&B and Trackio, experiment of MLflow (default: lockstep)"
    )
    group: str | None = Field(default=None, min_length=1, description="of runs, in W&B, Trackio and MLflow")
    tags: tuple[str, ...] | None = Field(default=None, description="labels in W&B, Trackio and MLflow")
    entity: str | None = Field(default=None, min_length=1, description="W&B user or team")


class ProofConfig(Section):
    """Fingerprints of every parameter and moment, compared across ranks."""

    interval: int = Field(default=10, ge=0, description="iterations between comparisons; 0: only at start and end")
    trace: bool = Field(default=False, description="write each iteration's fingerprints to fingerprints.jsonl")


class Config(Section):
    """What a run is a function of."""

    env: EnvConfig = EnvConfig()
    algorithm: Literal["ppo", "grpo"] = Field(default="ppo", description="PPO with a critic, or GRPO without")
    engine: Literal["torch"] = Field(default="torch", description="framework that trains")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where policy and update run")
    seed: int = Field(default=0, ge=0, description="of every random number")
    total_steps: int = Field(default=100_000, ge=1, description="global environment steps; schedules run over them")
    num_envs: int | None = Field(default=None, ge=1, description="environments of the whole run (default 8)")
    num_envs_per_rank: Annotated[int, Field(ge=1)] | Literal["auto", "max"] | None = Field(
        default=None,
        description="instead of num_envs: environments grow with ranks; auto: sized by memory and cores, max: larger",
    )
    num_shards: int | None = Field(
        default=None,
        ge=1,
        description="power of two; the most ranks that can share the run (default: divides num_envs, at most 8)",
    )
    num_steps: int = Field(default=128, ge=1, description="steps of each environment in a rollout")
    reduction: Literal["exact", "fast"] = Field(
        default="exact", description="exact: bitwise equal for every number of ranks; fast: DDP's own all-reduce"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="bf16: networks compute in bfloat16 (autocast); parameters and losses stay float32"
    )
    fsdp: bool = Field(
        default=False, description="shard parameters and moments over ranks (FSDP2), for large networks; reduction fast"
    )
    sync_period: int = Field(
        default=1,
        ge=1,
        description="optimiser steps that a rank takes by itself before parameters and moments are averaged; above 1: "
        "reduction fast",
    )
    compile: bool = Field(default=False, description="torch.compile the loss of a shard; takes a while at the start")
    cuda_graphs: bool = Field(default=False, description="with compile on a GPU: replay the loss as CUDA graphs")
    threads: int = Field(default=1, ge=1, description="CPU threads per rank; results depend on it in the last bits")
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="of the collectives: gloo on CPU, NCCL on GPU"
    )
    collectives: Literal["auto", "shared", "backend"] = Field(
        default="auto",
        description="how CPU tensors travel; shared: memory of one host; backend: its own; auto: shared where possible",
    )
    ppo: PPOConfig = PPOConfig()
    grpo: GRPOConfig = GRPOConfig()
    network: NetworkConfig = NetworkConfig()
    normalize: NormalizeConfig = NormalizeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    proof: ProofConfig = ProofConfig()

    @property
    def envs(self) -> int:
        """``num_envs`` of a resolved config."""
        assert self.num_envs is not None, "the config is not resolved"
        return self.num_envs

    @property
    def shards(self) -> int:
        """``num_shards`` of a resolved config."""
        assert self.num_shards is not None, "the config is not resolved"
        return self.num_shards

    @property
    def sequence_length(self) -> int:
        """Steps of one training sequence: 1 without a recurrent core."""
        if self.network.recurrent is None:
            return 1
        wanted = self.network.sequence_length
        return wanted or max(n for n in range(1, MAX_SEQUENCE + 1) if self.num_steps % n == 0)

    @property
    def group_size(self) -> int:
        """Environments that share their starts: 1 but for GRPO."""
        return self.grpo.group_size if self.algorithm == "grpo" else 1

    @property
    def steps_per_iteration(self) -> int:
        """Global environment steps of one iteration."""
        return self.envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """Iterations until ``total_steps`` are done, the last one whole."""
        return -(-self.total_steps // self.steps_per_iteration)


class RunOptions(Section):
    """How and where a run is executed; nothing here changes the agent."""

    nproc: int | Literal["auto"] = Field(
        default=1, description="ranks on this machine, or auto: what cores or GPUs allow"
    )
    name: str | None = Field(
        default=None, min_length=1, description="of the run directory (default: environment, seed and time)"
    )
    runs_dir: str = Field(default="runs", min_length=1, description="where run directories are made")
    resume: str | None = Field(default=None, description="run (name or path) or checkpoint to continue")
    stop_at_step: int | None = Field(
        default=None, ge=1, description="end with a checkpoint once this many global steps are done"
    )
    max_hours: float | None = Field(default=None, gt=0, description="end with a checkpoint after this wall time")
    quiet: bool = Field(default=False, description="print only errors and warnings")

    @model_validator(mode="after")
    def _positive(self) -> RunOptions:
        if self.nproc != "auto" and self.nproc < 1:
            raise ValueError(f"nproc: {self.nproc} ranks; at least 1, or auto")
        if self.name is not None and ("/" in self.name or self.name in (".", "..")):
            raise ValueError(f"name: {self.name!r} is not a plain directory name; --runs-dir says where it is made")
        return self


def resolve(config: Config, world_size: int = 1) -> Config:
    """Fix ``num_envs`` and ``num_shards`` and check that everything divides.

    Raises:
        ValueError: one line with the key, the value and the nearest values that work.
    """
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
        if num_shards is None:
            _check_power_of_two(world_size)
            num_shards = world_size
    num_envs = num_envs or 8
    num_shards = num_shards or default_num_shards(max(1, num_envs // config.group_size))
    check_shards(num_envs, num_shards)
    check_world_size(world_size, num_shards)
    _check_minibatches(config, num_envs // num_shards)
    _check_choices(config)
    return config.model_copy(update={"num_envs": num_envs, "num_envs_per_rank": None, "num_shards": num_shards})


def _check_power_of_two(world_size: int) -> None:
    if world_size & (world_size - 1):
        below = 1 << (world_size.bit_length() - 1)
        raise ValueError(
            f"nproc: {world_size} ranks with num_envs_per_rank make {world_size} shards, which is no power of two; "
            f"nearest that work: {below} or {2 * below} ranks"
        )


def _check_minibatches(config: Config, envs_per_shard: int) -> None:
    length = config.sequence_length
    if config.num_steps % length:
        raise ValueError(
            f"network.sequence_length: {length} doesn't divide num_steps {config.num_steps}; nearest that work: "
            f"{_nearest_divisors(config.num_steps, length)}"
        )
    units, wanted = envs_per_shard * config.num_steps // length, config.ppo.num_minibatches
    what = f"{config.num_steps} steps = {units} samples" if length == 1 else f"{config.num_steps} steps / {length} = "
    if length > 1:
        what += f"{units} sequences"
    if units % wanted:
        raise ValueError(
            f"ppo.num_minibatches: {wanted} doesn't divide a shard's {envs_per_shard} environments x {what}; nearest "
            f"that work: {_nearest_divisors(units, wanted)}"
        )
    part = units // wanted
    if part % config.ppo.gradient_accumulation:
        raise ValueError(
            f"ppo.gradient_accumulation: {config.ppo.gradient_accumulation} doesn't divide a shard's minibatch of "
            f"{part}; nearest that work: {_nearest_divisors(part, config.ppo.gradient_accumulation)}"
        )
    if envs_per_shard % config.group_size:
        raise ValueError(
            f"grpo.group_size: {config.group_size} doesn't divide a shard's {envs_per_shard} environments (groups "
            f"don't cross shards); nearest that work: {_nearest_divisors(envs_per_shard, config.group_size)}"
        )


def _nearest_divisors(number: int, wanted: int) -> str:
    fits = [n for n in range(1, number + 1) if number % n == 0]
    return " or ".join(map(str, sorted(sorted(fits, key=lambda n: abs(n - wanted))[:2])))


def _check_choices(config: Config) -> None:
    for name, table in (("env.kwargs", config.env.kwargs), ("network.custom_kwargs", config.network.custom_kwargs)):
        try:
            plain = json.loads(json.dumps(table)) == table
        except (TypeError, ValueError):
            plain = False
        if not plain:
            raise ValueError(f"{name}: {table!r} is more than JSON can hold (text as keys; numbers, text, lists)")
    if config.backend == "nccl" and config.device == "cpu":
        raise ValueError("backend: nccl works on GPUs only and device is cpu; use backend gloo or device cuda")
    if config.collectives == "shared" and config.device == "cuda" and config.backend != "gloo":
        raise ValueError(
            f"collectives: shared, but backend {config.backend} keeps tensors on the GPU; use backend gloo or "
            "collectives auto"
        )
    _check_scale(config)
    if any(size < 1 for size in config.network.hidden_sizes):
        raise ValueError(f"network.hidden_sizes: {list(config.network.hidden_sizes)} has a layer below 1 unit")
    if config.algorithm == "grpo" and config.normalize.returns:
        raise ValueError(
            "normalize.returns: GRPO's advantages are relative to the group and need no scale; leave it out"
        )
    _check_log(config)
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
    if config.fsdp and config.sync_period > 1:
        raise ValueError(
            f"sync_period: {config.sync_period} needs whole parameters on every rank and fsdp shards them; "
            "leave one out"
        )
    if config.cuda_graphs and not (config.compile and config.device == "cuda"):
        raise ValueError(
            f"cuda_graphs: needs compile true and device cuda, and compile is {str(config.compile).lower()}, device "
            f"{config.device}"
        )


def _check_log(config: Config) -> None:
    log = config.log
    if config.eval.record_video and not config.eval.interval:
        raise ValueError("eval.record_video: there are no evaluations (eval.interval 0); e.g. --eval.interval 10")
    if log.entity is not None and not log.wandb:
        raise ValueError(f"log.entity: {log.entity} is for Weights & Biases, which is off; add --log.wandb")
    given = [key for key in ("project", "group", "tags") if getattr(log, key)]
    if given and not (log.wandb or log.trackio or log.mlflow):
        raise ValueError(f"log.{given[0]}: no tracker takes it; add --log.wandb, --log.trackio or --log.mlflow")
