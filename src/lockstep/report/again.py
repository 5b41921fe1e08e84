"""Writes how to train, evaluate and verify a run again: commands, or Python if no command can load it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from lockstep.core.user_code.handed import loading, shown_name
from lockstep.report.promise import changed
from lockstep.report.reading import RunFiles
from lockstep.report.settings import seeds_in_words
from lockstep.report.words import command
from lockstep.runs.listing import printable

EVALUATION_FILE = "evaluation.json"
EPISODES = 100
FINISHED, CLONED = "finished", "cloned"


@dataclass(frozen=True)
class Again:
    """What to type for a run.

    Attributes:
        train: trains the same agent again; None for a cloned policy, which wasn't trained.
        evaluate: writes :data:`EPISODES` episodes into the run (of several seeds, into the first), for the page.
        verify: compares world sizes; None for a cloned policy, and for a run that was handed Python objects.
        is_python: whether ``train`` is Python rather than a command.
        evaluates_in_python: whether ``evaluate`` is Python rather than a command.
        changed: why ``train`` gives another agent than this one; None if it gives the same.
    """

    train: str | None
    evaluate: str
    verify: str | None
    is_python: bool
    evaluates_in_python: bool
    changed: str | None


def again_of(run: RunFiles) -> Again:
    """Writes what to type for a run, or for one of several seeds."""
    played, (env_id, network, _) = run.first.path, _names(run)
    opened = loading(played, env_id, network)
    if opened is None:
        evaluate = command("eval", played, "--episodes", str(EPISODES), "--json", str(played / EVALUATION_FILE))
    else:
        file = str(played / EVALUATION_FILE)
        evaluate = printable(f"json.dump({opened}.evaluate({EPISODES}), open({file!r}, 'w'))")
    is_python = loading(run.path, *_names(run)) is not None
    train = None if is_clone(run) else printable(_in_python(run) if is_python else _as_command(run))
    return Again(train, evaluate, verifying(run), is_python, opened is not None, _changed(run))


def is_clone(run: RunFiles) -> bool:
    """Returns whether ``lockstep clone`` made the policy, rather than training."""
    return run.summary.get("status") == CLONED


def verifying(run: RunFiles) -> str | None:
    """Returns the command that compares world sizes for a run; None for a clone or a run that was handed objects.

    A run of one shard has one world size, and is trained twice on it.
    """
    if is_clone(run) or loading(run.path, *_names(run)) is not None:
        return None
    shards = run.config.get("num_shards")
    most = shards if isinstance(shards, int) else 1
    sizes = [str(size) for size in (1, 2, 4) if size <= most]
    return command("verify", run.path, "--world-sizes", ",".join(sizes if len(sizes) > 1 else ["1", "1"]))


def _as_command(run: RunFiles) -> str:
    words = ["lockstep", "train", str(run.path / "config.json")]
    words += ["--seeds", seeds] if (seeds := _seeds(run)) else []
    words += [] if (step := _stopped_at(run)) is None else ["--stop-at-step", str(step)]
    words += [] if _entry(run, "log", "jsonl") is None else ["--log.jsonl", "none"]  # it holds the run's records
    return shlex.join(words)


def _in_python(run: RunFiles) -> str:
    env, network, loss = (shown_name(name) for name in _names(run))
    given = [] if env is None else [env]
    given += [f"config={str(run.path / 'config.json')!r}"]
    given += [] if network is None else [f"network=dict(custom={network})"]
    given += [] if loss is None else [f"ppo=dict(loss={loss})"]
    given += [] if _entry(run, "log", "jsonl") is None else ["log=dict(jsonl=None)"]
    given += [f"seeds={seeds!r}"] if (seeds := _seeds(run)) else []
    given += [] if (step := _stopped_at(run)) is None else [f"stop_at_step={step}"]
    return f"lockstep.train({', '.join(given)})"


def _seeds(run: RunFiles) -> str:
    return seeds_in_words([seed.config.get("seed") for seed in run.seeds]).replace("–", "-").replace(" ", "")


def _steps(run: RunFiles) -> set[int | None]:
    """Returns the steps at which a run, or each seed, stopped early; None for one that finished or hasn't ended."""
    ends = [one.summary for one in run.seeds or [run]]
    found = [None if end.get("status", FINISHED) == FINISHED else end.get("global_step") for end in ends]
    return {step if isinstance(step, int) else None for step in found}


def _stopped_at(run: RunFiles) -> int | None:
    return min((step for step in _steps(run) if step is not None), default=None)


def _changed(run: RunFiles) -> str | None:
    apart = "its seeds did not stop at the same step" if len(_steps(run)) > 1 else None
    return changed(run) or apart


def _names(run: RunFiles) -> tuple[str, str | None, str | None]:
    """Returns the names of a run's environment, custom network and loss; the config may hold anything."""
    network, loss = (_entry(run, *keys) for keys in (("network", "custom"), ("ppo", "loss")))
    return printable(run.row.environment or ""), network, loss


def _entry(run: RunFiles, section: str, key: str) -> str | None:
    found = run.config.get(section)
    value = found.get(key) if isinstance(found, dict) else None
    return printable(value) if isinstance(value, str) else None
