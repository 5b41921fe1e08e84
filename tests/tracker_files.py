"""Records that trackers are given in tests, and what is read again of the files that they write."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.runs.trackers import Tracker

RETURN = "rollout/episode_return_mean"


def make_record(iteration: int, episode_return: float | None = 1.5, **more: Any) -> dict[str, Any]:
    return {"iteration": iteration, "global_step": 100 * (iteration + 1), RETURN: episode_return, **more}


def log_all(tracker: Tracker, iterations: Iterable[int]) -> None:
    """Logs a record of each iteration, and closes."""
    for iteration in iterations:
        tracker.log(make_record(iteration))
    tracker.close()


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """By tag, steps and values."""
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}
