"""Iterations after which something is due."""

from __future__ import annotations

from lockstep.config.run import Config


def comes_due(interval: int, iteration: int) -> bool:
    """Tells whether what is due every ``interval`` iterations (0: never) is due after this one."""
    return interval > 0 and iteration % interval == 0


def evaluation_due(config: Config, iteration: int) -> bool:
    """Tells whether the policy is evaluated after this iteration: at every interval, and at the end of the run."""
    interval = config.eval.interval
    return interval > 0 and (comes_due(interval, iteration) or iteration >= config.num_iterations)
