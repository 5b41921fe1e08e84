"""Writes what trains, evaluates and verifies a run once more: commands, or Python where no command finds it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from lockstep.config.handed import loading, shown_name
from lockstep.report.reading import RunFiles
from lockstep.report.settings import seeds_in_words
from lockstep.report.words import command
from lockstep.runs.listing import printable

EVALUATION_FILE = "evaluation.json"
EPISODES = 100


@dataclass(frozen=True)
class Again:
    """What to type for a run.

    Attributes:
        train: gives the same agent once more.
        evaluate: leaves :data:`EPISODES` episodes beside it (of several seeds beside the first), for the page.
        verify: compares world sizes; None: nothing does for this run, whose environment was handed over.
        is_python: whether they are Python, else commands.
        same: whether ``train`` gives this very agent; not if its schedules were stretched on its way.
    """

    train: str
    evaluate: str
    verify: str | None
    is_python: bool
    same: bool


def again_of(run: RunFiles) -> Again:
    """Writes what to type for a run, or for one of several seeds."""
    config, played = run.path / "config.json", (run.seeds[0] if run.seeds else run).path
    env_id, network = _names(run)
    seeds = seeds_in_words([seed.config.get("seed") for seed in run.seeds]).replace("–", "-").replace(" ", "")
    opened, same = loading(played, env_id, network), not any(one.summary.get("lengths") for one in run.seeds or [run])
    if opened is None:
        evaluated = command("eval", played, "--episodes", str(EPISODES), "--json", str(played / EVALUATION_FILE))
        train = printable(shlex.join(["lockstep", "train", str(config), *(["--seeds", seeds] if seeds else [])]))
        return Again(train, evaluated, verifying(run), False, same)
    given = [name for name in (shown_name(env_id),) if name is not None] + [f"config={str(config)!r}"]
    given += [f"network=dict(custom={name})" for name in (shown_name(network),) if name is not None]
    given += [f"seeds={seeds!r}"] if seeds else []
    evaluated = f"json.dump({opened}.evaluate({EPISODES}), open({str(played / EVALUATION_FILE)!r}, 'w'))"
    return Again(printable(f"lockstep.train({', '.join(given)})"), printable(evaluated), None, True, same)


def verifying(run: RunFiles) -> str | None:
    """The command that compares world sizes for a run; None for one that was handed its environment or network."""
    if loading(run.path, *_names(run)) is not None:
        return None
    shards = run.config.get("num_shards")
    most = shards if isinstance(shards, int) else 1
    sizes = ",".join(str(size) for size in (1, 2, 4) if size <= max(1, most))
    return command("verify", run.path, "--world-sizes", sizes)


def _names(run: RunFiles) -> tuple[str, str | None]:
    """What a run's environment and network go by, of a config that anybody may have written."""
    network = run.config.get("network")
    custom = network.get("custom") if isinstance(network, dict) else None
    return printable(run.row.environment or ""), printable(custom) if isinstance(custom, str) else None
