"""The folder of a benchmark: its settings, what was measured so far, and the pages made of it.

`config.json` is written before the first measurement, `runs.jsonl` grows by a line per unit. A run that was cut, even
in the middle of a line, goes on where it was.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from parallax.benchmark.measure import Unit
from parallax.benchmark.settings import Settings

_FORMAT = "parallax benchmark 1"
PAGES = ("results.json", "results.md", "index.html")


class Folder:
    """Opens a folder for a benchmark; nothing is written before `start`.

    Args:
      path: made if it is not there.
      settings: of the benchmark to run.
      overwrite: whether `start` may replace a benchmark of other settings, or an earlier one of the same.

    Raises:
      ValueError: the path is no folder, or holds another benchmark or files that are not ours.
    """

    def __init__(self, path: str, settings: Settings, *, overwrite: bool = False):
        self.path = pathlib.Path(path)
        self._config, self._runs = self.path / "config.json", self.path / "runs.jsonl"
        self._settings = {"format": _FORMAT, **settings.describe()}
        self._overwrite = overwrite
        if not path or (self.path.exists() and not self.path.is_dir()):
            raise ValueError(f"{path or repr(path)} is not a folder: give --output a folder, or a name for a new one")
        theirs = self._theirs()
        if not overwrite and theirs is not None and theirs != self._settings:
            raise ValueError(f"{path} holds another benchmark ({_difference(theirs, self._settings)}): give another "
                             "--output, or --overwrite to replace it")

    def records(self) -> list[dict[str, Any]]:
        """What was measured so far, processes and units in the order of the file, without a line that was cut."""
        if self._overwrite or not self._runs.exists():
            return []
        lines = self._runs.read_bytes().split(b"\n")[:-1]
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise ValueError(f"{self._runs} is damaged: give another --output, or --overwrite to measure anew"
                             ) from None

    def start(self) -> None:
        """Makes the folder ready for `append`: settings written, an older benchmark or a cut line gone."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self._overwrite:
            for name in ("runs.jsonl", *PAGES):
                (self.path / name).unlink(missing_ok=True)
        if self._overwrite or not self._config.exists():
            self.write("config.json", json.dumps(self._settings, indent=2) + "\n")
        self._overwrite = False
        if self._runs.exists():
            with self._runs.open("r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def append(self, row: dict[str, Any]) -> None:
        """A line of runs.jsonl, on disk when this returns."""
        with self._runs.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, text: str) -> None:
        """A whole file, which takes its place when it is complete."""
        partial = self.path / (name + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.path / name)

    def _theirs(self) -> dict[str, Any] | None:
        """The settings of the benchmark that is there; None if there is none."""
        try:
            settings = json.loads(self._config.read_bytes()) if self._config.is_file() else None
        except ValueError:
            settings = None
        if isinstance(settings, dict) and settings.get("format") == _FORMAT:
            return settings
        foreign = next((name for name in ("config.json", "runs.jsonl", *PAGES) if (self.path / name).exists()), None)
        if foreign is not None:
            raise ValueError(f"{self.path} has a {foreign} that is not of a benchmark: give another --output")
        return None


def units(records: list[dict[str, Any]]) -> dict[Unit, dict[str, Any]]:
    """The records that are measurements, by unit."""
    return {Unit(*record["unit"]): record for record in records if "unit" in record}


def _difference(theirs: Any, ours: Any) -> str:
    """Names the first setting that differs, with both values."""
    a, b = _flat(theirs), _flat(ours)
    key = next(key for key in {**a, **b} if a.get(key) != b.get(key))
    there, here = (str(side[key]) if key in side else "absent" for side in (a, b))
    return f"{key} is {there[:40]} there and {here[:40]} here"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {key: leaf for name, part in value.items()
            for key, leaf in _flat(part, f"{prefix}.{name}" if prefix else name).items()}
