"""Runs as a table for people and as records for programs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from parallax.generate import Run


def table(runs: Sequence[Run], reference: Run | None = None) -> Any:
    """A rich table, one column per run over the same prompts. With a reference run: equality of tokens, and speedup."""
    from rich.table import Table

    rows = {
        "guarantee": lambda r: r.guarantee,
        "tokens": lambda r: str(r.tokens),
        "target forwards": lambda r: str(r.target_forwards),
        "tokens per forward": lambda r: f"{r.tokens_per_forward:.2f}",
        "acceptance": lambda r: "-" if r.acceptance is None else f"{r.acceptance:.0%}",
        "prefill": lambda r: f"{r.prefill:.2f} s",
        "decode": lambda r: f"{r.decode:.2f} s",
        "ms per token": lambda r: f"{1e3 * r.decode / r.tokens:.1f}",
        "compile": lambda r: f"{r.compile:.1f} s",
    }
    if reference is not None:
        rows["speedup (decode)"] = lambda r: f"{reference.decode / r.decode:.2f}x"
        rows["tokens equal"] = lambda r: equality(r, reference)
    result = Table("", *(run.method for run in runs))
    for column in result.columns[1:]:
        column.justify = "right"
    for name, cell in rows.items():
        result.add_row(name, *(cell(run) for run in runs))
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
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")      # lone surrogates, as JSON has them
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
