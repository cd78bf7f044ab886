"""The tables of `python -m parallax.aot`, and the sentences that say what is in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from parallax.compile.chips import CHIPS
from parallax.compile.kernels import Report
from parallax.compile.programs import Step
from parallax.compile.targets import Target


def tables(reports: Sequence[Report], steps: Sequence[Step]) -> list[Table]:
    """One of kernels and one of programs for each target; none where there is nothing."""
    names = list(dict.fromkeys([r.target for r in reports] + [line.target for line in steps]))
    found = []
    for name in names:
        of_kernels = [r for r in reports if r.target == name]
        of_steps = [line for line in steps if line.target == name]
        found += [_kernels(name, of_kernels)] if of_kernels else []
        found += [_steps(name, of_steps)] if of_steps else []
    return found


def notes(wanted: Sequence[Target], reports: Sequence[Report], steps: Sequence[Step]) -> list[str]:
    """What failed, what a program should not do and does, and what the columns mean."""
    lines = [f"{r.target}, {r.kernel}, T={r.rows}: {r.reason}" for r in reports if r.reason]
    for step in steps:
        where = f"{step.target}, T={step.rows}"
        if step.reason:
            lines.append(f"{where}: {step.reason}")
        for what, found in (("copies of the whole cache", step.cache_copies),
                            ("copies of a weight", step.weight_copies),
                            ("gathers of a weight that devices share", step.weight_gathers)):
            if found:
                lines.append(f"{where}: {what} in each step: {', '.join(found)}")
    tpu = any(target.chip.kind == "tpu" for target in wanted)
    if reports:
        lines.append("Kernels: `least` is the larger of the bytes over the HBM's bandwidth and the operations over the "
                     "matrix units', one call on one device." + (
                         " `schedule` is bundles per step times steps, without stalls; `-`: this libtpu does not say."
                         if tpu else ""))
    if steps:
        lines.append("Programs: `least` reads weights and live cache once. `accessed` is from the program's text, "
                     "kernels by what they have to move. `predicted` takes each operation by itself: its bytes at the "
                     "HBM's bandwidth or its schedule, whichever is longer, without stalls; and the collectives "
                     "(`wire`) at 1 us per hop and the links' bandwidth.")
    return lines


def _kernels(name: str, reports: Sequence[Report]) -> Table:
    gpu = name in CHIPS and CHIPS[name].kind == "gpu"
    head = ("shared", "registers", "spills", "blocks") if gpu else (
        "VMEM", "steps", "bundles", *_UNITS, "spills")
    table = _table(f"Kernels on {escape(name)}", "kernel", "T", *head, "MB", "GFLOP", "least us", "by",
                   *(() if gpu else ("schedule us", "ratio")))
    for r in reports:
        if r.reason:
            table.add_row(r.kernel, str(r.rows), "does not compile")
            continue
        if gpu:
            cells = [_kib(r.memory), str(r.registers), str(r.spills), str(r.grid)]
        elif r.scheduled is None:
            cells = [_kib(r.memory), *"-" * (len(head) - 1)]
        else:
            cells = [_kib(r.memory), str(r.grid), str(r.bundles), *(f"{r.used.get(unit, 0):.0%}" for unit in _UNITS),
                     str(r.spills)]
        cells += [f"{r.nbytes / 1e6:.2f}", f"{r.flops / 1e9:.2f}", f"{r.least * 1e6:.2f}", r.by]
        if r.scheduled is not None:
            cells += [f"{'' if r.certain else '>= '}{r.scheduled * 1e6:.2f}", f"{r.scheduled / r.least:.2f}"]
        table.add_row(r.kernel, str(r.rows), *cells)
    return table


_UNITS = ("MXU", "XLU", "VALU", "EUP", "VLOAD")


def _steps(name: str, steps: Sequence[Step]) -> Table:
    table = _table(f"Decode step on {escape(name)}, per device", "T", "fits", "arguments GB", "temporary MB",
                   "accessed GB", "least GB", "ratio", "least ms", "by", "predicted ms", "T(n) / T(1)", "wire ms")
    first = next((step.predicted for step in steps if step.rows == 1 and not step.reason), math.nan)
    for step in steps:
        if step.reason:
            table.add_row(str(step.rows), "no")
            continue
        table.add_row(str(step.rows), "yes", f"{step.arguments / 1e9:.2f}", f"{step.temporary / 1e6:.1f}",
                      f"{step.accessed / 1e9:.3f}", f"{step.least_bytes / 1e9:.3f}",
                      f"{step.accessed / step.least_bytes:.3f}", f"{step.least * 1e3:.3f}", step.by,
                      f"{step.predicted * 1e3:.3f}", f"{step.predicted / first:.2f}", f"{step.wire * 1e3:.3f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _kib(size: int) -> str:
    return f"{size / 1024:.0f} KiB"
