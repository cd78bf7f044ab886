"""Reads libtpu's dumps of a Pallas kernel: its grid, and the static schedule of one grid step.

A TPU core issues one bundle of instructions per cycle, so without stalls the number of bundles is the number of cycles.
The grid is the outer loop of the schedule, each `pl.when` of the kernel a region that a branch skips. What runs in
every step, the regions aside, is Pallas' bookkeeping: index maps, and starting and awaiting copies.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*((?:>\s*)*)(.*)$")
_BRANCH = re.compile(r"sbr\.rel \(!?%p\w+\) target = \$region(\d+)")
_DELAY = 4              # bundles behind a branch that run whether it is taken or not
_DYNAMIC = -2**63       # how a grid says that an axis is as long as an argument says


class Region(NamedTuple):
    """Bundles that a `pl.when` takes, and whether its loops all say how often they run; one that does not counts
    once."""

    bundles: int
    certain: bool


class Schedule(NamedTuple):
    """Of one kernel.

    Attributes:
      grid: steps along each axis, None where an argument decides.
      windows: shape of the block of each operand and result that a step holds.
      bundles: of the whole kernel, loops counted once.
      bookkeeping: of every grid step, whatever it does.
      regions: the `pl.when`s of a step, longest first.
      step: bundles of a step that does what most do: the bookkeeping and the longest certain region.
      certain: whether all loops in it say how often they run, else it is at least so many.
      used: for each unit the share of its slots in those bundles that are taken; `spills`: loads and stores of
        registers that did not suffice, in the same bundles.
    """

    grid: tuple[int | None, ...]
    windows: tuple[tuple[int, ...], ...]
    bundles: int
    bookkeeping: int
    regions: tuple[Region, ...]
    step: int
    certain: bool
    used: dict[str, float]
    spills: int


class _Bundle(NamedTuple):
    label: str | None
    depth: int
    text: str


def read(folder: Path, name: str) -> Schedule | None:
    """The schedule of the kernel called `name` in `pallas_call`, from a folder that holds dumps of one program.

    None if there is none, as with a libtpu that dumps otherwise.
    """
    pattern = rf"(\d+-{re.escape(name)}(?:\.\d+)?)-\d+-"
    files = {match[1]: path for path in sorted(folder.iterdir())
             if (match := re.match(pattern + r"final_bundles\.txt", path.name))}
    used = {match[1]: path for path in folder.iterdir()
            if (match := re.match(pattern + r"final_hlo-static-per-bundle-utilization\.txt", path.name))}
    dumps = [path.read_text() for path in sorted(folder.glob("*mosaic-dump*deserialization*"))]
    modules = [text for text in dumps if f"func.func @{name}(" in text]
    common = sorted(files.keys() & used.keys())
    if not common or not modules:
        return None
    return analyse(files[common[0]].read_text(), used[common[0]].read_text(), modules[0])


def lengths(folder: Path) -> dict[str, int]:
    """Bundles of every operation of a program, by its name there."""
    found = {}
    for path in folder.glob("*-final_bundles.txt"):
        match = re.match(r"\d+-(.+)-\d+-final_bundles\.txt", path.name)
        if match:                                                      # and not the analysis of them
            found[match[1]] = sum(bool(_BUNDLE.match(line)) for line in path.read_text().splitlines())
    return found


@contextlib.contextmanager
def emptied(dump: str) -> Iterator[Path]:
    """The folder of the dumps, empty at first and in the end."""
    folder = Path(dump)

    def empty():
        for file in folder.iterdir():
            file.unlink()

    empty()
    try:
        yield folder
    finally:
        empty()


def analyse(bundles_text: str, utilization: str, module: str) -> Schedule:
    """From the text of `final_bundles`, of `static-per-bundle-utilization`, and of the kernel's Mosaic module."""
    bundles = _bundles(bundles_text)
    units, capacity, rows = _utilization(utilization)
    loops, regions = _loops(bundles), _regions(bundles)
    start, end = next(((a, b) for a, b, depth in loops if depth == 1), (0, len(bundles)))
    inner = [(a, b) for a, b, depth in loops if depth > 1]
    trips = _trips(module)
    if len(trips) != len(inner):                      # the compiler changed them
        trips = [None] * len(inner)
    runs = [1] * len(bundles)                         # of each bundle in a step
    for (first, last), count in zip(inner, trips):
        for i in range(first, last):
            runs[i] *= count or 1
    inside = [(a, b) for a, b in regions if start <= a and b <= end]
    # The longest of all is Pallas' own test whether the step is in the grid: everything else is in it.
    whole = max(inside, key=lambda r: r[1] - r[0], default=(start, end))
    whens = [r for r in inside if r != whole and whole[0] <= r[0] and r[1] <= whole[1]]
    whens = [r for r in whens if not any(o != r and o[0] <= r[0] and r[1] <= o[1] for o in whens)]
    found = {(a, b): Region(sum(runs[a:b]), all(count is not None for (first, last), count in zip(inner, trips)
                                                if a - _DELAY <= first and last <= b + 1)) for a, b in whens}
    chosen = max(found, key=lambda r: (found[r].certain, found[r].bundles), default=None)
    skipped = set().union(*(range(*r) for r in whens if r != chosen))
    counted = [i for i in range(start, end) if i not in skipped]
    step = sum(runs[i] for i in counted)
    certain = all(count is not None for (first, _), count in zip(inner, trips) if first in counted)
    totals = {unit: sum(runs[i] * rows[i][column] for i in counted) for column, unit in enumerate(units)}
    return Schedule(
        _grid(module), _windows(module), len(bundles), step - (found[chosen].bundles if chosen else 0),
        tuple(sorted(found.values(), reverse=True)), step, certain,
        {unit: totals[unit] / (size * step) for unit, size in zip(units, capacity) if ":" not in unit},
        sum(count for unit, count in totals.items() if ":" in unit))


def _bundles(text: str) -> list[_Bundle]:
    found: list[_Bundle] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            found.append(_Bundle(match[2], match[3].count(">"), match[4]))
        elif found:                                                    # goes on
            found[-1] = found[-1]._replace(text=found[-1].text + "\n" + line)
    return found


def _utilization(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    """(units, slots of each per bundle, slots taken in each bundle)."""
    head, _, body = text.partition("== UTILIZATION:")
    names, capacity = (line for line in head.splitlines() if line.strip() and not line.startswith("=="))
    rows = [[int(cell) for cell in line.split()] for line in body.splitlines() if line.strip()]
    return [name.strip() for name in names.split(",")], [int(cell) for cell in capacity.split()], rows


def _loops(bundles: Sequence[_Bundle]) -> list[tuple[int, int, int]]:
    """(first, one past the last, depth) of every loop body."""
    found = []
    for start, (label, depth, _) in enumerate(bundles):
        if label == "LB":
            end = start
            for i in range(start, len(bundles)):
                if i > start and bundles[i].label == "LB" and bundles[i].depth <= depth:
                    break
                if bundles[i].depth >= depth:
                    end = i
                elif not bundles[i].text.strip().startswith("{}"):
                    break
            found.append((start, end + 1, depth))
    return found


def _regions(bundles: Sequence[_Bundle]) -> list[tuple[int, int]]:
    """(first, one past the last) of the bundles that a branch skips."""
    ends = {number: i for i in range(len(bundles) - 1, -1, -1) if bundles[i].label == "PF"
            for number in re.findall(r"region (\d+)\b", bundles[i].text)}
    return [(start + 1 + _DELAY, ends[target]) for start, bundle in enumerate(bundles)
            for target in _BRANCH.findall(bundle.text) if ends.get(target, 0) > start + 1 + _DELAY]


def _grid(module: str) -> tuple[int | None, ...]:
    found = re.search(r"iteration_bounds = array<i64(?:: ([^>]*))?>", module)
    sizes = [int(size) for size in found[1].split(",")] if found and found[1] else []
    return tuple(None if size == _DYNAMIC else size for size in sizes)


def _windows(module: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in bounds.split(","))
                 for bounds in re.findall(r"window_bounds = array<i64: ([^>]*)>", module))


def _trips(module: str) -> list[int | None]:
    """How often each loop runs, in the order of the text; None where that is not a constant."""
    values: dict[str, int] = {}
    found: list[int | None] = []
    for line in module.splitlines():
        if match := re.search(r"(%\w+) = arith\.constant (-?\d+) : (?:i32|index)", line):
            values[match[1]] = int(match[2])
        elif match := re.search(r"(%\w+) = arith\.(addi|subi|muli) (%\w+), (%\w+) : (?:i32|index)", line):
            sides = [values.get(name) for name in match.groups()[2:]]
            if None not in sides:
                values[match[1]] = {"addi": int.__add__, "subi": int.__sub__, "muli": int.__mul__}[match[2]](*sides)
            else:
                values.pop(match[1], None)
        elif match := re.search(r"scf\.for %\w+ = (%\w+) to (%\w+) step (%\w+)", line):
            low, high, by = (values.get(name) for name in match.groups())
            found.append(None if None in (low, high, by) else max(-((low - high) // by), 0))
    return found
