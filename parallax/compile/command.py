"""What `python -m parallax.aot` does once its flags are parsed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

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
    gpus = [job for job in jobs if job.target.chip.kind == "gpu"]
    if gpus and kernel_choice != "pallas":
        raise ValueError(f"for {gpus[0].target.name} only Pallas kernels are compiled, whole programs are for TPUs: "
                         "leave --kernels xla out")
    tasks = [(kernels.compiled, name, job) for job in (jobs if kernel else gpus)
             for name in dict.fromkeys(kernel or kernels.IN_A_STEP.values())]
    tasks += [] if kernel else [(programs.compiled, job) for job in jobs if job not in gpus]
    reports, steps = _compiled(tasks)
    console = Console() if sys.stdout.isatty() else Console(width=160)
    for table in page.tables(reports, steps):
        console.print(table)
    for line in page.notes(found, reports, steps):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    if output is not None:
        facts = {"model": model, "config": dataclasses.asdict(config), "batch": batch, "context": context,
                 "capacity": capacity, "depth": depth, "tensor": tensor, "versions": _versions(),
                 "chips": [dataclasses.asdict(where.chip) for where in found]}
        Path(output).write_text(json.dumps({**facts, "kernels": [r._asdict() for r in reports],
                                            "programs": [step._asdict() for step in steps]}, indent=1) + "\n")
    return int(any(found.reason for found in (*reports, *steps)))


def _compiled(tasks: Sequence[tuple]) -> tuple[list[kernels.Report], list[programs.Step]]:
    """(reports of kernels, of steps) of tasks (function, its arguments), in their order, two at a time."""
    idle = queue.SimpleQueue()

    def one(task: tuple) -> tuple[list[programs.Step], list[kernels.Report]]:
        worker, (function, *args) = idle.get(), task
        try:
            found = worker.run(*task)
            return ([], found) if function is kernels.compiled else ([found[0]], found[1])
        except BrokenProcessPool:
            why, job = "the compiler ended the process", args[-1]
            if function is kernels.compiled:
                return [], [kernels.Report(args[0], job.target.name, job.rows, why)]
            return [programs.Step(job.target.name, job.rows, why)], []
        finally:
            idle.put(worker)
            bar.update()

    with (workers.Worker() as first, workers.Worker() as second, ThreadPoolExecutor(2) as threads,
          tqdm(total=len(tasks), unit="program", disable=not sys.stderr.isatty(), leave=False) as bar):
        idle.put(first)
        idle.put(second)
        results = list(threads.map(one, tasks))
    return [report for _, found in results for report in found], [step for found, _ in results for step in found]


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
