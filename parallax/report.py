"""Runs as a table for people and as records for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from parallax.generate import Completion, Run


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
        "ms per token": lambda r: f"{1e3 * r.decode / r.tokens:.{1 if r.decode / r.tokens >= 1e-3 else 2}f}",
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
    """`all 3`, or `2 of 3 (prompt 1 differs at token 17)`; `law` for a method that keeps no more than that."""
    if run is reference:
        return "-"
    if run.guarantee == "distribution":
        return "law"
    pairs = list(zip(run.completions, reference.completions))
    different = [(i, a.ids, b.ids) for i, (a, b) in enumerate(pairs) if a.ids != b.ids]
    if not different:
        return f"all {len(pairs)}" if len(pairs) > 1 else "yes"
    i, ours, theirs = different[0]
    at = next((k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    return f"{len(pairs) - len(different)} of {len(pairs)} (prompt {i} differs at token {at})"


def record(prompt: str, completion: Completion, settings: dict[str, Any]) -> dict[str, Any]:
    """A completion with all that is needed to make it again."""
    return {"prompt": prompt, **dataclasses.asdict(completion), **settings}


class JsonLines:
    """A .jsonl file that grows beside its place and takes it when it is whole, so a long run loses nothing.

    Use as a context manager. If the work fails, the rows so far stay in `PATH.partial`, and the error says so; what
    was at PATH stays as it was. Raises ValueError, before any work, if PATH exists and may not be replaced.
    """

    def __init__(self, path: str, *, overwrite: bool = False):
        self.path = pathlib.Path(path)
        if path and self.path.exists() and not overwrite:
            raise ValueError(f"{path} exists: give another --output or add --overwrite")
        if not path or self.path.is_dir() or not self.path.parent.is_dir():
            raise ValueError(f"{path or repr(path)} cannot be written: expected a file in an existing folder")
        self._partial = self.path.with_name(self.path.name + ".partial")
        self._rows = 0

    def write(self, row: dict[str, Any]) -> None:
        """Adds a line. Lone surrogates, which no file can hold, become JSON escapes."""
        line = json.dumps(row, ensure_ascii=False) + "\n"
        with self._partial.open("a" if self._rows else "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)
        self._rows += 1

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind, error, trace) -> None:
        if error is None and self._rows:
            os.replace(self._partial, self.path)
        elif error is not None and self._rows:
            print(f"{self._rows} completions are in {self._partial}", file=sys.stderr)
