"""The folder of a run: it belongs to one config, which lies in it as config.json."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

import parallax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def versions() -> dict[str, str]:
    """Of everything that decides the result."""
    return {"parallax": parallax.__version__, "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES}}


class Workdir:
    """A run's folder.

    Args:
      path: of the folder, which need not exist.
      config: the resolved config.
      free: keys (a dot in front of nested ones, `mesh` for all below) that may change when a run goes on.

    Raises:
      ValueError: the folder holds another run, or something else. Nothing is written here.
    """

    def __init__(self, path: pathlib.Path, config: dict[str, Any], free: tuple[str, ...]):
        self.path = path
        self._config, self._free = _plain(config), free
        self._file = path / "config.json"
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file: expected a folder for the run, give another --workdir")
        self.resumes = self._file.is_file()
        if self.resumes:
            self._record = _read(self._file)
            self._compare(_flat(self._record["config"]), _flat(self._config))
        elif path.is_dir() and any(not file.name.startswith(".config.json.") for file in path.iterdir()):
            raise ValueError(f"{path} is not empty and holds no run of parallax.train: give another --workdir")
        else:
            self._record = {}

    def claim(self, **facts: Any) -> None:
        """Writes config.json: the config, the versions, facts such as the corpus hash, and what was there before.

        Raises:
          ValueError: a run that goes on had other facts.
        """
        for name, value in facts.items() if self.resumes else ():
            before = self._record.get(name)
            if before != value:
                raise ValueError(f"{self.path} was begun with another {name.replace('_', ' ')} ({_short(before)} "
                                 f"there, {_short(value)} now): restore it, or give another --workdir")
        self.path.mkdir(parents=True, exist_ok=True)
        record = {"config": self._config, "versions": versions(), **facts}
        for name in ("config", "versions") if self.resumes else ():
            history = self._record.get(f"{name}_before", [])
            if self._record.get(name) not in (None, record[name]):
                history = [*history, self._record[name]]
            record |= {f"{name}_before": history} if history else {}
        write_json(self._file, record)

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name) and not name.startswith(tuple(self._free)):
                raise ValueError(f"{self.path} holds another run: its {name} is {before.get(name)!r}, here it is "
                                 f"{now.get(name)!r}; give another --workdir, or the same config to go on")


def write_json(path: pathlib.Path, value: Any) -> None:
    """All of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        record["config"].items()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not the config of a run: give another --workdir") from None
    return record


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON, tuples as lists."""
    return json.loads(json.dumps(config))


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result = {}
    for name, value in config.items():
        result.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return result


def _short(value: Any) -> str:
    return str(value)[:12]
