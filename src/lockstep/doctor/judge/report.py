"""Formats the report on one screen, with the verdict first."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lockstep.doctor.judge.advice import UNSEEN, UNSEEN_SUMS
from lockstep.doctor.judge.diagnosis import Diagnosis
from lockstep.doctor.judge.endings import STACK_LINES
from lockstep.doctor.judge.evidence import Finding

WIDTH = 110


def screen(diagnosis: Diagnosis, program: str) -> str:
    """Returns the report as text."""
    lines = ["", *_wrapped(f"{diagnosis.verdict}: {diagnosis.reason}"), ""]
    for finding in diagnosis.findings:
        lines += _finding_lines(finding, headline=finding.text == diagnosis.reason)
    lines += _wrapped(f"compared   {_coverage(diagnosis)}", 11)
    own, seen = diagnosis.overhead, diagnosis.coverage
    rest = own["seconds"] - own["own_seconds"]
    share = f"{own['own_seconds']:.2f} s beside the {rest:.1f} s of the script, {100 * own['share']:.1f} %"
    graphs = "; this script captures CUDA graphs, so most of its steps weren't" if seen["cuda_graphs"] else ""
    unseen = UNSEEN if seen["sums"] else f"{UNSEEN}, {UNSEEN_SUMS}"
    lines += [f"overhead   {share}", *_wrapped(f"not seen   {unseen}{graphs}", 11)]
    return "\n".join([f"lockstep doctor: {program} on {seen['ranks']} rank{'' if seen['ranks'] == 1 else 's'}", *lines])


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _finding_lines(finding: Finding, *, headline: bool) -> list[str]:
    said = {"" if headline else finding.level: finding.text, "cause": finding.cause, "fix": finding.fix}
    lines = [line for head, text in said.items() if head and text for line in _wrapped(f"{head:<10} {text}", 11)]
    for rank, stack in finding.details.get("stacks", {}).items():
        lines += _stack_lines(rank, stack)
    return [*lines, ""] if lines else []


def _stack_lines(rank: str, stack: Sequence[str]) -> list[str]:
    shown = [f"             {line}" for line in stack[:STACK_LINES]]
    return [f"  stack of rank {rank}, innermost call first", *shown] if shown else []


def _coverage(diagnosis: Diagnosis) -> str:
    seen = diagnosis.coverage
    taken = [max(ranks.values(), default=0) for ranks in seen["optimizer_steps"].values()]
    tensors = ", ".join(f"{count} {kind}" for kind, count in seen["tensors"].items())
    optimizers = f" of {len(taken)} optimisers" if len(taken) > 1 else ""
    return (
        f"{seen['compared_steps']} of {sum(taken)} optimiser steps{optimizers}: {tensors}, learning rates, step counts"
    )
