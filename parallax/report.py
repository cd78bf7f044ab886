"""Runs as a table for people and as records for programs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from parallax.generate import Run


def table(runs: Iterable[Run], reference: Run | None = None) -> Any:
    """A rich table of runs over the same prompts. With a reference run: whether tokens are equal, and the speedup."""
    from rich.table import Table

    columns = ["method", "guarantee", "tokens", "forwards", "tokens/forward", "acceptance", "prefill s", "decode s",
               "ms/token", "compile s"]
    if reference is not None:
        columns += ["speedup", "tokens equal"]
    result = Table(*columns)
    for column in result.columns[2:]:
        column.justify = "right"
    for run in runs:
        cells = [run.method, run.guarantee, str(run.tokens), str(run.target_forwards), f"{run.tokens_per_forward:.2f}",
                 "-" if run.acceptance is None else f"{run.acceptance:.0%}", f"{run.prefill:.2f}", f"{run.decode:.2f}",
                 f"{1e3 * run.decode / run.tokens:.1f}", f"{run.compile:.1f}"]
        if reference is not None:
            cells += [f"{reference.decode / run.decode:.2f}x", equality(run, reference)]
        result.add_row(*cells)
    return result


def equality(run: Run, reference: Run) -> str:
    """`all 3`, or `2 of 3 (prompt 1 differs at token 17)`."""
    if run is reference:
        return "-"
    pairs = list(zip(run.completions, reference.completions))
    different = [(i, a.ids, b.ids) for i, (a, b) in enumerate(pairs) if a.ids != b.ids]
    if not different:
        return f"all {len(pairs)}" if len(pairs) > 1 else "yes"
    i, ours, theirs = different[0]
    at = next((k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return f"{len(pairs) - len(different)} of {len(pairs)} (prompt {i} differs at token {at})"


def records(run: Run, prompts: list[str], settings: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """One dict per completion, with all that is needed to make it again."""
    for prompt, completion in zip(prompts, run.completions):
        yield {"prompt": prompt, **dataclasses.asdict(completion), "method": run.method, "guarantee": run.guarantee,
               **settings}


def check_writable(path: str, overwrite: bool) -> pathlib.Path:
    """Raises ValueError, before any work, if `path` exists and may not be replaced or its folder is missing."""
    target = pathlib.Path(path)
    if target.exists() and not overwrite:
        raise ValueError(f"{path} exists: give another --output or add --overwrite")
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"{path} cannot be written: expected a file in an existing folder")
    return target


def write_atomically(path: pathlib.Path, text: str) -> None:
    """All of `text` or nothing: written beside the target and renamed."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
