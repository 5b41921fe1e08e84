"""Finds how ranks ended: by an error of the script, or while they waited for a rank that had left."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from lockstep.core.process import signal_name
from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.evidence import DOUBT, FAULT, Finding, listed
from lockstep.doctor.judge.traces import RankTrace
from lockstep.doctor.watch.stacks import own_lines

STACK_LINES = 12
MISMATCH = "collective mismatch"
"""What gloo says in its error if another rank sent something of another size."""


def waited(trace: RankTrace, deadlock: bool) -> bool:
    """Returns whether a rank waited for others when it was ended, failed in a collective, or stood still to the end."""
    if trace.lost:
        return False  # its last state may be old
    return in_collective(trace) or (deadlock and trace.end is None and trace.state.get("waiting") is not None)


def in_collective(trace: RankTrace) -> bool:
    """Returns whether a rank was ended in a collective or failed in one."""
    if trace.end is not None:
        return bool(trace.end.get("error_in_collective"))
    return trace.state.get("waiting") is not None and bool(trace.state.get("certain"))


def _place(stack: Sequence[str]) -> str:
    """Describes a stack by its innermost frame and the script's own innermost frame."""
    own = own_lines(list(stack))
    parts = [_short(stack[0])] if stack else []
    return " ← ".join([*parts, *(_short(line) for line in own[:1] if line != stack[0])])


def _short(line: str) -> str:
    """Shortens ``/path/to/train.py:41 main`` to ``main (train.py:41)``."""
    place, _, name = line.rpartition(" ")
    return f"{name} ({os.path.basename(place)})"


def waiting_finding(traces: Sequence[RankTrace], deadlock: bool) -> Finding | None:
    """Finds ranks that wait in a collective for a rank that has left, or for one another.

    ``deadlock``: the doctor ended the ranks because they only waited.
    """
    waiting = [t for t in traces if waited(t, deadlock)]
    gone = [t for t in traces if t.finished]
    if not waiting or not (gone or deadlock):
        return None
    places = "; ".join(f"rank {t.rank} in {_place(t.state.get('stack', []))}" for t in waiting)
    stacks: dict[str, Any] = {str(t.rank): t.state.get("stack", []) for t in waiting}
    still = [t for t in waiting if not in_collective(t)]
    if still:
        seconds = min(t.state["waiting"] for t in still)
        others = [t.rank for t in waiting if in_collective(t)]
        what = f", {listed(others)} waited in a collective" if others else ""
        what += f", {listed([t.rank for t in gone])} had ended" if gone else ""
        text = f"{listed([t.rank for t in still])} stood still for {seconds:.0f} s{what}: {places}"
        return Finding("still", DOUBT, text, CAUSES["still"], FIXES["still"], {"stacks": stacks})
    whom = f"while {listed([t.rank for t in gone])} had ended" if gone else "for one another"
    text = f"{listed([t.rank for t in waiting])} waited in a collective {whom}: {places}"
    return Finding("waiting", FAULT, text, CAUSES["waiting"], FIXES["waiting"], {"stacks": stacks})


def _failed(traces: Sequence[RankTrace]) -> list[RankTrace]:
    return [t for t in traces if t.exit_code not in (0, None) and t.ended_at is not None]


def of_themselves(traces: Sequence[RankTrace], deadlock: bool) -> list[RankTrace]:
    """Returns the ranks that failed for another reason than waiting for others."""
    return [t for t in _failed(traces) if not waited(t, deadlock)]


def failure_finding(traces: Sequence[RankTrace], interrupted: bool, deadlock: bool) -> Finding | None:
    """Finds the first rank that failed by itself; or that the script was interrupted."""
    own = of_themselves(traces, deadlock) or _failed(traces)
    if interrupted:
        return Finding("interrupted", DOUBT, "the script was stopped: what is said here was seen until then")
    if not own or (waiting_finding(traces, deadlock) is not None and all(waited(t, deadlock) for t in own)):
        return None
    raised = all("raised_at" in (t.end or {}) for t in own)
    parted = [(t.end or {}).get("ranks_parted") for t in own]
    first = min(own, key=lambda t: ((t.end or {})["raised_at"] if raised else t.ended_at) or 0.0)
    if all(parted):  # lockstep.attach compared the ranks and raised on each
        text = f"ranks parted: rank {first.rank} {_how(first)}"
        cause, fix = ("rates", "rates") if set(parted) == {"rates"} else ("parted", "steps")
        return Finding("parted", FAULT, text, CAUSES[cause], FIXES[fix], {"rank": first.rank})
    text, advice = f"the script failed: rank {first.rank} {_how(first)}", "" if None in parted else "parted_or_alone"
    others = [t.rank for t in traces if t is not first and waited(t, deadlock)]
    if others and _met_another_collective(first):
        text += f", while {listed(others)} {'were' if len(others) > 1 else 'was'} in a collective"
        advice = "different_collectives"
    return Finding("failure", DOUBT, text, CAUSES.get(advice, ""), FIXES.get(advice, ""), {"rank": first.rank})


def _met_another_collective(trace: RankTrace) -> bool:
    """Returns whether a rank failed as gloo lets it fail if another rank's data are of another collective.

    From a thread of its own gloo can only abort the process. It raises if it finds that out in the collective's call.
    """
    aborted = trace.end is None and trace.exit_code == -signal.SIGABRT
    return aborted or MISMATCH in (trace.end or {}).get("error", "").lower()


def _how(trace: RankTrace) -> str:
    end = trace.end or {}
    if "error" in end:
        place = end.get("error_at", "").partition(" ")[0].removeprefix(os.getcwd() + os.sep)
        at = f" — at {place}" if place else ""
        return f"raised {end['error']}{at}"
    code = trace.exit_code or 0
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with exit status {code}"


def unheard_finding(traces: Sequence[RankTrace]) -> Finding | None:
    """Finds ranks that recorded nothing."""
    silent = [t.rank for t in traces if not t.state and not t.checks]
    if not silent:
        return None
    return Finding("unheard", DOUBT, f"nothing was heard of {listed(silent)}: the process ended before its script ran")


def lost_finding(traces: Sequence[RankTrace]) -> Finding | None:
    """Finds ranks that couldn't write all that they saw."""
    lost = [t.rank for t in traces if t.lost]
    if not lost:
        return None
    text = f"the evidence of {listed(lost)} is incomplete: what the doctor saw there could not all be written"
    return Finding("lost", DOUBT, text, CAUSES["lost"], FIXES["lost"])
