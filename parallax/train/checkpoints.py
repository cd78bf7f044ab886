"""Checkpoints of a training run, which survive a kill at any moment and a full disk.

WORKDIR/checkpoints/STEP/ holds four items: `params` by themselves, so that decoding reads them without the optimizer;
`state`, all other arrays; `data`, the position in the data; `meta`, the shape and type of every leaf. A save goes to a
temporary folder that gets its name when it is complete, so a folder named by a number is a whole checkpoint. Damage
that comes later is found by its `sums.json`, before it can become a parameter.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging as python_logging
import os
import pathlib
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import SingleDeviceSharding

Tree = Any

_ITEMS = ("params", "state", "data", "meta")
_SUMS = "sums.json"


class Checkpoints:
    """The checkpoints of one run, a context manager; leaving it waits for the save under way.

    Args:
      workdir: the run's folder.
      keep: how many of the latest checkpoints stay.
      keep_every: those whose step is a multiple of this stay as well.

    Every method that writes raises OSError, in one line, if the disk does not take it; earlier checkpoints stay good.
    """

    def __init__(self, workdir: str | pathlib.Path, *, keep: int = 3, keep_every: int | None = None):
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, got {keep}")
        _quiet()
        self.folder = pathlib.Path(workdir).absolute() / "checkpoints"
        self._saving: int | None = None
        self._manager = ocp.CheckpointManager(self.folder, options=ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every, cleanup_tmp_directories=True, save_root_metadata=False,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal)))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.wait()
        except OSError:
            if kind is None:                    # else the error that ends the run is the one to tell
                raise
        finally:
            with contextlib.suppress(Exception):            # what failed has been told
                self._manager.close()

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return max(_steps(self.folder), default=None)

    def save(self, step: int, params: Tree, rest: Tree, data_state: Any = None, *, wait: bool = False) -> None:
        """Copies the arrays and writes them in the background, behind the save before; a step is written once.

        Args:
          step: names the checkpoint.
          params: the parameters.
          rest: every other array that the next step depends on.
          data_state: where the data iterator stands, as JSON takes it.
          wait: returns when the checkpoint is on disk.
        """
        self.wait()
        if step in _steps(self.folder):
            return
        self._saving = step
        meta = {"versions": {name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint")},
                "leaves": _leaves(params, rest)}
        try:
            self._manager.save(step, force=True, args=ocp.args.Composite(
                params=ocp.args.StandardSave(params), state=ocp.args.StandardSave(rest),
                data=ocp.args.JsonSave({"state": data_state}), meta=ocp.args.JsonSave(meta)))
        except Exception as error:
            self._fail(error)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when everything is on disk."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)
        self._saving = None

    def restore(self, step: int, params_like: Tree, rest_like: Tree) -> tuple[Tree, Tree, Any]:
        """(params, rest, data_state) of a checkpoint.

        Args:
          step: which.
          params_like, rest_like: what was saved, as `jax.ShapeDtypeStruct`s whose shardings say where the arrays shall
            live; see `parallax.sharding.abstract`. The mesh may be another than the one that saved.

        Raises:
          ValueError: the checkpoint holds other leaves, shapes or types.
          OSError: there is none, or it is damaged.
        """
        with _reading(self.folder, step):
            _verify(self.folder / str(step), _ITEMS)
            leaves = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta["leaves"]
        _must_fit(f"checkpoint {step} in {self.folder}", leaves, _leaves(params_like, rest_like))
        with _reading(self.folder, step):
            found = self._manager.restore(step, args=ocp.args.Composite(
                params=ocp.args.StandardRestore(params_like), state=ocp.args.StandardRestore(rest_like),
                data=ocp.args.JsonRestore()))
        return found.params, found.state, found.data["state"]

    def resume(self, params_like: Tree, rest_like: Tree) -> tuple[int, Tree, Tree, Any] | None:
        """(step, params, rest, data_state) of the newest checkpoint that can be read, or None if there is none yet.

        A damaged one is passed over with a warning and renamed, so that its step can be saved again. Raises as
        `restore` does, OSError only if no checkpoint can be read.
        """
        damaged: dict[int, OSError] = {}
        for step in reversed(_steps(self.folder)):
            try:
                found = self.restore(step, params_like, rest_like)
            except OSError as error:
                damaged[step] = error
                continue
            for other, error in damaged.items():
                aside = self.folder / f"{other}.damaged"
                print(f"warning: {error}; it is now {aside.name}, going on from step {step}", file=sys.stderr)
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / str(other)).rename(aside)
            if damaged:
                self._manager.reload()
            return step, *found
        if damaged:
            raise OSError(f"{damaged[max(damaged)]}, nor can any other: delete {self.folder} to start anew")
        return None

    def _seal(self) -> None:
        """Called by the thread that writes, when all is written and the folder has its temporary name still."""
        for folder in self._unfinished():
            (folder / _SUMS).write_text(json.dumps(_sums(folder, _ITEMS), indent=1))

    def _unfinished(self) -> list[pathlib.Path]:
        return list(self.folder.glob(f"{self._saving}.orbax-checkpoint-tmp*"))

    def _fail(self, error: Exception) -> None:
        for leftover in self._unfinished():
            shutil.rmtree(leftover, ignore_errors=True)             # a full disk wants its space back
        last = self.latest()
        good = "there is no earlier one" if last is None else f"the last good one is step {last}"
        raise OSError(f"cannot write checkpoint {self._saving} in {self.folder}: {_reason(error)}; {good}") from error


def read_params(workdir: str | pathlib.Path, step: int | None = None) -> Tree:
    """The parameters of a run's checkpoint, by default its newest, on the default device.

    Writes nothing, so the run may go on meanwhile.

    Raises:
      OSError: there is none, or it is damaged.
    """
    _quiet()
    folder = pathlib.Path(workdir).absolute() / "checkpoints"
    if step is None:
        step = max(_steps(folder), default=None)
    here = SingleDeviceSharding(jax.devices()[0])
    with _reading(folder, step), ocp.StandardCheckpointer() as reader:
        _verify(folder / str(step), ("params",))
        item = folder / str(step) / "params"
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
                            reader.metadata(item).item_metadata.tree)
        params = reader.restore(item, like)
    return _tuples(params)


def _steps(folder: pathlib.Path) -> list[int]:
    """Complete checkpoints, oldest first."""
    return sorted(int(item.name) for item in folder.glob("*") if item.name.isdigit())


@contextlib.contextmanager
def _reading(folder: pathlib.Path, step: int | None) -> Iterator[None]:
    """Around code that reads a checkpoint, which may be absent or damaged."""
    steps = _steps(folder)
    if not steps:
        raise FileNotFoundError(f"there is no checkpoint in {folder}")
    if step not in steps:
        raise FileNotFoundError(f"there is no checkpoint {step} in {folder}: expected one of "
                                f"{', '.join(map(str, steps))}")
    try:
        yield
    except Exception as error:
        raise OSError(f"checkpoint {step} in {folder} cannot be read: {_reason(error)}") from error


def _verify(folder: pathlib.Path, items: Sequence[str]) -> None:
    found = _sums(folder, items)
    for name, expected in json.loads((folder / _SUMS).read_text()).items():
        if name.split("/")[0] in items and found.get(name) != expected:
            raise OSError(f"{name} is not what was written")


def _sums(folder: pathlib.Path, items: Sequence[str]) -> dict[str, str]:
    """The digest of every file of these items, by its path."""
    sums = {}
    for path in sorted(path for item in items for path in (folder / item).rglob("*") if path.is_file()):
        with path.open("rb") as file:
            sums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


def _tuples(node: Tree) -> Tree:
    """Reading gives lists where layers were kept apart in tuples."""
    if isinstance(node, dict):
        return {name: _tuples(child) for name, child in node.items()}
    return tuple(map(_tuples, node)) if isinstance(node, list) else node


def _leaves(params: Tree, rest: Tree) -> dict[str, str]:
    """`params.embed.tokens` -> `float32[61,32]` for every leaf."""
    return {jax.tree_util.keystr(path, simple=True, separator="."):
            f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
            for path, leaf in jax.tree_util.tree_leaves_with_path({"params": params, "state": rest})}


def _must_fit(what: str, there: dict[str, str], here: dict[str, str]) -> None:
    for name in [*here, *there]:
        if there.get(name) != here.get(name):
            raise ValueError(f"{what} is of another model or optimizer: {name} is {there.get(name, 'absent')} there, "
                             f"{here.get(name, 'absent')} here; use the settings that wrote it, or another folder")


def _reason(error: BaseException) -> str:
    """The system's own words where there are some: the library's text names sources, files and settings as well."""
    text = " ".join(str(error).split())
    code = re.search(r"os_error_code='(\d+)'|\[Errno (\d+)\]", text)
    return os.strerror(int(code[1] or code[2])) if code else text[:200] or type(error).__name__


@functools.cache
def _quiet() -> None:
    """Keeps off the terminal what orbax says of errors that are told in one line: tracebacks in its log, and one more
    for every array whose writing or reading ends after the first has failed.
    """
    logging.get_absl_logger().addFilter(lambda record: "orbax" not in record.pathname)
    python_logging.getLogger("asyncio").addFilter(lambda record: "orbax" not in record.getMessage())
    warnings.filterwarnings("ignore", r"coroutine 'async_(de)?serialize.* was never awaited", RuntimeWarning)
    show = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    sys.unraisablehook = hook
