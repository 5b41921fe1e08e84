"""Trains one drawn config again and again, on other ranks and through faults, and says what came out differently."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.campaign import Campaign, attack
from benchmarks.chaos.compared import Reference, differences, result_of
from benchmarks.chaos.plan import Case
from benchmarks.chaos.session import Session, Told
from benchmarks.fuzz.draw import Drawn, drawn_config
from lockstep.core.process import EXIT_USER_ERROR

MOST_FAULTS = 3
MOST_ATTACKS = 4
"""Of a config whose run is over before its first fault: another attack draws another one."""
GROUPS = 0.2
"""Share of configs that are trained as one seed of two, too."""


@dataclass(frozen=True)
class DrawnCase(Case):
    """A drawn config as something that is attacked.

    Attributes:
        config: file that holds it.
        steps_per_iteration: environment steps.
    """

    config: Path = Path()
    steps_per_iteration: int = 1

    @property
    def steps(self) -> int:
        """Environment steps of an iteration."""
        return self.steps_per_iteration

    def command(self) -> list[str]:
        """The config alone: a session's own words come behind it."""
        return ["--config", str(self.config)]


@dataclass
class Trial:
    """What came of one config.

    Attributes:
        engine: of the config.
        seed: that drew it.
        config: its settings, as a file has them.
        reference_words: ranks or devices, and what else a session may change, of the run that all others are held to.
        other_words: of the run that nobody touched either.
        sessions: runs or parts of a run that were started.
        faults: what was done to it, a row each.
        refused: the line that said why the config is none, or None: it is one.
        problems: what shouldn't be, each a promise that broke.
        seconds: that all took.
    """

    engine: str
    seed: int
    config: dict[str, Any]
    reference_words: Sequence[str] = ()
    other_words: Sequence[str] = ()
    sessions: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    refused: str | None = None
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """What it is called: its engine, its seed, its environment."""
        return f"{self.engine} {self.seed}, {self.config['env']['id']}"

    @property
    def changes_ranks(self) -> bool:
        """Whether it was trained on another number of ranks or devices, or on another number of processes."""
        return bool(self.other_words) and self.other_words[:2] != self.reference_words[:2]


def tried(engine: str, seed: int, root: Path) -> Trial:
    """Draws a config and holds it to its promise; ``root`` is a directory that isn't there yet."""
    return held_to_it(drawn_config(seed, engine), seed, root)


def held_to_it(drawn: Drawn, seed: int, root: Path) -> Trial:
    """Trains a config on one rank, on others, and through faults; see :func:`tried`."""
    began = time.monotonic()
    trial = Trial(drawn.engine, seed, drawn.config)
    root.mkdir(parents=True)
    config = root / "config.json"
    config.write_text(json.dumps(drawn.config))
    workers = any("--env.workers" in words for words in drawn.sessions)
    case = DrawnCase(
        trial.name, (), drawn.iterations, drawn.eval_interval, drawn.sessions, workers, config, drawn.steps
    )
    _judge(trial, case, root)
    trial.seconds = round(time.monotonic() - began, 1)
    return trial


def _judge(trial: Trial, case: DrawnCase, root: Path) -> None:
    source = random.Random(trial.seed)
    trial.reference_words = case.worlds[0]
    told, reference = _trained(trial, case, case.worlds[0], root / "alone")
    if told.code == EXIT_USER_ERROR and not told.problems[1:]:
        trial.refused = told.stderr.strip()
        return
    trial.problems += [f"alone: {problem}" for problem in told.problems]
    if trial.problems:
        return
    expected = result_of(reference), {path.name for path in reference.iterdir()}
    others = [words for words in case.worlds[1:] if words[:2] != case.worlds[0][:2]] or case.worlds[1:]
    words = trial.other_words = source.choice(others)
    told, run = _trained(trial, case, words, root / "elsewhere")
    found = told.problems or differences(run, expected, run.parents[1] / "tmp")
    trial.problems += [f"{' '.join(words)}: {problem}" for problem in found]
    if source.random() < GROUPS and trial.config.get("reduction") != "fast":
        trial.problems += _in_a_group(trial, case, source.choice(case.worlds), expected, root / "group")
    campaign = attacked(trial, case, source.randint(1, MOST_FAULTS), expected, root)
    trial.faults = campaign.faults
    trial.problems += [f"through faults: {problem}" for problem in campaign.problems]


def attacked(trial: Trial, case: DrawnCase, faults: int, expected: Reference, root: Path) -> Campaign:
    """Trains it through faults; again where the run was over before the first of them, which was drawn for too late."""
    for number in range(MOST_ATTACKS):
        place = root / f"attacked_{number}"
        place.mkdir()
        campaign = attack(case, f"{trial.seed}.{number}", faults, place, expected, with_disk=False)
        trial.sessions += len(campaign.faults) + 1
        if campaign.faults or campaign.problems:
            break
    return campaign


def _in_a_group(trial: Trial, case: DrawnCase, words: Sequence[str], expected: Reference, place: Path) -> Sequence[str]:
    """Trains it as the first of two seeds; what differs from the run by itself."""
    seed = trial.config["seed"]
    words = ["--seeds", f"{seed},{seed + 1}", *words]
    told, group = _trained(trial, case, words, place)
    found = told.problems or differences(group / f"seed_{seed}", expected, place / "tmp")
    return [f"{' '.join(words)}: {problem}" for problem in found]


def _trained(trial: Trial, case: DrawnCase, words: Sequence[str], place: Path) -> tuple[Told, Path]:
    """Trains undisturbed; what was told, and the run directory."""
    temporary, run = place / "tmp", place / "runs" / "run"
    temporary.mkdir(parents=True)
    arguments = [*case.command(), "--name", "run", "--runs-dir", str(run.parent), "--quiet", *words]
    trial.sessions += 1
    return Session(case, arguments, run, temporary).ended(), run
