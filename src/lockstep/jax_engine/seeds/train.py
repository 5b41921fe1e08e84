"""Trains several seeds at once: one program in one loop, and for each seed the files that its own run would leave."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

import jax

from lockstep.config.run import Config, RunOptions
from lockstep.core.errors import NonFiniteError
from lockstep.core.shards import ShardPlan
from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed.placement import num_local_devices
from lockstep.jax_engine.distributed.processes import leaving_together
from lockstep.jax_engine.program.inference import Inference
from lockstep.jax_engine.program.iterations import Iteration
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.seeds.runner import SeedOfRunner, SeedsRunner
from lockstep.jax_engine.session import Session, first_state, open_program
from lockstep.jax_engine.start.announcement import start_lines
from lockstep.jax_engine.start.own_loss import check_own_loss
from lockstep.jax_engine.state import check_networks
from lockstep.jax_engine.statistics import check_first_statistics
from lockstep.jax_engine.train import Trainer
from lockstep.jax_engine.train import train as train_one
from lockstep.runs.checkpoint import Checkpoint
from lockstep.runs.directory import RunDirectory, open_seed
from lockstep.runs.groups import finish_group, forget_seeds, remember_seeds, together
from lockstep.training.recorder import Recorder
from lockstep.training.stop import RUNNING, StopRequest, TrainResult, stop_requests

EXACT = "seeds: they take turns in the program, and each seed's agent has the bytes of its own single run"
BATCHED = "seeds: they are computed together, and each agrees with its own single run up to rounding"


def open_sessions(config: Config, topology: Topology, options: RunOptions) -> tuple[SeedsRunner, list[Session]]:
    """Opens and begins the run of all seeds; returns it, and a session for each seed.

    Raises:
        ValueError: if this machine or environment can't do what the config asks for; the message is one line.
    """
    program = open_program(config, topology, options)
    configs = [config.model_copy(update={"seed": n}) for n in options.seeds_from(config.seed)]
    states = [first_state(each, _own_program(each, program)) for each in configs]
    runner = SeedsRunner(program, [each.seed for each in configs], states, num_local_devices(program.mesh))
    runner.begin()
    check_first_statistics(runner.state)
    own_loss = check_own_loss(config, program.net)
    plan = ShardPlan(config.envs, config.shards)
    sessions = []
    for number, each in enumerate(configs):
        own, view = replace(program, config=each), SeedOfRunner(runner, number)
        rate = config.ppo.learning_rate
        session = Session(each, topology, plan, own, view, Inference(own), program.description, learning_rate=rate)
        session.own_loss = own_loss
        sessions.append(session)
    return runner, sessions


def _own_program(config: Config, program: Program) -> Program:
    """Returns the program with a seed's own networks: a custom one is made with its key and holds initial parameters.

    Raises:
        ValueError: if a custom network draws more than parameters with that key, because one program holds the rest
            once; the message is one line.
    """
    net = check_networks(config, program.description)
    if net.custom is not None and not net.custom.alike(program.net.custom):
        raise ValueError(
            f"network.custom: {config.network.custom} makes more than parameters of its key (or another function each "
            "time, as a static field), and seeds of one program share all but parameters; start a run for each --seed"
        )
    return replace(program, config=config, net=net)


class SeedsTrainer:
    """Runs the loop over iterations of all seeds; each seed has a trainer and a directory inside the run's."""

    def __init__(
        self, runner: SeedsRunner, trainers: Sequence[Trainer], directory: RunDirectory, started: float
    ) -> None:
        self.runner, self.trainers, self.directory, self.started = runner, list(trainers), directory, started
        self.lead = self.trainers[0]
        steps = runner.config.num_iterations * runner.config.steps_per_iteration  # of each seed
        self.progress = directory.open_progress(steps * len(self.trainers))

    def loop(self) -> int:
        """Iterates until the end, a limit, or a signal; returns the stop code; see :meth:`Trainer.loop`."""
        lead = self.lead
        while True:
            stop = lead.limit_reached() or lead.stop_code
            if stop == RUNNING:
                lead.dispatch(self.trainers)
            due = stop != RUNNING or lead.save_code != RUNNING or lead.schedule.due(lead.dispatched)
            while len(lead.pending) > (0 if due else 1):
                for iterations in self.runner.fetch(lead.pending.popleft()):
                    self.log(iterations)
                for trainer in self.trainers:
                    trainer.check_in_sync(last=due and not lead.pending)
            if due:
                for trainer in self.trainers:
                    trainer.recorder.save_checkpoint(asked=lead.save_code)
                lead.save_code = RUNNING
                if stop != RUNNING:
                    return stop

    def log(self, iterations: Sequence[Iteration]) -> None:
        """Logs one iteration of every seed."""
        records = []
        for trainer, iteration in zip(self.trainers, iterations, strict=True):
            try:
                records.append(trainer.record(iteration))
            except NonFiniteError as error:
                raise NonFiniteError(f"seed {trainer.config.seed}: {error}") from error
            trainer.recorder.log(records[-1])
        self.progress.update(together(records))

    def finish(self, stop: int) -> TrainResult:
        """Writes the last checkpoints, every seed's ``summary.json``, curves, and the run's own ``summary.json``."""
        seconds = time.monotonic() - self.started
        results = [trainer.recorder.finish(stop) for trainer in self.trainers]
        seeds = {t.recorder.run.path: result.summary for t, result in zip(self.trainers, results, strict=True)}
        summary = finish_group(self.directory, seeds, len(seeds), seconds, self.progress.message)
        return TrainResult(results[0].status, results[0].signal, summary)

    def close(self) -> None:
        """Closes what is open, even after an error."""
        self.progress.close()
        for trainer in self.trainers:
            trainer.recorder.close()
            trainer.recorder.run.unlock()


def train(
    config: Config, run: RunDirectory, topology: Topology, options: RunOptions, checkpoint: Checkpoint | None = None
) -> TrainResult:
    """Trains one agent, or one for each seed that ``options`` ask for, in a directory inside the run's.

    Arguments and errors are those of :func:`lockstep.jax_engine.train.train`; a loss that isn't finite ends all seeds.
    """
    if not options.is_group:
        return train_one(config, run, topology, options, checkpoint)
    started = time.monotonic()
    run.remove_summary()
    with stop_requests() as request, leaving_together(topology):
        return _train_seeds(config, run, topology, options, request, started)


def _made_seeds(run: RunDirectory, config: Config, seeds: Sequence[int]) -> list[RunDirectory]:
    """Makes the directories of all seeds before programs are compiled, to mark a group that is killed meanwhile."""
    remember_seeds(run, seeds)
    return [open_seed(run, config.model_copy(update={"seed": seed})) for seed in seeds]


def _remove_seeds(run: RunDirectory, seeds: Sequence[RunDirectory]) -> None:
    """Removes the directories of seeds that couldn't begin, so that the run's name is free again."""
    for seed in seeds:
        seed.unlock()
        if seed.is_writer:
            shutil.rmtree(seed.path, ignore_errors=True)
    forget_seeds(run)


def _train_seeds(
    config: Config, run: RunDirectory, topology: Topology, options: RunOptions, request: StopRequest, started: float
) -> TrainResult:
    directories = _made_seeds(run, config, options.seeds_from(config.seed))
    try:
        runner, sessions = open_sessions(config, topology, options)
    except BaseException:
        _remove_seeds(run, directories)
        raise
    recorders = [Recorder(*each, started) for each in zip(sessions, directories, strict=True)]
    trainers = [Trainer(*each, options, request) for each in zip(sessions, recorders, strict=True)]
    trainer = SeedsTrainer(runner, trainers, run, started)
    try:
        first, last = runner.seeds[0], runner.seeds[-1]
        line, *notes = start_lines(sessions[0], options)
        trainer.progress.message(
            f"{len(runner.seeds)} seeds, {first} … {last}, in one program; of seed {first}: {line}"
        )
        for note in [EXACT if config.reduction == "exact" else BATCHED, *notes]:
            trainer.progress.message(note)
        for recorder in recorders:
            recorder.begin([])
        recorders[0].warn_of_unread()
        return trainer.finish(trainer.loop())
    finally:
        with contextlib.suppress(Exception):  # the error has been raised already
            jax.block_until_ready(runner.state)
        trainer.close()
