"""The tables of `python -m parallax.aot`, and the sentences that say what is in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from parallax.compile import chips, programs
from parallax.compile.jobs import Job
from parallax.compile.kernels import OF_A_STEP, Report
from parallax.compile.targets import Target


def step(job: Job, program: programs.Program, reports: Sequence[Report]) -> dict[str, Any]:
    """All figures of a program, with those of its kernels."""
    head = {"target": job.target.name, "rows": job.rows, "reason": program.reason}
    if program.reason is not None:
        return head
    costs = {OF_A_STEP[r.kernel]: programs.KernelCost(r.nbytes, max(r.scheduled or 0.0, r.least))
             for r in reports if r.kernel in OF_A_STEP and not r.reason}
    least = chips.bound(job.target.chip, program.weights + program.live, program.flops)
    return {**head, "arguments": program.arguments, "temporary": program.temporary,
            "memory": job.target.chip.hbm_gb / job.target.chip.devices, "weights": program.weights,
            "live_cache": program.live, "accessed": programs.accessed(program, costs),
            "least_bytes": program.weights + program.live, "flops": program.flops, "least_seconds": least.seconds,
            "bound": least.by, "predicted_seconds": programs.predicted(job, program, costs),
            "kernels": dict(program.cost.kernels), "collectives": sum(program.cost.collectives.values()),
            "cache_copies": program.cache_copies, "weight_gathers": program.weight_gathers}


def tables(reports: Sequence[Report], steps: Sequence[dict[str, Any]]) -> list[Table]:
    """One of kernels and one of programs for each target; none where there is nothing."""
    names = list(dict.fromkeys([r.target for r in reports] + [line["target"] for line in steps]))
    found = []
    for name in names:
        of_kernels = [r for r in reports if r.target == name]
        of_steps = [line for line in steps if line["target"] == name]
        found += [_kernels(name, of_kernels)] if of_kernels else []
        found += [_steps(name, of_steps)] if of_steps else []
    return found


def notes(found: Sequence[Target], reports: Sequence[Report], steps: Sequence[dict[str, Any]]) -> list[str]:
    """What failed, what a program should not do and does, and what the columns mean."""
    lines = [f"{r.target}, {r.kernel}, T={r.rows}: {r.reason}" for r in reports if r.reason]
    for line in steps:
        where = f"{line['target']}, T={line['rows']}"
        if line["reason"]:
            lines.append(f"{where}: {line['reason']}")
            continue
        if line["cache_copies"]:
            lines.append(f"{where}: {len(line['cache_copies'])} copies of the whole cache per step")
        if line["weight_gathers"]:
            lines.append(f"{where}: {len(line['weight_gathers'])} gathers of a weight that the devices share")
    tpu = any(target.chip.kind == "tpu" for target in found)
    if reports:
        lines.append("Kernels: `least` is the larger of the bytes over the HBM's bandwidth and the operations over the "
                     "matrix units', one call on one device." + (
                         " `schedule` is bundles per step times steps, without stalls." if tpu else ""))
    if steps:
        lines.append("Programs: `least` reads weights and live cache once. `accessed` is from the program's text, "
                     "kernels by what they must move. `predicted` adds XLA's estimates, the kernels' schedules and the "
                     "collectives (1 us per hop and the links' bandwidth).")
    return lines


def _kernels(name: str, reports: Sequence[Report]) -> Table:
    gpu = reports[0].registers is not None or any(r.bundles is None and not r.reason for r in reports)
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
        else:
            cells = [_kib(r.memory), str(r.grid), str(r.bundles), *(f"{r.used.get(unit, 0):.0%}" for unit in _UNITS),
                     str(r.spills)]
        table.add_row(r.kernel, str(r.rows), *cells, f"{r.nbytes / 1e6:.2f}", f"{r.flops / 1e9:.2f}",
                      f"{r.least * 1e6:.2f}", r.by,
                      *(() if gpu else (f"{r.scheduled * 1e6:.2f}", f"{r.scheduled / r.least:.2f}")))
    return table


_UNITS = ("MXU", "XLU", "VALU", "EUP", "VLOAD")


def _steps(name: str, steps: Sequence[dict[str, Any]]) -> Table:
    table = _table(f"Decode step on {escape(name)}, per device", "T", "fits", "arguments GB", "temporary MB",
                   "accessed GB", "least GB", "ratio", "least ms", "by", "predicted ms", "T(n) / T(1)")
    first = next((line["predicted_seconds"] for line in steps if line["rows"] == 1 and not line["reason"]), math.nan)
    for line in steps:
        if line["reason"]:
            table.add_row(str(line["rows"]), "no")
            continue
        used, least = line["accessed"], line["least_bytes"]
        table.add_row(str(line["rows"]), "yes", f"{line['arguments'] / 1e9:.2f}", f"{line['temporary'] / 1e6:.1f}",
                      f"{used / 1e9:.3f}", f"{least / 1e9:.3f}", f"{used / least:.3f}",
                      f"{line['least_seconds'] * 1e3:.3f}", line["bound"],
                      f"{line['predicted_seconds'] * 1e3:.3f}", f"{line['predicted_seconds'] / first:.2f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _kib(size: int) -> str:
    return f"{size / 1024:.0f} KiB"
