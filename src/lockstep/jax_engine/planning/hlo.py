"""Reads a program that XLA has compiled: which kernels run how often, and what they compute, move and exchange.

XLA's own cost analysis counts the body of a loop once, so this reads the program's text. A loop runs as often as the
constant in its condition says. A loop over shards has no such constant, and runs once per shard of the device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lockstep.jax_engine.nets.layers import HEAD
from lockstep.jax_engine.planning.hlo_flops import ConvolutionShapes, convolution_flops, dot_flops, gemm_flops
from lockstep.training.costs import Collective, Kernel

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
PARTS = ("rollout", "evaluate", "gradients", "optimizer")
"""Names that the engine gives its operations (``jax.named_scope``); those without one belong to ``evaluate``."""
PURPOSES = {"rollout": "episodes", "evaluate": "statistics", "gradients": "gradients", "optimizer": "gradients"}
"""What the collectives of each part are for."""
WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4}
WIDTHS |= {"u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0, "opaque": 0}
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
    *("optimization-barrier", "domain", "add-dependency", "iota", "copy-done", "async-done", "async-update"),
}
ON_CHIP = "S(1)"
"""Marks an array in a layout that lies in a chip's own memory, not in HBM."""
MOVING = FREE | {
    *("copy", "copy-start", "broadcast", "reshape", "transpose", "slice", "dynamic-slice", "dynamic-update-slice"),
    *("concatenate", "pad", "gather", "scatter", "reverse", "fusion", "custom-call", "convert"),
}
"""Operations that compute nothing."""
LOOK = {"dynamic-slice", "gather"}

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """One array of a type: its dtype, its shape, and whether it lies in the chip's own memory."""

    dtype: str
    shape: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        """Bytes that it takes in the device's memory: none if it is on the chip."""
        return 0.0 if self.on_chip else WIDTHS.get(self.dtype, 4) * math.prod(self.shape)


def arrays_of(text: str) -> tuple[Array, ...]:
    """Parses the arrays of a type, in order: ``f32[2,64]{1,0}``, or a tuple of such."""
    return tuple(
        Array(dtype, tuple(map(int, filter(None, dims.split(",")))), ON_CHIP in layout)
        for dtype, dims, layout in _ARRAY.findall(text)
        if dtype in WIDTHS
    )


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, the arrays of its result, its operation, its operands' names, and the rest."""

    name: str
    arrays: tuple[Array, ...]
    operation: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def size(self) -> float:
        """Bytes of the result in the device's memory."""
        return sum(array.bytes for array in self.arrays)

    def attribute(self, name: str) -> str | None:
        """Returns the computation's name after ``name=``, or None."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    def called(self) -> list[str]:
        """Returns the names of the computations that a conditional chooses from."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        if branches:
            return _NAME.findall(branches[1])
        return [x for name in ("true_computation", "false_computation") if (x := self.attribute(name))]

    @cached_property
    def label(self) -> str:
        """The name that the program gave the operation, or an empty string."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass
class Computation:
    """A computation's instructions by name, in order."""

    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction | None:
        """The instruction that is its result, or None."""
        return next((x for x in self.instructions.values() if x.root), None)

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read an instruction's result, by its name."""
        out: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                out.setdefault(name, []).append(instruction)
        return out


def _operands(text: str) -> tuple[tuple[str, ...], str]:
    """Splits the text after an operation's opening bracket into operands' names and the rest."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return tuple(_NAME.findall(text[:place])), text[place + 1 :]
    return tuple(_NAME.findall(text)), ""


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Parses a compiled program into computations by name; returns them and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, now = "", None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            now = computations.setdefault(header[2], Computation())
            entry = header[2] if header[1] else entry
            continue
        match = _INSTRUCTION.match(line)
        if match is None or now is None:
            continue
        constant = match[4] == "constant"
        operands, rest = ((), match[5]) if constant or match[4] == "parameter" else _operands(match[5])
        now.instructions[match[2]] = Instruction(
            match[2], arrays_of(match[3]), match[4], operands, rest, match[1] is not None
        )
    return computations, entry


class Ran(NamedTuple):
    """A kernel or collective that runs: its part, its costs and number of calls, and a collective's kind and bytes."""

    part: str
    kernel: Kernel
    collective: str | None
    received: float


class Reader:
    """Walks through a compiled program as a device with ``shards`` shards runs it.

    With ``bf16`` all products but those of heads count as bfloat16. A product's own dtype doesn't tell: a program
    compiled for a CPU in an accelerator's place computes all of them in float32.
    """

    def __init__(self, text: str, shards: int, bf16: bool = False) -> None:
        self._low = "matmul_bf16" if bf16 else "matmul"
        self._computations, self._entry = parse(text)
        self._shards, self._chains = shards, set[str]()

    def run(self) -> Iterator[Ran]:
        """Yields what runs; kernels that are alike may come more than once."""
        yield from self._walk(self._entry, 1.0, "evaluate")

    def _walk(self, name: str, times: float, part: str) -> Iterator[Ran]:
        computation = self._computations[name]
        for instruction in computation.instructions.values():
            operation, here = instruction.operation, _part(instruction.label, part)
            if operation in FREE or operation.endswith("-done"):
                continue
            if operation == "while":
                body, condition = instruction.attribute("body"), instruction.attribute("condition")
                if body is not None and condition is not None:
                    yield from self._walk(body, times * self.trips(instruction, condition), here)
            elif operation == "call":
                target = instruction.attribute("to_apply")
                yield from self._walk(target, times, here) if target in self._computations else ()
            elif operation == "conditional":
                yield from self._largest_branch(instruction, times, here)
            else:
                yield from self._ran(computation, instruction, times, here)

    def _largest_branch(self, instruction: Instruction, times: float, part: str) -> Iterator[Ran]:
        """Walks through the branch that moves most bytes: in the update, the one that isn't stopped."""
        branches = [list(self._walk(name, times, part)) for name in instruction.called() if name in self._computations]
        yield from max(branches, key=lambda ran: sum(x.kernel.bytes * x.kernel.calls for x in ran), default=())

    def trips(self, loop: Instruction, condition: str) -> float:
        """Returns how often a loop runs: the constant in its condition, or the number of shards."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest)
        if known:
            return float(known[1])
        texts = [x.rest for x in self._computations[condition].instructions.values() if x.operation == "constant"]
        numbers = [int(found[1]) for text in texts if (found := re.match(r"(\d+)\)", text))]
        return float(max(numbers)) if numbers else float(self._shards)

    def _ran(self, where: Computation, instruction: Instruction, times: float, part: str) -> Iterator[Ran]:
        operation = instruction.operation.removesuffix("-start")
        if operation in COLLECTIVES:
            chain = re.search(r'chain_id="(\d+)"', instruction.rest)
            if chain is not None and chain[1] in self._chains:  # a TPU's compiler may spread one over fusions
                return
            self._chains |= {chain[1]} if chain else set()
            arrays = instruction.arrays
            if instruction.operation != operation != "all-reduce" and len(arrays) > 1:  # operands before results
                arrays = arrays[len(arrays) // 2 :]
            received = sum(WIDTHS.get(a.dtype, 4) * math.prod(a.shape) for a in arrays)
            yield Ran(part, Kernel(0.0, 0.0, times), operation, received)
            return
        inner = instruction.attribute("calls") if operation in ("fusion", "async") else None
        fused = self._computations.get(inner or "")
        if fused is not None:
            hidden = [x for x in fused.instructions.values() if x.operation.removesuffix("-start") in COLLECTIVES]
            for one in hidden:
                yield from self._ran(fused, one, times, part)
        flops, kind = self._flops(where, instruction, fused)
        size = self._traffic(where, instruction, fused)
        yield Ran(part, Kernel(flops, size, times, kind), None, 0.0)

    def _flops(self, where: Computation, instruction: Instruction, fused: Computation | None) -> tuple[float, str]:
        """Counts operations and returns their kind: products exactly, else one per element of the result."""
        computations = [(where, instruction)] if fused is None else [(fused, x) for x in fused.instructions.values()]
        products, kinds = 0.0, set[str]()
        for inside, one in computations:
            shapes = [inside.instructions[x].arrays[0].shape for x in one.operands if _has_array(inside, x)]
            out, before = one.arrays[0].shape if one.arrays else (), products
            if one.operation == "dot" and shapes:
                products += dot_flops(out, shapes[0], one.rest)
            elif one.operation == "convolution" and len(shapes) > 1:
                products += convolution_flops(ConvolutionShapes(shapes[0], shapes[1], out), one.rest)
            elif one.operation == "custom-call" and len(shapes) > 1:
                products += gemm_flops(ConvolutionShapes(shapes[0], shapes[1], out), one.rest)
            elif one.operation == "fusion" and (nested := self._computations.get(one.attribute("calls") or "")):
                flops, kind = self._flops(inside, one, nested)
                products += flops
                kinds.add(kind)
                continue
            if products > before:
                kinds.add("matmul" if _of_head(inside, [one]) else self._low)
        if products:
            return products, self._low if self._low in kinds else "matmul"
        return sum(_arithmetic(inside, one) for inside, one in computations), "vector"

    def _traffic(self, where: Computation, instruction: Instruction, fused: Computation | None) -> float:
        """Returns the bytes that a kernel reads and writes; of an operand that it only slices, those of the slice."""
        operands = [where.instructions.get(name) for name in instruction.operands]
        if instruction.operation in LOOK:
            return 2 * instruction.size
        if instruction.operation in ("dynamic-update-slice", "scatter") and len(operands) > 1:
            update = operands[-1 if instruction.operation == "scatter" else 1]
            return 2 * (update.size if update else 0.0)
        if fused is None:
            return instruction.size + sum(x.size for x in operands if x is not None)
        return _fused_reads(fused, operands) + _fused_writes(fused, instruction)


def _arithmetic(where: Computation, instruction: Instruction) -> float:
    """Counts one operation per element of the result, or for a sum one per element of its operand."""
    if instruction.operation in MOVING or not instruction.arrays:
        return 0.0
    if instruction.operation == "reduce" and _has_array(where, instruction.operands[0]):
        return float(math.prod(where.instructions[instruction.operands[0]].arrays[0].shape))
    return float(sum(math.prod(a.shape) for a in instruction.arrays))


def _of_head(where: Computation, near: list[Instruction], far: int = 3) -> bool:
    """Returns whether a product is a head's, by its name or, where a compiler has rewritten it, its neighbours'."""
    labels = [x.label for x in near if x.label]
    if labels or not far:
        return any(HEAD in re.split(r"[/()]", label) for label in labels)
    given = [where.instructions[name] for x in near for name in x.operands if name in where.instructions]
    return _of_head(where, [*given, *(user for x in near for user in where.users.get(x.name, []))], far - 1)


def _has_array(where: Computation, name: str) -> bool:
    found = where.instructions.get(name)
    return found is not None and bool(found.arrays)


def _part(label: str, otherwise: str) -> str:
    """Returns the innermost of the engine's own names in an operation's label, else ``otherwise``."""
    found = [name for name in re.split(r"[/()]", label) if name in PARTS]
    return found[-1] if found else otherwise


def _fused_reads(fused: Computation, operands: list[Instruction | None]) -> float:
    """Returns the bytes that a fusion reads from its operands."""
    parameters = [x for x in fused.instructions.values() if x.operation == "parameter"]
    order = sorted(parameters, key=lambda x: int(x.rest.partition(")")[0]))
    total = 0.0
    for parameter, operand in zip(order, operands, strict=False):
        if operand is None:
            continue
        users = fused.users.get(parameter.name, [])
        if users and all(x.operation in LOOK and x.operands[0] == parameter.name for x in users):
            total += 0.0 if operand.size == 0 else sum(_plain_size(x) for x in users)
        elif users and all(x.operation == "dynamic-update-slice" and x.operands[0] == parameter.name for x in users):
            continue  # written in place
        else:
            total += operand.size
    return total


def _fused_writes(fused: Computation, instruction: Instruction) -> float:
    """Returns the bytes that a fusion writes; for an array that it updates in place, those of the update."""
    root = fused.root
    if root is None:
        return instruction.size
    roots = (
        [fused.instructions[x] for x in root.operands if x in fused.instructions]
        if root.operation == "tuple"
        else [root]
    )
    total = 0.0
    for one, array in zip(roots, instruction.arrays, strict=False):
        while one.operation == "bitcast" and one.operands and one.operands[0] in fused.instructions:
            one = fused.instructions[one.operands[0]]
        update = fused.instructions.get(one.operands[1]) if one.operation == "dynamic-update-slice" else None
        total += array.bytes if update is None or not array.bytes else 2 * _plain_size(update)
    return total


def _plain_size(instruction: Instruction) -> float:
    """Returns the bytes of a result inside a fusion, where layouts don't say where it is stored."""
    return sum(WIDTHS.get(a.dtype, 4) * math.prod(a.shape) for a in instruction.arrays)


def collectives_of(ran: Mapping[str, list[Ran]] | list[Ran]) -> tuple[Collective, ...]:
    """Sums the collectives that ran, by kind, part and bytes."""
    found: dict[tuple[str, str, float], float] = {}
    for one in ran if isinstance(ran, list) else [x for part in ran.values() for x in part]:
        if one.collective is not None:
            key = one.collective, PURPOSES[one.part], one.received
            found[key] = found.get(key, 0.0) + one.kernel.calls
    return tuple(Collective(kind, part, count, size) for (kind, part, size), count in found.items())
