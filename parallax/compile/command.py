"""What `python -m parallax.aot` does once its flags are parsed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

import parallax
from parallax.compile import kernels, page, programs, shapes, targets, workers
from parallax.compile.jobs import Job
from parallax.models.config import nearest


def aot(*, model: str, target: Sequence[str], kernel: Sequence[str], rows: Sequence[int], tensor: int, batch: int,
        context: int, capacity: int | None, depth: int, dtype: str, kernel_choice: str, output: str | None,
        overwrite: bool) -> int:
    """Compiles, prints tables, perhaps writes JSON.

    Args:
      model: preset, shipped model or folder, see `shapes.resolve`.
      target: names for `targets.resolve`.
      kernel: kernels to compile alone, of `kernels.CASES`; none means the whole step and the kernels in it.
      rows: block sizes T; programs are also compiled for 1, to compare with.
      tensor: devices that share the model.
      batch, context, capacity, depth: see `Job`; capacity None is twice the context.
      kernel_choice: `pallas` or `xla`, which has no kernels of its own.
      output: a .json file for all figures; `overwrite`: whether it may exist.

    Returns:
      0, or 1 if something does not compile.

    Raises:
      ValueError: settings that do not fit each other, or a compiler that is not installed; before compiling.
    """
    _check(kernel, rows, kernel_choice, output, overwrite)
    found = [targets.resolve(name, tensor) for name in dict.fromkeys(target)]
    config = shapes.resolve(model).replace(dtype=dtype, kernels=kernel_choice)
    capacity = 2 * context if capacity is None else capacity
    sizes = sorted({1, *rows} if not kernel else set(rows))
    jobs = [Job(config=config, target=where, rows=size, batch=batch, context=context, capacity=capacity, depth=depth)
            for where in found for size in sizes]
    for where in found:
        targets.check_installed(where)
    names = list(dict.fromkeys(kernel)) or (list(kernels.OF_A_STEP) if kernel_choice == "pallas" else [])
    alone = [(name, job) for job in jobs for name in names]
    whole = [] if kernel else [job for job in jobs if job.target.chip.kind == "tpu"]
    if not alone and not whole:
        raise ValueError(f"nothing to compile for {found[0].name} without Pallas kernels: whole programs are compiled "
                         "for TPUs, leave --kernels xla out")
    reports, steps = _compiled(alone, whole)
    lines = [page.step(job, program, [r for r in reports if r.target == job.target.name and r.rows == job.rows])
             for job, program in zip(whole, steps)]
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for table in page.tables(reports, lines):
        console.print(table)
    for line in page.notes(found, reports, lines):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if output is not None:
        facts = {"model": model, "config": dataclasses.asdict(config), "batch": batch, "context": context,
                 "capacity": capacity, "depth": depth, "tensor": tensor, "versions": _versions(),
                 "chips": [dataclasses.asdict(where.chip) for where in found]}
        Path(output).write_text(json.dumps({**facts, "kernels": [r._asdict() for r in reports], "programs": lines},
                                           indent=1) + "\n")
    return int(any(r.reason for r in reports) or any(line["reason"] for line in lines))


def _compiled(alone: Sequence[tuple[str, Job]], whole: Sequence[Job]
              ) -> tuple[list[kernels.Report], list[programs.Program]]:
    """(reports of kernels, programs), compiled side by side in two processes."""
    bar = tqdm(total=len(alone) + len(whole), unit="program", disable=not sys.stderr.isatty(), leave=False)

    def one(worker: workers.Worker, function: Callable, *args: Any, died: Callable[[str], Any]) -> Any:
        try:
            return worker.run(function, *args)
        except BrokenProcessPool:
            return died("the compiler ended the process")
        finally:
            bar.update()

    with (workers.Worker(dumps=True) as dumping, workers.Worker() as plain, ThreadPoolExecutor(2) as threads, bar):
        reports = threads.submit(lambda: [
            report for name, job in alone
            for report in one(dumping, kernels.compiled, name, job, died=lambda why, name=name, job=job: [
                kernels.Report(name, job.target.name, job.rows, why)])])
        steps = threads.submit(lambda: [one(plain, programs.compiled, job, died=programs.Program) for job in whole])
        return reports.result(), steps.result()


def _check(kernel: Sequence[str], rows: Sequence[int], choice: str, output: str | None, overwrite: bool) -> None:
    for name in kernel:
        if name not in kernels.CASES:
            raise ValueError(f"unknown kernel {name!r}: expected one of {', '.join(kernels.CASES)}"
                             f"{nearest(name, kernels.CASES)}")
    if kernel and choice != "pallas":
        raise ValueError(f"--kernel compiles a Pallas kernel: leave --kernels {choice} out")
    if not rows or min(rows) < 1:
        raise ValueError(f"--rows must be block sizes from 1 up, got {','.join(map(str, rows)) or 'none'}")
    if output is None:
        return
    path = Path(output)
    if path.exists() and not overwrite:
        raise ValueError(f"{output} exists: give another --json or add --overwrite")
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{output} cannot be written: expected a file in an existing folder")


def _versions() -> dict[str, str]:
    versions = {"parallax": parallax.__version__}
    for name in ("jax", "jaxlib", "libtpu", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return versions
