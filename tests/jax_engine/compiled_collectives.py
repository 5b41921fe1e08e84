"""Collectives of a compiled program, read from the text that XLA prints of it: what, how often, how large, after what.

Collectives in memory (``shared_memory.c``) are custom calls, whose kind is the name of their target. A loop counts as
often as the compiler says that it runs; a branch as the one that communicates most.
"""

import re
from collections import Counter
from dataclasses import dataclass

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"),
    *("collective-broadcast", "send", "recv"),
)
OURS = "lockstep_"
ITEMSIZE = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_OPERATION = re.compile(r"^(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = .*? ([\w\-]+)\((.*)$")
_CALLEES = re.compile(
    r"\b(?:to_apply|calls|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%?([\w.\-]+)")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True, order=True)
class Collective:
    """One collective: its kind, the dtype of what it gives, and bytes of that."""

    kind: str
    dtype: str
    nbytes: int


def bytes_of(shape: str) -> tuple[str, int]:
    """The first dtype of a printed shape, and the bytes of all its arrays."""
    arrays = _ARRAY.findall(shape)
    total = 0
    for dtype, dimensions in arrays:
        count = ITEMSIZE[dtype]
        for size in filter(None, dimensions.split(",")):
            count *= int(size)
        total += count
    return arrays[0][0], total


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Lines of every computation by name, and the name of the entry."""
    out: dict[str, list[str]] = {}
    entry, name = "", None
    for line in text.splitlines():
        found = _HEADER.match(line)
        if found:
            name = found[1]
            out[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            name = None
        elif name is not None:
            out[name].append(line.strip())
    assert entry
    return out, entry


def kind_of(operation: str, line: str) -> str | None:
    """The kind of an operation that communicates, or None."""
    if operation == "custom-call" and (target := _TARGET.search(line)) and target[1].startswith(OURS):
        return target[1]
    started = operation.removesuffix("-start")
    return started if started in KINDS else None


def collectives(text: str) -> Counter[Collective]:
    """How often each collective of a program is executed.

    Raises:
        AssertionError: one stands in a loop of which the compiler doesn't know how often it runs.
    """
    lines, entry = computations(text)

    def of(name: str) -> Counter[Collective]:
        total: Counter[Collective] = Counter()
        for line in lines[name]:
            total += of_line(line)
        return total

    def named(line: str, key: str) -> list[str]:
        found = re.search(rf"\b{key}=\{{?((?:%?[\w.\-]+(?:, )?)+)\}}?", line)
        return [] if found is None else [part.strip().lstrip("%") for part in found[1].split(",") if part.strip()]

    def of_line(line: str) -> Counter[Collective]:
        found = _OPERATION.match(line)
        if found is None:
            return Counter()
        shape, operation = found[1], found[2]
        if kind := kind_of(operation, line):
            return Counter({Collective(kind, *bytes_of(shape)): 1})
        if operation == "while":
            inside = of(named(line, "body")[0]) + of(named(line, "condition")[0])
            if not inside:
                return inside
            trips = _TRIPS.search(line)
            assert trips is not None, f"collectives {sorted(inside)} in a loop of unknown length"
            return Counter({one: count * int(trips[1]) for one, count in inside.items()})
        if operation == "conditional":
            branches = [*named(line, "branch_computations"), *named(line, "true_computation")]
            branches += named(line, "false_computation")
            assert branches, line
            return max((of(branch) for branch in branches), key=lambda found: found.total())
        total: Counter[Collective] = Counter()
        for key in ("to_apply", "calls", "called_computations"):
            for callee in named(line, key):
                if callee in lines:
                    total += of(callee)
        return total

    return of(entry)


def by_kind(found: Counter[Collective]) -> dict[str, int]:
    """Executions by kind."""
    out: dict[str, int] = {}
    for one, count in found.items():
        out[one.kind] = out.get(one.kind, 0) + count
    return out


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of instructions that communicate, of one computation, neither of which has to wait for the other.

    A device would wait in both at once. A loop, a branch or a call communicates if something inside does. What an
    instruction waits for are its operands, which is all that XLA's CPU runtime goes by.
    """
    lines, _ = computations(text)
    communicates: dict[str, bool] = {}

    def loud(name: str) -> bool:
        if name not in communicates:
            communicates[name] = any(loud_line(line) for line in lines[name])
        return communicates[name]

    def loud_line(line: str) -> bool:
        found = _INSTRUCTION.match(line)
        if found is None:
            return False
        if kind_of(found[2], line):
            return True
        callees = [name for called in _CALLEES.findall(line) for name in _NAME.findall(called)]
        return any(loud(callee) for callee in callees if callee in lines)

    pairs = []
    for name, body in lines.items():
        if not loud(name):
            continue
        found = {m[1]: (m, line) for line in body if (m := _INSTRUCTION.match(line))}
        before: dict[str, set[str]] = {}
        for one, (match, _) in found.items():  # operands stand before what takes them
            direct = {operand for operand in _NAME.findall(operands(match[3])) if operand in before}
            before[one] = direct.union(*(before[operand] for operand in direct))
        speaking = [one for one, (_, line) in found.items() if loud_line(line)]
        pairs += [(a, b) for n, b in enumerate(speaking) for a in speaking[:n] if a not in before[b]]
    return pairs


def operands(text: str) -> str:
    """What stands before the parenthesis that closes one opened before this text."""
    depth = 1
    for end, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if not depth:
            return text[:end]
    raise AssertionError(f"no end of operands: {text}")
