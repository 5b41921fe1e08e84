"""Checks a request and settles what is planned: each target's engine, numbers of devices, and the run on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lockstep.config.checks import envs_and_shards, resolve
from lockstep.config.run import Config
from lockstep.core.shards import uneven
from lockstep.envs.batched.twins import with_array_twin
from lockstep.envs.registry import check_environment_options
from lockstep.planning.hardware import Target
from lockstep.scaling.plan import parse_world_sizes


@dataclass(frozen=True)
class PlanRequest:
    """What ``lockstep plan`` is asked for.

    Attributes:
        config: the whole config, not resolved.
        targets: the targets of ``--on``, in order.
        sizes: numbers of devices; None: powers of two, as far as target and shards go.
        mode: ``strong``: the devices share the run; ``weak``: each has as much work as one alone.
        prices: $ per hour of a target, by its text.
        network: bytes per second out of a host, or None.
        iters: iterations to measure on this machine.
    """

    config: Config
    targets: tuple[Target, ...]
    sizes: tuple[int, ...] | None = None
    mode: str = "strong"
    prices: dict[str, float] = field(default_factory=dict)
    network: float | None = None
    iters: int = 20

    def check(self) -> None:
        """Raises a one-line ``ValueError`` if the request can't be planned, before anything is measured or compiled."""
        if not self.targets:
            raise ValueError("on: nothing to plan for; give --on h100:8, --on tpu:v5e:16x16 or --on cpu:2")
        texts = [target.text for target in self.targets]
        for text in self.prices:
            if text not in texts:
                raise ValueError(f"price: {text} is none of the targets; those are {', '.join(texts)}")
        if self.mode == "strong" and (each := self.config.num_envs_per_rank) is not None:
            number = "a number and " if isinstance(each, str) else ""  # text: sized by the machine
            raise ValueError(
                f"num_envs_per_rank: {each} grows with the devices, which mode strong must not; give num_envs, or "
                f"{number}--mode weak"
            )
        most = max(target.devices for target in self.targets)
        for size in self.sizes or ():
            if size > most:
                raise ValueError(f"world-sizes: {size} is more than any target has; {most} devices at most")
        for target in self.targets:
            if not self.sizes_on(target):
                asked = ", ".join(map(str, self.sizes or ()))
                raise ValueError(f"world-sizes: {target.text} has {target.devices} devices, less than any of {asked}")
            run = self.run_on(target)
            for size in self.sizes_on(target):
                check_environment_options(self.sized(run, size))

    def run_on(self, target: Target) -> Config:
        """Returns the run's config on a target: with its ``device``, and with engine jax on TPUs."""
        return self._settled_on(target)[0]

    def _settled_on(self, target: Target) -> tuple[Config, str | None]:
        """Returns the run's config on a target, and a line if its engine steps a twin of the environment, else None."""
        changes = {"device": target.platform}
        if target.platform == "tpu":
            changes["engine"] = "jax"
        if target.platform == "cpu":
            changes["backend"] = "auto"
        return with_array_twin(self.config.model_copy(update=changes))

    def sizes_on(self, target: Target) -> tuple[int, ...]:
        """Returns numbers of devices of a target: those asked for that it has, else powers of two and the most.

        The latter are ascending; in mode strong they don't exceed the run's shards.
        """
        if self.sizes is not None:
            return tuple(n for n in self.sizes if n <= target.devices)
        most = target.devices if self.mode == "weak" else min(target.devices, self._shards(target))
        powers = [1 << n for n in range(most.bit_length()) if 1 << n < most]
        return (*powers, most)

    def _shards(self, target: Target) -> int:
        return envs_and_shards(self.run_on(target), 1)[1]

    def sized(self, run: Config, size: int) -> Config:
        """Returns the config resolved for so many devices; raises a one-line ``ValueError`` if they can't share it."""
        if self.mode == "strong":
            return resolve(run, size)
        one = resolve(run)
        grown = {"num_envs": one.envs * size, "num_shards": one.shards * size, "num_envs_per_rank": None}
        return resolve(one.model_copy(update=grown), size)

    def notes_on(self, target: Target) -> list[str]:
        """Returns what was decided for a target, one line each."""
        out, (run, line) = [], self._settled_on(target)
        if run.engine != self.config.engine:
            out.append(f"{target.text}: engine jax, which alone runs on TPUs")
        out += [] if line is None else [f"{target.text}: {line}"]
        shards = self._shards(target)
        if self.sizes is None and self.mode == "strong" and shards < target.devices:
            out.append(
                f"{target.text}: {shards} shards use {shards} of {target.devices} devices; for all of them "
                f"--num-shards {target.devices} or a multiple, which num_envs must be a multiple of, or --mode weak"
            )
        if self.network is not None and (unused := self._unused_link(target)):
            out.append(f"{target.text}: --link, the rate between hosts, is not used: {unused}")
        config = self.sized(run, self.sizes_on(target)[0])
        for size in self.sizes_on(target) if self.mode == "strong" else ():
            line = uneven(size, config.shards, config.envs, target.unit)
            out += [] if line is None else [f"{target.text}: {line}"]
        return out

    def _unused_link(self, target: Target) -> str | None:
        """Returns why no byte crosses a network between hosts; None if some do."""
        if target.platform == "tpu":
            return f"a slice's hosts meet over its own links ({target.chip.link if target.chip else ''})"
        most = max(self.sizes_on(target))
        return f"one host has all {most} {target.unit}" if most <= target.per_host else None


def world_sizes(text: str | None) -> tuple[int, ...] | None:
    """Parses ``--world-sizes``; None if it wasn't given."""
    return None if text is None else parse_world_sizes(text)


def prices(texts: Sequence[str], targets: Sequence[Target]) -> dict[str, float]:
    """Parses ``--price``: ``98.32`` for a single target, or ``h100:8=98.32``, in $ per hour of the whole target.

    A target may be written in any case, as for ``--on``.

    Raises:
        ValueError: one line, if it isn't a price, or if it doesn't name one of several targets.
    """
    out: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name and len(targets) != 1:
            raise ValueError(
                f"price: {text}: say of which target, such as {targets[0].text if targets else 'h100:8'}={text}"
            )
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise ValueError(f"price: {text!r} is no price in $ an hour, such as 98.32 or h100:8=98.32")
        out[name.strip().lower() or targets[0].text] = value
    return out
