"""What a program that XLA compiled for a TPU moves through HBM, what it copies, which kernels and collectives it runs.

`Compiled.cost_analysis` does not do: it counts a loop's body once, and a kernel's operands in full, though attention
reads only the live part of its cache.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from parallax.compile.chips import COLLECTIVES
from parallax.compile.hlo import Array, Instruction, Program, everywhere, is_kernel, kernel_name, trips

_MOVES_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
                  "replica-id", "copy-done", "slice-done", "call-done", "async-done", "optimization-barrier", "iota",
                  *(f"{name}-done" for name in COLLECTIVES)}
_SLICES = {"dynamic-slice", "slice", "gather"}
_REWRITES = ("copy", "copy-start", "transpose", "scatter", "select", "concatenate", "pad", "convert", "call-start")


class Kernel(NamedTuple):
    """vmem: bytes of it that a call takes; nbytes: of all its operands and results in HBM."""

    vmem: int
    nbytes: int


class Cost(NamedTuple):
    """Of one run of a program on one device.

    nbytes: through HBM, and seconds as `cost` was told, both without kernels and collectives; kernels: how often each
    runs, by name; collectives: how often each, by (name, bytes of its result).
    """

    nbytes: float = 0.0
    seconds: float = 0.0
    kernels: Counter = Counter()
    collectives: Counter = Counter()

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(self, other)))

    def times(self, count: int) -> "Cost":
        """Of so many runs."""
        return Cost(self.nbytes * count, self.seconds * count,
                    *(Counter({name: n * count for name, n in c.items()}) for c in (self.kernels, self.collectives)))


def cost(program: Program, seconds: Callable[[Instruction, float], float] = lambda instruction, nbytes: 0.0,
         computation: str | None = None) -> Cost:
    """Of a computation, the entry by default. Loops count as often as they run, branches as their dearest one.

    seconds: the time of an instruction that moves so many bytes.
    """
    total = Cost()
    inside = program.computations[computation or program.entry]
    for instruction in inside.values():
        called = partial(cost, program, seconds)
        if instruction.op == "while":
            total += called(instruction.called("body")[0]).times(trips(program, instruction))
        elif instruction.op == "conditional":
            branches = instruction.called("branch_computations") or [
                name for side in ("true", "false") for name in instruction.called(f"{side}_computation")]
            total += max(map(called, branches), key=lambda c: (c.seconds, c.nbytes))
        elif instruction.op == "call":
            total += called(instruction.called("to_apply")[0])
        elif is_kernel(instruction):
            total += Cost(kernels=Counter({kernel_name(instruction): 1}))
        elif (collective := instruction.op.removesuffix("-start")) in COLLECTIVES:
            total += Cost(collectives=Counter({(collective, instruction.results[0].nbytes): 1}))
        elif not _moves_nothing(instruction):
            nbytes = _traffic(program, inside, instruction)
            total += Cost(nbytes, seconds(instruction, nbytes))
    return total


def kernels(program: Program) -> dict[str, Kernel]:
    """The kernels of a program, by name."""
    return {kernel_name(instruction): Kernel(
        max(map(int, re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', instruction.rest)), default=0),
        sum(array.nbytes for name in instruction.operands if name in inside
            for array in inside[name].results[:1] if array.hbm)
        + sum(array.nbytes for array in instruction.results if array.hbm))
        for inside in program.computations.values() for instruction in inside.values() if is_kernel(instruction)}


def rewritten(program: Program, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """Instructions that make an array of one of the shapes anew in HBM, its dimensions in any order.

    An update in place is none of them, nor is a kernel.
    """
    wanted = {_key(shape) for shape in shapes}
    return [instruction.name for instruction in _outside_fusions(program)
            if any(array.hbm and _key(array.dims) in wanted for array in instruction.results[:1])
            and (instruction.op in _REWRITES or instruction.op == "fusion" and not _in_place(program, instruction))]


def gathered(program: Program, shapes: Iterable[tuple[int, ...]]) -> list[str]:
    """All-gathers whose result has one of the shapes, its dimensions in any order."""
    wanted = {_key(shape) for shape in shapes}
    return [instruction.name for instruction in everywhere(program)
            if instruction.op in ("all-gather", "all-gather-start")
            and any(_key(array.dims) in wanted for array in instruction.results)]


def _key(dims):
    return tuple(sorted(size for size in dims if size != 1))


def _outside_fusions(program) -> Iterator[Instruction]:
    fused = {name for instruction in everywhere(program) if instruction.op == "fusion"
             for name in instruction.called("calls")}
    return (instruction for name, inside in program.computations.items() if name not in fused
            for instruction in inside.values())


def _moves_nothing(instruction) -> bool:
    return instruction.op in _MOVES_NOTHING or 'custom_call_target="AllocateBuffer"' in instruction.rest


def _traffic(program, inside, instruction) -> float:
    """Bytes through HBM."""
    op, results = instruction.op, instruction.results
    operands = [inside[name].results for name in instruction.operands if name in inside]
    if op == "copy-start":                                               # its results: destination, source, a token
        return sum(array.nbytes for array in results[:2] if array.hbm)
    if op == "slice-start":                                              # its results: sources, destination, a token
        return results[-2].nbytes * (1 + results[-2].hbm)
    if op == "call-start":                                               # of a SparseCore, which lays arrays out anew
        return 2 * results[-1].nbytes
    if op == "fusion":
        called = instruction.called("calls")[0]
        read = sum(_read(program, called, i, arrays[0]) for i, arrays in enumerate(operands) if arrays[0].hbm)
        return read + sum(array.nbytes for array in _written(program, called) or results if array.hbm)
    if op in _SLICES:
        return results[0].nbytes * (operands[0][0].hbm + results[0].hbm)
    if op == "dynamic-update-slice":
        return 2 * operands[1][0].nbytes * results[0].hbm
    return sum(array.nbytes for arrays in (*operands, results) for array in arrays if array.hbm)


def _read(program, computation, index, whole: Array) -> float:
    """Bytes that a fused computation reads of its parameter: what it slices, or all of it."""
    total, handed_on = _uses(program, computation, index, whole)
    return min(whole.nbytes if handed_on else total, whole.nbytes)


def _uses(program, computation, index, whole) -> tuple[float, bool]:
    """(bytes read of the parameter, whether the result is the parameter itself, only seen in another shape)."""
    inside = program.computations[computation]
    names = {i.name for i in inside.values() if i.op == "parameter" and i.rest.startswith(f"{index})")}
    total = 0.0
    for instruction in inside.values():
        taken = [i for i, name in enumerate(instruction.operands) if name in names]
        if not taken or instruction.op == "dynamic-update-slice" and taken == [0]:
            continue
        if instruction.op in ("bitcast", "copy"):          # inside a fusion a copy is only another layout
            names.add(instruction.name)
        elif instruction.op in _SLICES and taken == [0]:
            total += instruction.results[0].nbytes
        elif instruction.op == "fusion":
            for i in taken:
                part, handed_on = _uses(program, instruction.called("calls")[0], i, whole)
                total += part
                names |= {instruction.name} if handed_on else set()
        else:
            total += whole.nbytes
    return total, program.roots[computation] in names


def _written(program, computation) -> list[Array] | None:
    """What a fused computation writes if it updates its operands in place: the updates. None if it does not."""
    inside = program.computations[computation]

    def followed(name):
        while inside[name].op == "bitcast":
            name = inside[name].operands[0]
        return inside[name]

    root = followed(program.roots[computation])
    parts = [followed(name) for name in root.operands] if root.op == "tuple" else [root]
    written = []
    for part in parts:
        if part.op == "dynamic-update-slice":
            # Inside a fusion nothing has a place: the update goes where the updated array is.
            written.append(inside[part.operands[1]].results[0]._replace(hbm=part.results[0].hbm))
        elif part.op == "fusion" and (nested := _written(program, part.called("calls")[0])):
            written += nested
        else:
            return None
    return written


def _in_place(program, instruction) -> bool:
    return _written(program, instruction.called("calls")[0]) is not None
