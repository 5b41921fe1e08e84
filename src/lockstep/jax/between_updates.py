"""Does what a runner asks for between updates and at the end: evaluations, checkpoints, progress lines, a plot."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lockstep.jax.checkpoints.facts import facts_of
from lockstep.jax.checkpoints.folder import CheckpointFolder, Found
from lockstep.jax.config import RunnerConfig
from lockstep.jax.engine_state import template_of
from lockstep.jax.evaluation import Evaluator
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax.metrics import Metrics, history_of, say
from lockstep.jax_engine.distributed.active_mesh import without_callers_context
from lockstep.jax_engine.distributed.processes import this_process
from lockstep.runs.curves import MISSING_PLOT, can_plot, without_latex
from lockstep.runs.directory import is_writer

if TYPE_CHECKING:
    from lockstep.jax.training import Training

PLOT = "episode_return.png"


class Duties:
    """Does what a :class:`RunnerConfig` asks for between a training's updates.

    Attributes:
        marks: numbers of updates after which the state is needed.

    Raises:
        ValueError: :class:`CheckpointFolder` raises it, or a plot is asked for without matplotlib; one line.
    """

    def __init__(self, training: Training, runner: RunnerConfig) -> None:
        self._training, self._runner = training, runner
        config = training.config
        self._steps, self._total = config.steps_per_iteration, config.num_iterations
        if runner.plot and not can_plot():
            raise ValueError(MISSING_PLOT.format("plot: the picture"))
        self._evaluator = None if runner.eval_every is None else Evaluator(training.program, runner.eval_episodes)
        self._folder = None if runner.checkpoint_dir is None else CheckpointFolder(runner, facts_of(training))
        self.marks = [n for n in range(1, self._total) if self._evaluates(n) or self._saves(n)]

    def close(self) -> None:
        """Leaves the folder of checkpoints to other trainings; called however the training ends."""
        if self._folder is not None:
            self._folder.close()

    def _crosses(self, updates: int, interval: int | None) -> bool:
        """Returns whether an update passes a multiple of an interval, in steps."""
        steps = updates * self._steps
        return interval is not None and steps // interval > (steps - self._steps) // interval

    def _evaluates(self, updates: int) -> bool:
        return self._evaluator is not None and self._crosses(updates, self._runner.eval_every)

    def _saves(self, updates: int) -> bool:
        at_end = updates == self._total
        return self._folder is not None and (at_end or self._crosses(updates, self._runner.checkpoint_interval))

    @without_callers_context()
    def found(self) -> Found | None:
        """Returns the checkpoint to resume from, or None.

        Raises:
            ValueError: it is of another training, or has more updates than are asked for; one line.
        """
        if self._folder is None:
            return None
        training = self._training
        found = self._folder.find(template_of(training.fresh(), training.device_runner.env_shapes))
        if found is None:
            return None
        if found.updates > self._total:
            raise ValueError(
                f"total_timesteps: {self._runner.total_timesteps} are {self._total} updates, and the newest checkpoint "
                f"of {self._folder.path} has {found.updates}; use at least {found.updates * self._steps}"
            )
        say(f"training goes on after update {found.updates} of {self._total} ({self._folder.path})")
        return found

    @without_callers_context()
    def after(self, rows: list[Metrics], seconds: float) -> None:
        """Evaluates, saves and prints after the newest update, as is due; adds an evaluation's means to its row."""
        updates, row = len(rows), rows[-1]
        if self._evaluator is not None:
            means = (math.nan, math.nan)
            if self._evaluates(updates):
                with self._training.rounding():
                    means = self._evaluator(self._training.agent(self._before + updates))
            row["eval_return"], row["eval_length"] = means
        if self._folder is not None and self._saves(updates):
            self._folder.save(
                self._training.state(self._before + updates), history_of(rows), updates, updates * self._steps
            )
        if self._crosses(updates, self._runner.log_interval):
            say(progress_line(row, updates, self._total, self._steps, seconds))

    @property
    def _before(self) -> int:
        return self._training.device_runner.before

    def end(self, history: PPOMetricsHistory) -> None:
        """Saves the plot, if one is asked for, in one process."""
        if self._runner.plot and self._folder is not None and is_writer(this_process()):
            from matplotlib.figure import Figure

            with without_latex():
                axes = (figure := Figure(figsize=(8, 5))).subplots()
                steps = [(n + 1) * self._steps for n in range(len(history["episode_return"]))]
                axes.plot(steps, history["episode_return"])
                axes.set(xlabel="environment steps", ylabel="episode_return", title=self._training.config.env.id)
                self._folder.path.mkdir(parents=True, exist_ok=True)
                figure.savefig(self._folder.path / PLOT)


def progress_line(row: Metrics, updates: int, total: int, steps: int, seconds: float) -> str:
    """Returns a progress line: steps, return, loss, and steps per second of an update."""
    parts = [f"step {updates * steps} of {total * steps} ({100 * updates // total} %)"]
    for name, what in (("episode_return", "return"), ("eval_return", "evaluated"), ("total_loss", "loss")):
        if not math.isnan(row.get(name, math.nan)):
            parts.append(f"{what} {row[name]:.4g}")
    if seconds:
        parts.append(f"{steps / seconds:,.0f} steps/s")
    return " · ".join(parts)
