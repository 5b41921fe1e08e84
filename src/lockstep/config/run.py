"""The typed, immutable config that a run is a function of. Imports no framework.

``Config`` holds what decides the run, ``RunOptions`` how and where it is executed. Files and command line are read
by :mod:`lockstep.config.command_line`; :mod:`lockstep.config.checks` checks that settings fit together.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from lockstep.config.algorithms import GRPOConfig, PPOConfig
from lockstep.config.sections import (
    MOST_SEED,
    MOST_SIZE,
    CheckpointConfig,
    EnvConfig,
    EvalConfig,
    LogConfig,
    NetworkConfig,
    NormalizeConfig,
    ProofConfig,
    Section,
)

MAX_SEQUENCE = 32
AUTO = "auto"
MOST_SILENCE = 600.0
MOST_THREADS = 1024
RANGE = r"^[0-9]{1,6}:[0-9]{1,6}$"
SEEDS = r"^[0-9]{1,40}(-[0-9]{1,40})?(,[0-9]{1,40}(-[0-9]{1,40})?)*$"
MOST_SEEDS = 10_000
LONGEST_NAME = 200  # bytes; file systems allow 255, and files beside a run are named after it
COORDINATOR = r"^(\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}$"
"""``host:port``, ``[IPv6 address]:port``."""


class Config(Section):
    """The settings that decide what a run computes."""

    env: EnvConfig = EnvConfig()
    algorithm: Literal["ppo", "grpo"] = Field(default="ppo", description="PPO with a critic, or GRPO without")
    engine: Literal["torch", "jax"] = Field(
        default="torch", description="framework that trains; for jax a rank is a device, of one process or of several"
    )
    device: Literal["cpu", "cuda", "xpu", "tpu", "auto"] = Field(
        default="cpu",
        description="where policy and update run; auto: a GPU if any",
    )
    seed: int = Field(default=0, ge=0, le=MOST_SEED, description="of every random number")
    total_steps: int = Field(default=100_000, ge=1, description="global environment steps; schedules run over them")
    total_iterations: int | None = Field(
        default=None, ge=1, description="instead of total_steps: that many times num_envs x num_steps"
    )
    num_envs: int | None = Field(
        default=None, ge=1, le=MOST_SIZE, description="environments of the whole run (default 8)"
    )
    num_envs_per_rank: Annotated[int, Field(ge=1, le=MOST_SIZE)] | Literal["auto", "max"] | None = Field(
        default=None,
        description="instead of num_envs: environments grow with ranks; auto: sized by memory and cores, max: larger",
    )
    num_shards: int | None = Field(
        default=None,
        ge=1,
        description="the most ranks that can share the run; divides num_envs (default: a power of two, at most 8; with "
        "num_envs_per_rank one per rank)",
    )
    num_steps: int = Field(default=128, ge=1, le=MOST_SIZE, description="steps of each environment in a rollout")
    reduction: Literal["exact", "fast"] = Field(
        default="exact", description="exact: bitwise equal for every number of ranks; fast: sums that depend on it"
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="bf16: networks compute in bfloat16 (autocast); parameters and losses stay float32"
    )
    fsdp: bool = Field(
        default=False, description="shard parameters and moments over ranks, for large networks; reduction fast"
    )
    sync_period: int = Field(
        default=1,
        ge=1,
        description="optimiser steps that a rank takes by itself before parameters and moments are averaged; above 1: "
        "reduction fast",
    )
    compile: bool = Field(default=False, description="torch.compile the loss of a shard; engine torch")
    cuda_graphs: bool | None = Field(
        default=None,
        description="capture what a step of a rollout and, on a single rank, of the optimiser launches as a graph, and "
        "replay it (default: on CUDA, where it can be); engine torch",
    )
    threads: int = Field(
        default=1,
        ge=1,
        le=MOST_THREADS,
        description="CPU threads of PyTorch per rank (plain networks on a CPU are computed in NumPy, on one); results "
        "depend on it in the last bits; engine torch",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        default="auto", description="of the collectives: gloo on CPU, NCCL on GPU; jax chooses by itself"
    )
    collectives: Literal["auto", "shared", "backend"] = Field(
        default="auto",
        description="how CPU tensors travel; shared: memory of one host (jax: of one process); backend: its own (jax: "
        "XLA's); auto: shared where possible",
    )
    collective_timeout: float | None = Field(
        default=None,
        gt=0,
        le=10**8,
        description="seconds without progress on any rank after which a run of several ends; default 600, or twice "
        "env.timeout",
    )
    ppo: PPOConfig = PPOConfig()
    grpo: GRPOConfig = GRPOConfig()
    network: NetworkConfig = NetworkConfig()
    normalize: NormalizeConfig = NormalizeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    proof: ProofConfig = ProofConfig()

    @field_validator("device", mode="before")
    @classmethod
    def _has_float64(cls, value: Any) -> Any:
        if value == "mps":
            raise ValueError("mps has no float64, in which the shards' statistics are combined; use cpu")
        return value

    @property
    def envs(self) -> int:
        """``num_envs``; the config must be resolved."""
        assert self.num_envs is not None, "the config is not resolved"
        return self.num_envs

    @property
    def shards(self) -> int:
        """``num_shards``; the config must be resolved."""
        assert self.num_shards is not None, "the config is not resolved"
        return self.num_shards

    @property
    def sequence_length(self) -> int:
        """Steps of a training sequence; 1 without a recurrent core."""
        if self.network.recurrent is None:
            return 1
        wanted = self.network.sequence_length
        return wanted or max(n for n in range(1, MAX_SEQUENCE + 1) if self.num_steps % n == 0)

    @property
    def silence(self) -> float:
        """Seconds without progress on any rank after which a run of several ranks ends."""
        return self.collective_timeout or max(MOST_SILENCE, 2 * self.env.timeout)

    @property
    def group_size(self) -> int:
        """Environments that share a start: 1, except with GRPO."""
        return self.grpo.group_size if self.algorithm == "grpo" else 1

    @property
    def steps_per_iteration(self) -> int:
        """Global environment steps of one iteration."""
        return self.envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """Iterations that complete ``total_steps``, rounded up."""
        return -(-self.total_steps // self.steps_per_iteration)


class RunOptions(Section):
    """How and where a run is executed: which seeds, how far now, on which devices.

    With ``reduction: exact``, nothing here changes the agent of a seed at a given step.
    """

    nproc: int | Literal["auto"] | Annotated[str, StringConstraints(pattern=RANGE)] = Field(
        default=1,
        description="processes on this machine; torch: one a rank, auto: what cores or GPUs allow, or 2:8: that, at "
        "least 2 and at most 8; jax: each has devices of its own",
    )
    max_restarts: int = Field(
        default=0,
        ge=0,
        description="where a rank dies or hangs, start all again from the newest state, at most so often",
    )
    launcher: Literal["local", "ray"] = Field(
        default="local",
        description="ray: start the processes on the nodes of a Ray cluster, and nproc counts all of them",
    )
    devices: int | None = Field(
        default=None,
        ge=1,
        description="jax: devices of each process (default: all, but no more than shards; on a CPU one a core, if that "
        "helps)",
    )
    simulate_devices: int | None = Field(
        default=None, ge=1, description="jax on a CPU: make it this many devices, more than it has cores too"
    )
    fsdp_devices: int | None = Field(
        default=None, ge=1, description="jax with fsdp: devices that a copy is sharded over (default: all)"
    )
    seeds: Annotated[str, StringConstraints(pattern=SEEDS)] | None = Field(
        default=None,
        description="one agent a seed, each in a run of its own, in one directory: 0-4, or 0,3,7; jax: in one program "
        "where that can be (reduction exact: in turns, each the same as its own run; fast: as one batch)",
    )
    num_seeds: int = Field(default=1, ge=1, description="so many seeds, from seed on; the same as seeds")
    seeds_at_once: int | None = Field(
        default=None,
        ge=1,
        description="seeds in processes of their own that train side by side (default: as cores allow; on GPUs one)",
    )
    coordinator: str | None = Field(
        default=None,
        pattern=COORDINATOR,
        description="jax: host:port of process 0, where several processes meet that no launcher started",
    )
    num_processes: int | None = Field(default=None, ge=1, description="with coordinator: processes of the run")
    process_id: int | None = Field(default=None, ge=0, description="with coordinator: which of them this is, from 0")
    name: str | None = Field(
        default=None, min_length=1, description="of the run directory (default: environment, seed and time)"
    )
    runs_dir: str = Field(default="runs", min_length=1, description="where run directories are made")
    resume: str | None = Field(
        default=None,
        description="run (name or path) or checkpoint to continue; auto: the run of that name if it has begun, else it "
        "is started",
    )
    stop_at_step: int | None = Field(
        default=None, ge=1, description="end with a checkpoint once this many global steps are done"
    )
    max_hours: float | None = Field(default=None, gt=0, description="end with a checkpoint after this wall time")
    report: bool = Field(
        default=False, description="write report.html into the run's directory at the end; needs the extra report"
    )
    quiet: bool = Field(default=False, description="print only errors and warnings")
    trust: bool = Field(
        default=False,
        description="import the code that a run directory names, though you haven't trained with it; for this once",
    )

    @model_validator(mode="after")
    def _positive(self) -> RunOptions:
        self._check_nproc()
        if self.simulate_devices is not None and (self.devices or 0) > self.simulate_devices:
            raise ValueError(
                f"devices: {self.devices} of only {self.simulate_devices} simulated ones; simulate {self.devices}"
            )
        self._check_coordinator()
        if self.resume == AUTO and self.name is None:
            raise ValueError("resume: auto goes on with the run of a name; give --name")
        if self.seeds is not None and self.num_seeds > 1:
            raise ValueError(f"num_seeds: {self.num_seeds} with seeds {self.seeds}; leave one of them out")
        self.seeds_from(0)
        if self.name is not None and ("/" in self.name or self.name in (".", "..")):
            raise ValueError(f"name: {self.name!r} is not a plain directory name; --runs-dir says where it is made")
        if self.name is not None and not (self.name.isprintable() and self.name.strip()):
            raise ValueError(f"name: {self.name!r}: a run's name is text on one line, and more than blanks")
        if self.name is not None and (size := len(os.fsencode(self.name))) > LONGEST_NAME:
            raise ValueError(f"name: {size} bytes; a run's name has at most {LONGEST_NAME}")
        if self.resume not in (None, AUTO) and self.name is not None:
            raise ValueError(f"name: {self.name!r} with resume {self.resume!r}; a resumed run keeps its name")
        return self

    @field_validator("runs_dir", "resume")
    @classmethod
    def _from_home(cls, path: str | None) -> str | None:
        """Expands ``~``, which a shell leaves as it is after a ``=`` and in a file."""
        return None if path is None else os.path.expanduser(path)

    @field_validator("seeds", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Turns a number, or a list of numbers, into text."""
        return ",".join(map(str, value)) if isinstance(value, list | tuple | range) else _text(value)

    @property
    def is_group(self) -> bool:
        """Whether ``seeds`` or several ``num_seeds`` are given, so that runs stand in a directory of their group."""
        return self.seeds is not None or self.num_seeds > 1

    def seeds_from(self, seed: int) -> list[int]:
        """Returns the seeds that are asked for; ``seed`` is the config's own.

        Raises:
            ValueError: a seed is given twice, or there are too many; one line.
        """
        if self.seeds is None:
            if self.num_seeds > MOST_SEEDS:
                raise ValueError(f"num_seeds: {self.num_seeds}: at most {MOST_SEEDS:,} in all")
            return list(range(seed, seed + self.num_seeds))
        found: list[int] = []
        for part in self.seeds.split(","):
            first, _, last = part.partition("-")
            ends = int(first), int(last or first)
            if not 0 <= ends[1] - ends[0] < MOST_SEEDS - len(found):
                raise ValueError(f"seeds: {part}: from the lower to the higher one, at most {MOST_SEEDS:,} in all")
            found.extend(range(ends[0], ends[1] + 1))
        if len(set(found)) < len(found):
            raise ValueError(f"seeds: {self.seeds}: one stands there twice")
        return found

    def _check_nproc(self) -> None:
        if isinstance(self.nproc, int):
            if self.nproc < 1:
                raise ValueError(f"nproc: {self.nproc} ranks; at least 1, or auto")
            return
        if self.nproc == AUTO:
            return
        least, most = map(int, self.nproc.split(":"))
        if not 1 <= least <= most:
            raise ValueError(f"nproc: {self.nproc}: the first number is at least 1 and at most the second, as in 2:8")

    @property
    def nproc_range(self) -> tuple[int, int] | None:
        """The fewest and the most processes of a range such as ``2:8``; None for a number and for ``auto``."""
        if isinstance(self.nproc, int) or self.nproc == AUTO:
            return None
        least, most = map(int, self.nproc.split(":"))
        return least, most

    def _check_coordinator(self) -> None:
        flags = {name: getattr(self, name) for name in ("coordinator", "num_processes", "process_id")}
        missing = [name for name, value in flags.items() if value is None]
        if missing and len(missing) < len(flags):
            given = next(name for name in flags if name not in missing)
            raise ValueError(f"{given}: given without {' and '.join(missing)}; give all three or none")
        if self.num_processes is None or self.process_id is None:
            return
        if self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id: {self.process_id} of num_processes {self.num_processes}; they count from 0 to "
                f"{self.num_processes - 1}"
            )
        if self.nproc != 1:
            raise ValueError(
                f"nproc: {self.nproc} with coordinator, where every process is started by itself; leave one of them out"
            )


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value
