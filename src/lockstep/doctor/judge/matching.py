"""Tells which optimiser of a rank is which of another, by what they update, and sets aside those of one rank alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lockstep.doctor.judge.advice import CAUSES, FIXES
from lockstep.doctor.judge.compare import same
from lockstep.doctor.judge.evidence import DOUBT, NOTE, Finding, listed
from lockstep.doctor.judge.traces import Check, Kept, Moment, Part, RankTrace
from lockstep.doctor.watch.side_store import OPTIMIZED

Group = Mapping[int, int]
"""Numbers of the optimisers that are one on all ranks, by rank; one rank may lack it."""


def match_optimizers(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Returns the traces with the same number for the same optimiser: as ranks number them, by first steps, or anew.

    Optimisers are the same if their tensors have the same sizes and aren't known to be other ones. Those that are left
    are the same in the order in which they come. If they hold different parameters of models of which every rank was
    seen to have all, each rank's optimiser updates a part of these.
    """
    stepping = [trace for trace in traces if any(trace.steps.values())]
    if len(stepping) < 2 or _numbered_alike(stepping):
        return list(traces)
    groups = sorted(_groups(stepping), key=lambda group: (min(group.values()), min(group)))
    new = {
        trace.rank: {group[trace.rank]: number for number, group in enumerate(groups) if trace.rank in group}
        for trace in stepping
    }
    numbered = {trace.rank: trace.numbered(new[trace.rank]) for trace in stepping}
    parts = {n: every for n in range(len(groups)) if (every := _parts(list(numbered.values()), n))}
    return [_by_parts(numbered[trace.rank], parts) if trace.rank in numbered else trace for trace in traces]


def _numbered_alike(traces: Sequence[RankTrace]) -> bool:
    first = traces[0]
    return all(other.steps.keys() == first.steps.keys() for other in traces) and all(
        _alike(first, number, other, number) for other in traces[1:] for number in first.steps
    )


def _alike(trace: RankTrace, number: int, other: RankTrace, its: int) -> bool:
    """Returns whether two ranks' optimisers are of tensors of the same sizes, which aren't held at different places."""
    mine, theirs = (set(t.held.get(n, {}).values()) for t, n in ((trace, number), (other, its)))
    return trace.sizes.get(number) == other.sizes.get(its) and not (mine and theirs and mine.isdisjoint(theirs))


def _groups(traces: Sequence[RankTrace]) -> Iterator[Group]:
    first, *others = traces
    left = {trace.rank: sorted(trace.steps) for trace in traces}
    for number in sorted(first.steps):
        group = {first.rank: number}
        for other in others:
            its = next((its for its in left[other.rank] if _alike(first, number, other, its)), None)
            group |= {} if its is None else {other.rank: its}
        if len(group) == len(traces):
            for rank, its in group.items():
                left[rank].remove(its)
            yield group
    ordered = [sorted(left[trace.rank], key=lambda n, of=trace: (not _whole(of, n), n)) for trace in traces]
    for numbers in itertools.zip_longest(*ordered):
        yield {trace.rank: n for trace, n in zip(traces, numbers, strict=True) if n is not None}


def _whole(trace: RankTrace, number: int) -> Part:
    """Returns the models of which an optimiser holds a part and no other one the rest, before its first step."""
    check = trace.checks.get(Moment(number, 1, "before"))
    return {} if check is None else check.parts.get("whole", {})


def _parts(traces: Sequence[RankTrace], number: int) -> set[str]:
    """Returns all parameters of which each rank's optimiser updates other ones, if every rank has all; else none."""
    held = [set(trace.held.get(number, {}).values()) for trace in traces]
    every = set().union(*held)
    apart = all(held) and sum(map(len, held)) == len(every)
    return every if apart and all(every <= _whole(trace, number).keys() for trace in traces) else set()


def _by_parts(trace: RankTrace, parts: Mapping[int, set[str]]) -> RankTrace:
    """Returns a trace in which these optimisers update a part of the parameters that were seen before each step."""
    checks = {m: _of_part(c, parts[m.optimizer]) if m.optimizer in parts else c for m, c in trace.checks.items()}
    return replace(trace, checks=checks, by_parts=trace.by_parts | parts.keys())


def _of_part(check: Check, every: set[str]) -> Check:
    own = {
        kind: {place: kept._replace(shards=max(1, kept.shards)) for place, kept in part.items()}
        for kind, part in check.parts.items()
        if kind in OPTIMIZED
    }
    whole = {name: kept for name, kept in check.parts.get("whole", {}).items() if name in every}
    return replace(check, parts={**check.parts, **own, **({"gathered": whole} if whole else {})})


# --- of one rank alone --------------------------------------------------------------------------------------------


def without_lone_optimizers(traces: Sequence[RankTrace]) -> tuple[Sequence[RankTrace], Finding | None]:
    """Returns the traces without optimisers that one rank alone has, and a finding about the first of these.

    It is a note if what they trained is the same on all ranks since. Else no other rank made one more with tensors of
    the same sizes, nor has such tensors in modules that nothing trains, and it is a doubt. All ranks must have all
    others, which are numbered anew. None is set aside if one changed what all ranks train, and wasn't seen to send it.
    """
    if len(traces) < 2 or not all(trace.finished for trace in traces):
        return traces, None
    common = set.intersection(*(set(trace.steps) for trace in traces))
    having = [trace for trace in traces if set(trace.steps) - common]
    if len(having) != 1 or not common:
        return traces, None
    (trace,) = having
    others, numbers = [other for other in traces if other is not trace], sorted(set(trace.steps) - common)
    if not all(_came_to_all(trace, number, others, common) for number in numbers):
        return traces, None
    sent = [number for number in numbers if _was_sent(trace, number, others, common)]
    if not all(number in sent or _is_lone(trace, number, others, common) for number in numbers):
        return traces, None
    details = {"rank": trace.rank, "optimizers": numbers, "steps": [trace.steps[o] for o in numbers]}
    text = _text(trace, numbers)
    if sent == numbers:
        text += ", as all ranks have what it trained"
        finding = Finding("lone_optimizer", NOTE, text, "", "", details)
    else:
        cause, fix = CAUSES["lone_optimizer"], FIXES["lone_optimizer"]
        finding = Finding("lone_optimizer", DOUBT, text, cause, fix, details)
    new = {old: number for number, old in enumerate(sorted(common))}
    return [each.numbered(new) for each in traces], finding


def _is_lone(trace: RankTrace, number: int, others: Sequence[RankTrace], common: set[int]) -> bool:
    """Returns whether no other rank made, or could have made, one of a rank's optimisers beside the ``common`` ones."""
    sizes = trace.sizes.get(number, [])
    return bool(sizes) and number not in trace.by_parts and not any(_has(other, sizes, common) for other in others)


def _has(trace: RankTrace, sizes: Sequence[int], common: set[int]) -> bool:
    """Returns whether a rank made another optimiser of such tensors, or has such tensors that nothing trains."""
    left = trace.made - Counter(tuple(trace.sizes.get(number, ())) for number in common)
    return tuple(sizes) in left or Counter(sizes) <= Counter(trace.untrained)


def _came_to_all(trace: RankTrace, number: int, others: Sequence[RankTrace], common: set[int]) -> bool:
    """Returns whether what one rank's optimiser left in tensors of optimisers of all ranks (``common``) came to all.

    Either an optimiser that all ranks have was compared after its last step, or what it left is what the other ranks
    had in the end.
    """
    last = {Moment(number, trace.steps[number], when) for when in ("after", "end")}
    moments = list(trace.checks)
    done = next((n for n, moment in enumerate(moments) if moment in last), len(moments))
    since = {moment.optimizer for moment in moments[done:] if moment.optimizer in common and moment.when != "end"}
    left = _parameters(trace, number)
    for place, tensor in trace.tensors.get(number, {}).items():
        theirs = [(each, where) for each in common for where, n in trace.tensors.get(each, {}).items() if n == tensor]
        if not theirs or any(each in since for each, _ in theirs):
            continue
        for other in others:
            held = [_parameters(other, each).get(where) for each, where in theirs]
            if place not in left or not any(kept is not None and same(left[place], kept) for kept in held):
                return False
    return True


def _parameters(trace: RankTrace, number: int) -> Part:
    """Returns what an optimiser updates as it was seen last."""
    seen = [c.parts["parameters"] for m, c in trace.checks.items() if m.optimizer == number and "parameters" in c.parts]
    return seen[-1] if seen else {}


def _was_sent(trace: RankTrace, number: int, others: Sequence[RankTrace], common: set[int]) -> bool:
    """Returns whether all that other ranks have of what one rank's optimiser trained is the same there.

    What optimisers of all ranks (``common``) train, too, is compared with these. The rest is compared as other ranks
    use it untrained. What no other rank has or uses (a head that reconstructs) doesn't count, unless it is all.
    """
    trained = set[int]().union(*(trace.tensors.get(each, {}).values() for each in common))
    last, found = trace.checks.get(Moment(number, trace.steps[number], "end")), 0
    parameters = {} if last is None else last.parts.get("parameters", {})
    for place, tensor in trace.tensors.get(number, {}).items():
        if tensor in trained:
            found += 1
            continue
        name = trace.held.get(number, {}).get(place, "")
        mine = [*([parameters[place]] if place in parameters else []), *_untrained(trace, name)][-1:]
        theirs = [_untrained(other, name)[-1:] for other in others]
        if all(theirs):
            if not mine or not all(same(mine[0], kept) for (kept,) in theirs):
                return False
            found += 1
    return found > 0


def _untrained(trace: RankTrace, name: str) -> list[Kept]:
    """Returns what a rank held of a parameter that it used and never trained, at all compared steps in order."""
    used = [check for check in trace.checks.values() if name not in check.facts.get("unused", ())]
    parts = [check.parts.get(kind, {}) for check in used for kind in ("frozen", "unstepped")]
    return [part[name] for part in parts if name in part]


def _text(trace: RankTrace, numbers: Sequence[int]) -> str:
    first = numbers[0]
    names = list(trace.names.get(first, {}).values())
    what = f"{len(trace.sizes.get(first, []))} tensors{f', first {names[0]}' if names else ''}"
    several = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return (
        f"{listed([trace.rank])} alone has optimiser {first + 1} ({what}), which took {trace.steps[first]} steps"
        f"{several}: set aside"
    )
