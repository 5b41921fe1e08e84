"""Runs a config on several world sizes and compares every tensor and metric at each iteration."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.checks import resolve
from lockstep.config.redact import shown_value
from lockstep.config.run import Config, LogConfig
from lockstep.core.files import same_json
from lockstep.core.fingerprint import OUT_OF_SYNC
from lockstep.core.machine import MACHINE_FACTS
from lockstep.core.process import command_that_ends_with_us, failure_line, say
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import without_launcher
from lockstep.envs.describe import describe
from lockstep.launch.jax_start import look_with_cpu
from lockstep.launch.resume import check_unchanged, decisive_differences
from lockstep.launch.world import world_words
from lockstep.proof.lengths import first_length
from lockstep.report.settings import facts_apart
from lockstep.runs.checkpoint import checkpoints_in, manifest_of
from lockstep.runs.directory import CHECKPOINTS, CONFIG, FINGERPRINTS, SUMMARY
from lockstep.runs.listing import UnreadableError, object_if_any, read_object
from lockstep.runs.stored import stored_config
from lockstep.runs.trackers import METRICS_JSONL
from lockstep.runs.trackers.jsonl import read_jsonl
from lockstep.training.own_loss.recorded import facts_of_loss
from lockstep.training.reference_policy import with_reference
from lockstep.training.run_history import with_first_machine
from lockstep.training.schedules import follows_length

RUNS = "runs"
"""Where runs are looked for by their names."""
EVALUATION, EPISODES = "eval/", "eval/episodes"


@dataclass(frozen=True)
class Trace:
    """What a run on one world size recorded.

    Attributes:
        world_size: number of ranks; of devices with the JAX engine.
        error: the run's error, or None.
        tensors: each iteration's fingerprints by tensor name.
        metrics: each iteration's metrics without times.
        processes: number of processes that shared the devices (JAX engine).
        recorded: the run that it was read from; None if it was trained just now.
        facts: the run's ``summary.json``, with the machine and versions of its first steps.
        loss: what the run's checkpoint says of a custom loss.
    """

    world_size: int
    error: str | None
    tensors: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    processes: int = 1
    recorded: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The world size as in ``--world-sizes``, with the name of a recorded run."""
        if self.recorded is not None:
            return f"{self.recorded.name} ({self.world_size or '?'})"
        return f"{self.processes}x{self.world_size // self.processes}" if self.processes > 1 else str(self.world_size)

    @property
    def failed(self) -> bool:
        """Whether the run failed otherwise than by ranks that hold other bytes, which says nothing of its bytes."""
        return self.error is not None and OUT_OF_SYNC not in self.error


@dataclass(frozen=True)
class Comparison:
    """One world size compared with the first.

    Attributes:
        trace: of that world size.
        equal: whether both have the same bytes.
        difference: where they first differ, or why they weren't compared; empty if they have the same bytes.
        not_compared: metrics that a recorded run and this trace don't both have, and that are left out therefore.
    """

    trace: Trace
    equal: bool
    difference: str
    not_compared: tuple[str, ...] = ()


def last_trained(results: Sequence[Comparison]) -> Trace:
    """Returns the last trace that was trained to its end just now; if there is none, the last one."""
    traces = [result.trace for result in results]
    return next((each for each in reversed(traces) if each.recorded is None and each.error is None), traces[-1])


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_jsonl(path) if path.is_file() else []


def run_trace(config: Config, world_size: int, iterations: int, directory: Path, processes: int = 1) -> Trace:
    """Trains ``iterations`` iterations on ``world_size`` ranks in fresh processes and reads what they recorded."""
    name = f"world_size_{world_size}_processes_{processes}"
    while (directory / name).exists():  # a world size given twice checks that the run repeats
        name += "_again"
    source = directory / f"{name}.json"
    source.write_text(config.model_dump_json(), encoding="utf-8")
    command = command_that_ends_with_us("train", str(source), "--trust", *world_words(config, world_size, processes))
    command += ["--name", name, "--runs-dir", str(directory), "--quiet"]
    command += ["--stop-at-step", str(min(iterations * config.steps_per_iteration, config.total_steps))]
    environment = without_launcher()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    error = failure_line(done.stderr, done.returncode) if done.returncode else None
    run = directory / name
    tensors, metrics, loss = fingerprints_in(run), metrics_in(run), facts_of_loss(run) or {}
    facts = with_first_machine(object_if_any(run / SUMMARY))
    return Trace(world_size, error, tensors, metrics, processes, facts=facts, loss=loss)


def fingerprints_in(run: Path) -> list[dict[str, Any]]:
    """Reads each iteration's fingerprints; none if the run has recorded none."""
    return _lines(run / FINGERPRINTS)


def metrics_in(run: Path) -> list[dict[str, Any]]:
    """Reads each iteration's metrics, without times."""
    records = _lines(run / METRICS_JSONL)
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]


def leading_rows(rows: Sequence[dict[str, Any]]) -> int:
    """Counts the leading rows that belong to iterations 1, 2, 3 and so on, without a gap."""
    numbered = enumerate(rows, start=1)
    return next((number - 1 for number, row in numbered if row.get("iteration") != number), len(rows))


def recorded_trace(run: Path, iterations: int) -> Trace:
    """Reads the first iterations of a run that was recorded before, here or on another machine.

    Evaluations are left out if a checkpoint says that they were made by other settings than the run has now.

    Raises:
        ValueError: one line, if it has recorded fewer, or a row other than the last is damaged.
    """
    try:
        tensors, metrics = fingerprints_in(run), metrics_in(run)
    except ValueError as error:
        raise ValueError(f"against: {error}") from None
    if not tensors:
        raise ValueError(f"against: {run} has recorded no fingerprints; lockstep train --proof.trace records them")
    there = min(leading_rows(tensors), leading_rows(metrics))
    if there < iterations:
        use = f"; use --iterations {there}" if there else ", and without the first nothing is compared; train it anew"
        raise ValueError(f"against: {run} has recorded {there} iterations from the first on{use}")
    facts = _summary(run)
    ranks = found if isinstance(found := facts.get("world_size"), int) else 0
    metrics = metrics[:iterations]
    if not _has_one_way_to_evaluate(run):
        metrics = [{key: value for key, value in row.items() if not key.startswith(EVALUATION)} for row in metrics]
    return Trace(ranks, None, tensors[:iterations], metrics, recorded=run, facts=facts)


def _summary(run: Path) -> dict[str, Any]:
    """Reads a recorded run's summary, if there is one; prints a line if it is damaged."""
    try:
        return with_first_machine(read_object(run / SUMMARY))
    except FileNotFoundError:
        return {}
    except (OSError, UnreadableError) as error:
        say(f"lockstep: warning: {error}; its number of ranks and its machine stay unknown")
        return {}


def _has_one_way_to_evaluate(run: Path) -> bool:
    """Returns whether the config and all checkpoints of a run agree on how many episodes are played, and how long."""
    configs = [object_if_any(run / CONFIG)]
    configs += [(manifest_of(each) or {}).get("config") or {} for each in checkpoints_in(run / CHECKPOINTS)]
    known = [config["eval"] for config in configs if isinstance(config.get("eval"), dict)]
    return len({json.dumps([each.get("episodes"), each.get("max_steps")]) for each in known}) <= 1


def recorded_config(run: Path, config: Config, iterations: int) -> Config:
    """Returns ``config`` with ``total_steps`` and ``eval`` as in a recorded run's first iterations.

    Raises:
        ValueError: one line, if another setting that can change the agent differs from the run's (it names the first),
            the run's ``config.json`` was edited, or ``total_steps`` changed within those iterations.
    """
    stored = stored_config(run)
    for key, theirs, mine in decisive_differences(stored, config, run):
        theirs, mine = shown_value(theirs, key), shown_value(mine, key)
        raise ValueError(
            f"against: {run} was trained with {key} {theirs}, and here it is {mine}; give the config of that run: "
            f"lockstep verify {run / CONFIG} --against {run}"
        )
    try:
        check_unchanged(run, stored)
        kept = {"total_steps": first_length(run, stored, iterations), "eval": stored.eval}
    except ValueError as error:
        raise ValueError(f"against: {error}") from None
    return config.model_copy(update=kept)


def machines_apart(reference: Trace, trace: Trace) -> list[str]:
    """Lists the differences in hardware and software between two traces that bits may depend on."""
    return facts_apart(MACHINE_FACTS, reference.facts, trace.facts)


def _first_difference(reference: dict[str, Any], other: dict[str, Any]) -> list[str]:
    keys = [*reference, *(key for key in other if key not in reference)]
    return [k for k in keys if k not in other or k not in reference or not same_json(other[k], reference[k])]


def _in_both(reference: Trace, trace: Trace) -> tuple[list[dict[str, Any]], list[dict[str, Any]], tuple[str, ...]]:
    """Returns the metrics of a recorded run and of a trace that can be compared, and the names of those left out.

    Left out are metrics that one of the two never recorded, such as those of a callback, and evaluations that only one
    of them made, or made over another number of episodes: a run may be resumed with another length and other ``eval``
    settings, which decide nothing else.
    """
    pairs = list(zip(reference.metrics, trace.metrics, strict=True))
    theirs, ours = (dict.fromkeys(key for row in rows for key in row) for rows in (reference.metrics, trace.metrics))

    def comparable(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        evaluated = EPISODES in row and row[EPISODES] == other.get(EPISODES)
        known = {key: value for key, value in row.items() if key in theirs and key in ours}
        return known if evaluated else {key: value for key, value in known.items() if not key.startswith(EVALUATION)}

    kept = [(comparable(one, other), comparable(other, one)) for one, other in pairs]
    left_out = {
        key for whole, part in zip(pairs, kept, strict=True) for n in (0, 1) for key in whole[n].keys() - part[n]
    }
    return [one for one, _ in kept], [other for _, other in kept], tuple(k for k in {**theirs, **ours} if k in left_out)


def compare(reference: Trace, trace: Trace) -> Comparison:
    """Finds where a trace first differs from the reference: iteration, tensor, metric.

    All metrics are compared, unless the reference was recorded before: then those that both have.
    """
    if trace.error is not None:
        return Comparison(trace, False, trace.error)
    if reference.error is not None:
        return Comparison(trace, False, "not compared: the first world size did not end")
    for kind in ("tensors", "metrics"):
        if len(getattr(trace, kind)) != len(getattr(reference, kind)):
            return Comparison(
                trace, False, f"{len(getattr(trace, kind))} iterations against {len(getattr(reference, kind))}"
            )
    if not trace.tensors or not trace.metrics:
        return Comparison(trace, False, "no iteration was traced")
    theirs, ours, left_out = reference.metrics, trace.metrics, ()
    if reference.recorded is not None:
        theirs, ours, left_out = _in_both(reference, trace)
    rows = zip(reference.tensors, trace.tensors, theirs, ours, strict=True)
    for number, (tensors, other_tensors, metrics, other_metrics) in enumerate(rows, 1):
        names = _first_difference(tensors, other_tensors)
        values = _first_difference(metrics, other_metrics)
        if names or values:
            parts = [f"{len(names)} of {len(tensors) - 1} tensors, first {names[0]}"] if names else ["no tensor"]
            if values:
                key = values[0]
                parts.append(f"metric {key}: {metrics.get(key)} against {other_metrics.get(key)}")
            return Comparison(trace, False, f"iteration {number}: {'; '.join(parts)}", left_out)
    return Comparison(trace, True, "", left_out)


def verify(
    config: Config, worlds: Sequence[tuple[int, int]], iterations: int, against: Path | None = None
) -> list[Comparison]:
    """Trains every world size, ``(ranks, processes that share them)``, and compares each with the first.

    With ``against``, all are compared with that recorded run, which comes first in the result.

    Raises:
        ValueError: before anything is started, if a world size can't share the config's shards, the recorded run has
            another config, or the config's schedules end earlier.
    """
    recorded = [] if against is None else [recorded_trace(against, iterations)]
    config = settled(config, worlds[0][0], iterations, against)
    for world_size, _ in worlds:
        resolve(config, world_size)
    look_with_cpu(config)
    describe(config.env)
    proof = config.proof.model_copy(update={"trace": True, "interval": 1})
    log = LogConfig(tensorboard=False)
    kept = config.checkpoint.model_copy(update={"mirror": None})
    steps = _length_for(config, iterations)
    config = config.model_copy(update={"proof": proof, "log": log, "checkpoint": kept, "total_steps": steps})
    with temporary_directory() as directory:
        traces = recorded + [run_trace(config, n, iterations, directory, processes) for n, processes in worlds]
    return [compare(traces[0], trace) for trace in traces]


def settled(config: Config, world_size: int, iterations: int, against: Path | None) -> Config:
    """Returns the config that is trained: resolved, with the path of its reference policy, and as a recorded run's.

    The reference policy's name is replaced here because the runs that are compared are made elsewhere.

    Raises:
        ValueError: one line, if it can't be trained so, or the recorded run has another config.
    """
    config = with_reference(resolve(config, world_size), RUNS)
    return config if against is None else recorded_config(against, config, iterations)


def _length_for(config: Config, iterations: int) -> int:
    """Returns a ``total_steps`` that allows so many iterations; raises ``ValueError`` if schedules end before."""
    if not follows_length(config):
        return max(config.total_steps, iterations * config.steps_per_iteration)
    if iterations > config.num_iterations:
        raise ValueError(
            f"iterations: {iterations}, but schedules fall to 0 over total_steps {config.total_steps}, which are "
            f"{config.num_iterations}; use --iterations {config.num_iterations}, or a larger --total-steps"
        )
    return config.total_steps


def parse_worlds(text: str, engine: str) -> list[tuple[int, int]]:
    """Parses ``"1,2,2x1"`` as numbers of ranks and processes: ``[(1, 1), (2, 1), (2, 2)]``.

    Raises:
        ValueError: it isn't such a list, or it has the form ``2x1`` with engine torch, where every rank is a process.
    """
    found = [re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", part.strip()) for part in text.split(",")]
    matches = [match for match in found if match is not None]
    if len(matches) < len(found):
        also = "" if engine == "torch" else ", or 2x1 for two processes of one device each"
        raise ValueError(f"world-sizes: {text!r} is not a list of numbers of ranks such as 1,2,4{also}")
    for match in matches:
        if match[1] and engine == "torch":
            raise ValueError(f"world-sizes: {match[0]}: with engine torch every rank is a process; give a number alone")
    return [(int(match[1] or 1) * int(match[2]), int(match[1] or 1)) for match in matches]
