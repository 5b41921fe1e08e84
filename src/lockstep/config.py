"""The typed, immutable config: what a run is a function of. Imports no framework.

``Config`` holds what decides the run, ``RunOptions`` how and where it is executed. Files and command line are read
by :mod:`lockstep.config_sources`, what doesn't fit together is found by :mod:`lockstep.config_checks`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.config_sections import (
    AtariConfig,
    CheckpointConfig,
    EnvConfig,
    EvalConfig,
    GRPOConfig,
    ImageConfig,
    LogConfig,
    NetworkConfig,
    NormalizeConfig,
    PPOConfig,
    ProofConfig,
    Section,
)

__all__ = [
    "AtariConfig",
    "CheckpointConfig",
    "Config",
    "EnvConfig",
    "EvalConfig",
    "GRPOConfig",
    "ImageConfig",
    "LogConfig",
    "NetworkConfig",
    "NormalizeConfig",
    "PPOConfig",
    "ProofConfig",
    "RunOptions",
    "Section",
]

MAX_SEQUENCE = 32


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
