"""Says when the host of a run needs the training state, and where calls of the compiled program end."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.run import Config
from lockstep.training.due import comes_due


@dataclass(frozen=True)
class Schedule:
    """Says what is due after which iteration.

    ``first`` iterations were done before this session. ``devices`` are those of all processes. ``traced`` says whether
    fingerprints of every iteration are written.
    """

    config: Config
    first: int
    stop_at_step: int | None
    devices: int
    processes: int
    traced: bool

    @property
    def last(self) -> int:
        """The iteration after which the requested steps are done."""
        stop_at, last = self.stop_at_step, self.config.num_iterations
        return last if stop_at is None else min(last, max(-(-stop_at // self.config.steps_per_iteration), self.first))

    def due(self, iteration: int) -> bool:
        """Returns whether an evaluation, checkpoint or proof, for which devices wait, is due after this iteration."""
        config = self.config
        every = [config.eval.interval, config.checkpoint.interval, 1 if self.traced else 0]
        if self.processes > 1:  # they compare copies by separate collectives
            every.append(config.proof.interval)
        return iteration >= self.last or any(comes_due(interval, iteration) for interval in every)

    def compares(self, iteration: int) -> bool:
        """Returns whether the devices' copies of the state after this iteration are to be compared."""
        return self.devices > 1 and comes_due(self.config.proof.interval, iteration)

    def ends(self, iteration: int) -> bool:
        """Returns whether a call of the program must end after this iteration at the latest."""
        return self.due(iteration) or self.compares(iteration)
