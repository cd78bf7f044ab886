"""Reads the text of a program that XLA compiled for a TPU.

In it an array in HBM has no `S(n)` in its layout; S(1) is VMEM.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32,
         "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64}
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")


class Array(NamedTuple):
    """dims: as written; nbytes: as it lies in memory, tiles filled up; hbm: whether it is there."""

    dims: tuple[int, ...]
    nbytes: int
    hbm: bool


class Instruction(NamedTuple):
    """An instruction: its results (several if it is a tuple), the names of its operands, the rest of its line."""

    name: str
    results: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    rest: str

    def called(self, attribute: str) -> list[str]:
        """Computations that `attribute` names."""
        found = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|%([\w.<>-]+))", self.rest)
        return re.findall(r"%?([\w.<>-]+)", found[1] or found[2]) if found else []


class Program(NamedTuple):
    """Computations by name, the entry's name, and for each the root instruction's name."""

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str
    roots: Mapping[str, str]


def parse(text: str) -> Program:
    """`Compiled.as_text()`."""
    computations, roots, entry, current = {}, {}, "", None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%([\w.<>-]+) \(.*\{$", line)
        if header:
            current = computations[header[2]] = {}
            name = header[2]
            entry = name if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            instruction = _instruction(line)
            current[instruction.name] = instruction
            if line.lstrip().startswith("ROOT"):
                roots[name] = instruction.name
    return Program(computations, entry, roots)


def iterations(instruction: Instruction) -> int:
    """How often the loop of an operation runs that takes its operands piece by piece."""
    found = re.search(r'"iteration_bounds":\[([^\]]*)\]', instruction.rest)
    return math.prod(map(int, re.findall(r"\d+", found[1]))) if found else 1


def trips(program: Program, loop: Instruction) -> int:
    """How often the body of a `while` runs: the constant its counter is compared with, 1 if there is none."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
    if known:
        return int(known[1])
    condition = loop.called("condition")[0]
    root = program.computations[condition][program.roots[condition]]
    for name in root.operands:
        operand = program.computations[condition][name]
        if root.op == "compare" and operand.op == "constant":
            return max(int(re.match(r"\s*(-?\d+)", operand.rest)[1]), 1)
    return 1


def kernel_name(instruction: Instruction) -> str:
    """`attention` for `attention.3`."""
    return re.sub(r"(\.\d+|\.clone)+$", "", instruction.name)


def is_kernel(instruction: Instruction) -> bool:
    return instruction.op == "custom-call" and 'custom_call_target="tpu_custom_call"' in instruction.rest


def everywhere(program: Program) -> Iterator[Instruction]:
    """All instructions, those inside fusions too."""
    return (instruction for inside in program.computations.values() for instruction in inside.values())


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    op, _, rest = rest.partition("(")
    end = _closing("(" + rest, 0) - 1
    operands = tuple(re.findall(r"%([\w.<>-]+)", rest[:end]))
    return Instruction(name.lstrip("%"), tuple(map(_array, _ARRAY.finditer(kind))), op, operands, rest)


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _array(match: re.Match) -> Array:
    dims = tuple(map(int, filter(None, match[2].split(","))))
    layout = match[3] or ""
    order, _, tiles = layout.partition(":")
    minor_first = [int(axis) for axis in order.split(",") if axis] or list(range(len(dims)))[::-1]
    padded = [dims[axis] for axis in minor_first]
    tile = re.search(r"T\(([\d,]+)\)", tiles)
    for i, size in enumerate(reversed(list(map(int, tile[1].split(","))) if tile else [])):
        if i < len(padded):
            padded[i] = -(-padded[i] // size) * size
    return Array(dims, math.prod(padded) * _BITS.get(match[1], 32) // 8, not re.search(r"S\([1-9]\d*\)", tiles))
