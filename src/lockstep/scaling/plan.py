"""Plans a sweep: which jobs in which order, and what two sessions must share to be one sweep."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import lockstep
from lockstep.config.checks import resolve
from lockstep.config.run import Config, LogConfig
from lockstep.core.topology import available_cores
from lockstep.runs.trackers.service import flattened
from lockstep.training.announcement import quantity

Mode = Literal["weak", "strong"]
MODES = ("weak", "strong")

# Runs end by their number of iterations, so this total_steps only keeps schedules at their first value.
ENDLESS = 10**15
PACKAGES = ("numpy", "gymnasium", "mujoco")
ENGINE_PACKAGES = {"torch": ("torch",), "jax": ("jax", "jaxlib", "equinox", "optax")}


@dataclass(frozen=True)
class Job:
    """One measurement in fresh processes; ``repeat`` counts from 1.

    A ``run`` is one run on ``world_size`` ranks, a ``ceiling`` is ``world_size`` single-rank runs at once.
    """

    kind: Literal["run", "ceiling"]
    world_size: int
    repeat: int

    @property
    def name(self) -> str:
        """The name of the job's log file, without suffix."""
        return f"{'ranks' if self.kind == 'run' else 'copies'}_{self.world_size}_repeat_{self.repeat}"

    def __str__(self) -> str:
        what = "rank" if self.kind == "run" else "independent run"
        return f"{self.world_size} {what}{'s' if self.world_size > 1 else ''}, repeat {self.repeat}"


@dataclass(frozen=True)
class Plan:
    """A sweep over world sizes.

    Attributes:
        mode: ``weak``: every rank has the config's environments; ``strong``: the ranks share them.
        world_sizes: numbers of ranks, ascending.
        repeats: how often each world size is measured.
        warmup_iters: first iterations of each run, which don't count.
        iters: iterations of each run that are measured.
        ceiling: whether to measure, too, what the machine can do: as many independent single-rank runs at once.
    """

    config: Config
    mode: Mode
    world_sizes: tuple[int, ...]
    repeats: int = 3
    warmup_iters: int = 5
    iters: int = 30
    ceiling: bool = True

    def __str__(self) -> str:
        """Describes environment, mode, numbers of ranks, repeats and iterations in words."""
        *others, most = self.world_sizes
        ranks = ", ".join([*map(str, others), quantity(most, "rank")])
        repeats = f"{self.repeats} repeats" if self.repeats > 1 else "once"
        iterations = f"{self.warmup_iters} + {quantity(self.iters, 'iteration')}"
        return f"{self.config.env.id} · {self.mode} scaling on {ranks} · {repeats}, {iterations} each"

    def check(self) -> None:
        """Raises a one-line ``ValueError`` if the sweep can't be measured."""
        for name, least in (("repeats", 1), ("warmup_iters", 0), ("iters", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name.replace('_', '-')}: {getattr(self, name)} is below {least}")
        if self.mode not in MODES:
            raise ValueError(f"mode: {self.mode!r} is none of {', '.join(MODES)}")
        if self.config.device == "tpu" and self.ceiling and self.world_sizes[-1] > 1:
            raise ValueError("ceiling: independent runs can't have a TPU each on one machine; add --no-ceiling")
        for world_size in self.world_sizes:
            self.sized(world_size)

    def sized(self, world_size: int) -> Config:
        """Returns the resolved config of the run on ``world_size`` ranks.

        Weak: environments and shards grow with the ranks, so that a rank has the same shards, of the same shape, at
        every world size. Strong: environments and shards are the config's.

        Raises:
            ValueError: one line, if so many ranks can't share it.
        """
        if self.mode == "strong":
            if (each := self.config.num_envs_per_rank) is not None:
                number = "a number and " if isinstance(each, str) else ""  # text: sized by the machine
                raise ValueError(
                    f"num_envs_per_rank: {each} grows with the ranks, which mode strong must not; give num_envs, or "
                    f"{number}--mode weak"
                )
            return self._measured(resolve(self.config, world_size))
        one = resolve(self.config)
        grown = {"num_envs": one.envs * world_size, "num_shards": one.shards * world_size}
        return self._measured(resolve(one.model_copy(update=grown), world_size))

    def _measured(self, config: Config) -> Config:
        """Turns off evaluations, checkpoints and traces, and turns on each rank's times."""
        changes = {
            "eval": {"interval": 0, "record_video": False},
            "checkpoint": {"interval": 0, "seconds": None, "mirror": None},
            "proof": {"trace": False},
        }
        sections = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
        sections["log"] = LogConfig(tensorboard=False, timing=True)
        return config.model_copy(update={**sections, "total_steps": ENDLESS})

    def steps(self, world_size: int) -> int:
        """Returns the global environment steps of the run on ``world_size`` ranks."""
        return (self.warmup_iters + self.iters) * self.sized(world_size).steps_per_iteration

    def jobs(self) -> list[Job]:
        """Returns all jobs, repeat after repeat, each over all world sizes and every second one in reverse.

        Drift during the sweep (temperature, other users) then affects all world sizes alike.
        """
        out = []
        for repeat in range(1, self.repeats + 1):
            once = [Job("run", n, repeat) for n in self.world_sizes]
            once += [Job("ceiling", n, repeat) for n in self.world_sizes if self.ceiling and n > 1]
            once.sort(key=lambda job: (job.world_size, job.kind))
            out += once if repeat % 2 else once[::-1]
        return out

    def identity(self) -> dict[str, Any]:
        """Returns, flat, all that the sweep's numbers depend on; measurements with another identity can't join it."""
        config = flattened(self.sized(1).model_dump(mode="json"))
        facts = {
            "mode": self.mode,
            "warmup-iters": self.warmup_iters,
            "iters": self.iters,
            "lockstep's source": source_digest(),
            "host": platform.node(),
            "cores": available_cores(),
            "python": platform.python_version(),
        }
        packages = (*ENGINE_PACKAGES[self.config.engine], *PACKAGES)
        return config | facts | {name: _version(name) for name in packages}


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """Parses ``"1,2,4"`` as numbers of ranks, ascending; raises ``ValueError`` unless they are different numbers."""
    try:
        sizes = sorted(int(part) for part in text.split(","))
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or len(set(sizes)) < len(sizes):
        raise ValueError(f"world-sizes: {text!r} is not a list of different numbers of ranks such as 1,2,4")
    return tuple(sizes)


def source_digest() -> str:
    """Returns a hash of this package's source, because measurements with other code aren't comparable."""
    root, digest = Path(lockstep.__file__).parent, hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.c") for path in root.rglob(kind)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def identities_apart(ours: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Returns ``(key, ours, theirs)`` for each key in which two identities differ."""
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return [(key, ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)]


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
