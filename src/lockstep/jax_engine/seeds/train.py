"""Training several seeds at once: one program under one loop, and for each seed what a run of its own would leave."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import NonFiniteError
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import Topology
from lockstep.jax_engine.announcement import start_lines
from lockstep.jax_engine.distributed.placement import num_local_devices
from lockstep.jax_engine.distributed.processes import leaving_together
from lockstep.jax_engine.program.inference import Inference
from lockstep.jax_engine.program.iterations import Iteration
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.seeds.run import OneOfSeeds, SeedsRun
from lockstep.jax_engine.session import Session, first_state, open_program
from lockstep.jax_engine.state import check_networks
from lockstep.jax_engine.train import Trainer
from lockstep.jax_engine.train import train as train_one
from lockstep.runs.checkpoint import Checkpoint
from lockstep.runs.curves import CURVES_PNG, METRIC, MISSING_PLOT, Curve, can_plot, interquartile_mean, write_curves
from lockstep.runs.directory import RunDirectory, open_seed
from lockstep.training.recorder import Recorder
from lockstep.training.stop import RUNNING, StopRequest, TrainResult, stop_requests

EXACT = "num_seeds: seeds take turns in the program, and each seed's agent has the bytes of its own single run"
BATCHED = "num_seeds: seeds are computed together, and each agrees with its own single run up to rounding"


def open_sessions(config: Config, topology: Topology, options: RunOptions) -> tuple[SeedsRun, list[Session]]:
    """Gives the run of all seeds, begun, and a session for each.

    Raises:
        ValueError: what the config asks for can't be had here; one line.
    """
    program = open_program(config, topology, options)
    configs = [config.model_copy(update={"seed": config.seed + n}) for n in range(options.num_seeds)]
    states = [first_state(each, _own_program(each, program)) for each in configs]
    run = SeedsRun(program, [each.seed for each in configs], states, num_local_devices(program.mesh))
    run.begin()
    plan = ShardPlan(config.envs, config.shards)
    sessions = []
    for number, each in enumerate(configs):
        own, view = replace(program, config=each), OneOfSeeds(run, number)
        rate = config.ppo.learning_rate
        sessions.append(
            Session(each, topology, plan, own, view, Inference(own), program.description, learning_rate=rate)
        )
    return run, sessions


def _own_program(config: Config, program: Program) -> Program:
    """Gives the program with networks of a seed's own: a user's are made with its key, and hold what they begin with.

    Raises:
        ValueError: they draw more than parameters with that key, and one program has the rest once; one line.
    """
    net = check_networks(config, program.description)
    if net.custom is not None and not net.custom.alike(program.net.custom):
        raise ValueError(
            f"network.custom: {config.network.custom} makes more than parameters of its key, and seeds of one program "
            "share all but parameters; start a run for each --seed"
        )
    return replace(program, config=config, net=net)


class SeedsTrainer:
    """The loop over iterations of all seeds; each has a trainer with its own directory inside the run's."""

    def __init__(self, run: SeedsRun, trainers: Sequence[Trainer], directory: RunDirectory, started: float) -> None:
        self.run, self.trainers, self.directory, self.started = run, list(trainers), directory, started
        self.lead = self.trainers[0]
        self.progress = directory.open_progress(run.config.total_steps * len(self.trainers))

    def loop(self) -> int:
        """Iterates until the end, a limit, or a signal; returns the stop code; see :meth:`Trainer.loop`."""
        lead = self.lead
        while True:
            stop = lead.asked or lead.reached()
            if stop == RUNNING:
                lead.dispatch(self.trainers)
            due = stop != RUNNING or lead.saves != RUNNING or lead.schedule.due(lead.dispatched)
            while len(lead.pending) > (0 if due else 1):
                for iterations in self.run.fetch(lead.pending.popleft()):
                    self.take(iterations)
                for trainer in self.trainers:
                    trainer.prove(last=due and not lead.pending)
            if due:
                for trainer in self.trainers:
                    trainer.recorder.save_checkpoint(asked=lead.saves)
                lead.saves = RUNNING
                if stop != RUNNING:
                    return stop

    def take(self, iterations: Sequence[Iteration]) -> None:
        """Logs an iteration of every seed."""
        records = []
        for trainer, iteration in zip(self.trainers, iterations, strict=True):
            try:
                records.append(trainer.record(iteration))
            except NonFiniteError as error:
                raise NonFiniteError(f"seed {trainer.config.seed}: {error}") from error
            trainer.recorder.log(records[-1])
        self.progress.update(together(records))

    def finish(self, stop: int) -> TrainResult:
        """Writes last checkpoints, every seed's ``summary.json``, curves, and the run's own ``summary.json``."""
        seconds = time.monotonic() - self.started
        results = [trainer.recorder.finish(stop) for trainer in self.trainers]
        names = {trainer.config.seed: trainer.recorder.run.path for trainer in self.trainers}
        curve = write_curves(self.directory.path, f"{self.run.config.env.id}, {len(names)} seeds", names)
        if not can_plot():
            self.progress.message(MISSING_PLOT.format(CURVES_PNG))
        summary = self.summarize([result.summary for result in results], curve, seconds)
        self.directory.write_summary(summary)
        return TrainResult(results[0].status, results[0].signal, summary)

    def summarize(self, summaries: Sequence[dict[str, Any]], curve: Curve, seconds: float) -> dict[str, Any]:
        """Makes ``summary.json`` of the run: of all seeds together, and the numbers of each."""
        own = ("seed", "final_return", "episodes", "best_checkpoint", "params_sha256", "state_sha256")
        first = summaries[0]
        listed = [
            {name: summary[name] for name in own} | {"directory": trainer.recorder.run.path.name}
            for summary, trainer in zip(summaries, self.trainers, strict=True)
        ]
        final = [ends[-1].item() if curve.iterations else None for ends in (curve.iqm, curve.low, curve.high)]
        different = {*own, "final_success_rate", "wall_time", "steps_per_second"}
        return {
            **{name: value for name, value in first.items() if name not in different},
            "num_seeds": len(summaries),
            "final_return": final[0],
            "final_return_interval": final[1:] if curve.iterations else None,
            "wall_time": seconds,
            "steps_per_second": len(summaries) * first["global_step"] / seconds,
            "seeds": listed,
        }

    def close(self) -> None:
        """Closes what is open, whatever happened."""
        self.progress.close()
        for trainer in self.trainers:
            trainer.recorder.close()
            trainer.recorder.run.unlock()


def together(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums up what is shown of an iteration: steps of all seeds, and the interquartile mean of their returns."""
    returns = [record[METRIC] for record in records if record[METRIC] is not None]
    return {
        "global_step": sum(record["global_step"] for record in records),
        METRIC: float(interquartile_mean(np.array(returns))) if returns else None,
        "time/global_fps": sum(record["time/global_fps"] for record in records),
    }


def train(
    config: Config, run: RunDirectory, topology: Topology, options: RunOptions, checkpoint: Checkpoint | None = None
) -> TrainResult:
    """Trains one agent, or one for each of ``options.num_seeds`` seeds in a directory of its own inside the run's.

    Arguments and errors are those of :func:`lockstep.jax_engine.train.train`; a loss that isn't finite ends all seeds.
    """
    if options.num_seeds == 1:
        return train_one(config, run, topology, options, checkpoint)
    started = time.monotonic()
    run.remove_summary()
    with stop_requests() as request, leaving_together(topology):
        return _train_seeds(config, run, topology, options, request, started)


def _train_seeds(
    config: Config, run: RunDirectory, topology: Topology, options: RunOptions, request: StopRequest, started: float
) -> TrainResult:
    seeds, sessions = open_sessions(config, topology, options)
    recorders = [Recorder(each, open_seed(run, each.config), started) for each in sessions]
    trainers = [Trainer(*each, options, request) for each in zip(sessions, recorders, strict=True)]
    trainer = SeedsTrainer(seeds, trainers, run, started)
    try:
        first, last = seeds.seeds[0], seeds.seeds[-1]
        line, *notes = start_lines(sessions[0], options)
        trainer.progress.message(f"seeds {first} … {last} in one program; of seed {first}: {line}")
        for note in [EXACT if config.reduction == "exact" else BATCHED, *notes]:
            trainer.progress.message(note)
        for recorder in recorders:
            recorder.begin([])
        return trainer.finish(trainer.loop())
    finally:
        with contextlib.suppress(Exception):  # what failed is on its way already
            jax.block_until_ready(seeds.state)
        trainer.close()
