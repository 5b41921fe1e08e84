"""Gathers what proves that a run is a function of its config: its hashes, and the result of ``lockstep verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lockstep.launch.resume import may_change
from lockstep.report.again import is_clone, verifying
from lockstep.report.lengths import lengths_of
from lockstep.report.promise import leaves_of, lengthened
from lockstep.report.reading import RunFiles, objects
from lockstep.report.settings import differing, facts_apart, in_full
from lockstep.report.timing import world_sizes
from lockstep.report.words import setting
from lockstep.runs.listing import number
from lockstep.training.run_history import with_first_machine

NONE, EQUAL, DIFFERENT, OTHER, UNTRAINED = "none", "equal", "different", "other", "untrained"
HASHES = ("params_sha256", "state_sha256")
FACTS = {
    "reduction": "reduction",
    "num_shards": "shards",
    "shards_on_a_rank": "shards of a rank",
    "collectives": "collectives",
    "sums": "sums over shards travel by",
}


@dataclass(frozen=True)
class Verified:
    """What ``verify.json`` says.

    Attributes:
        verdict: :data:`EQUAL`, :data:`DIFFERENT`, :data:`OTHER` (another config was verified), :data:`UNTRAINED` (a
            clone), or :data:`NONE` (nothing was verified).
        command: the command that verifies the run; None for a clone or a run that was handed objects.
        date: when it was verified.
        iterations: how many iterations of each world size were compared.
        rows: for each world size its label, whether it was equal, its number of tensors, and the first difference.
        apart: settings in which the verified config differs, or one that was edited since the run was trained; if none,
            differences between the machines.
        not_compared: metrics that only the recorded run or only the runs here have, so that they weren't compared.
    """

    verdict: str
    command: str | None
    date: Any = None
    iterations: Any = None
    rows: tuple[tuple[str, bool, Any, str], ...] = ()
    apart: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proof:
    """The proof that a run's files contain.

    Attributes:
        hashes: names and hashes of the parameters and of the whole state; empty for a run without a summary.
        facts: how gradients were reduced.
        world_sizes: first and last iteration of each stretch, and the number of ranks that trained it.
        leaves: why the run is outside the promise of equal bytes, one line each.
    """

    hashes: list[tuple[str, str]]
    facts: list[tuple[str, Any]]
    world_sizes: list[tuple[int, int, int]]
    leaves: list[str]
    verified: Verified


def proof_of(run: RunFiles) -> Proof:
    """Returns the proof of a run, or of one of several seeds."""
    hashes = [(name, run.summary[name]) for name in HASHES if isinstance(run.summary.get(name), str)]
    facts = [(words, run.summary[name]) for name, words in FACTS.items() if name in run.summary]
    if not run.summary:
        facts = [(words, run.config[name]) for name, words in FACTS.items() if name in run.config]
    return Proof(hashes, facts, world_sizes(run), leaves_of(run), _verified(run))


def shared(proofs: Sequence[tuple[str, Proof]]) -> list[tuple[list[str], Proof]]:
    """Groups seeds whose proofs differ only in their hashes; returns each group's names and its first proof.

    The command that verifies the first stands for those of the others.
    """
    found: list[tuple[list[str], Proof, Proof]] = []
    for name, proof in proofs:
        common = replace(proof, hashes=[], verified=replace(proof.verified, command=None))
        names = next((names for names, other, _ in found if other == common), None)
        if names is None:
            found.append(([name], common, proof))
        else:
            names.append(name)
    return [(names, first) for names, _, first in found]


def _is_of_its_first_length(run: RunFiles, kept: Mapping[str, Any], iterations: float | None) -> bool:
    """Returns whether a verification trained only what the run did before its ``total_steps`` first changed."""
    first = next(iter(lengths_of(run.path, run.config, links=False)), None)
    envs, steps = number(kept, "num_envs"), number(kept, "num_steps")
    if first is None or None in (envs, steps, iterations) or kept.get("total_steps") != first["was"]:
        return False
    return (iterations or 0) * (envs or 0) * (steps or 0) <= first["global_step"]


def _verified(run: RunFiles) -> Verified:
    if is_clone(run):
        return Verified(UNTRAINED, None)
    asks, said = verifying(run), run.verification
    if said is None:
        return Verified(NONE, asks)
    rows = tuple(
        (str(row.get("label", "?")), row.get("equal") is True, row.get("tensors"), str(row.get("difference", "")))
        for row in objects(said, "world_sizes")
    )
    kept = found if isinstance(found := said.get("config"), dict) else {}
    configs = [in_full(kept), in_full(run.config)]
    apart = tuple(f"{key} {setting(a)}, here {setting(b)}" for key, (a, b) in differing(configs) if not may_change(key))
    if run.edited is not None and not apart:
        apart = (run.edited,)
    if not _is_of_its_first_length(run, kept, number(said, "iterations")):
        apart += tuple(lengthened(run))
    verdict = EQUAL if said.get("equal") is True and len(rows) > 1 and all(row[1] for row in rows) else DIFFERENT
    if apart:
        verdict = OTHER
    elif isinstance(machine := said.get("machine"), dict):
        apart = tuple(facts_apart(machine, machine, with_first_machine(run.summary)))
    return Verified(verdict, asks, said.get("verified"), said.get("iterations"), rows, apart, _not_compared(said))


def _not_compared(said: Mapping[str, Any]) -> tuple[str, ...]:
    lists = (row.get("not_compared") for row in objects(said, "world_sizes"))
    return tuple(dict.fromkeys(str(name) for names in lists if isinstance(names, list) for name in names))
