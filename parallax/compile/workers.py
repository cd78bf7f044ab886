"""Processes that compile. libtpu reads its settings once, and may end the process over a program it cannot compile."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from parallax.compile import targets


class Worker:
    """A process in which functions run one after the other; a new one takes over if it dies. A context manager.

    Args:
      dumps: whether libtpu dumps what it compiles there; the functions then get the folder as the last argument.
    """

    def __init__(self, *, dumps: bool = False):
        self._folder = tempfile.TemporaryDirectory() if dumps else None
        self._pool = None

    def run(self, function: Callable, *args: Any) -> Any:
        """`function(*args)`, from there. Raises what it raises, and BrokenProcessPool if the process died of it."""
        folder = () if self._folder is None else (self._folder.name,)
        if self._pool is None:
            # A fork would have JAX, and with it the settings of this process.
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"),
                                             initializer=targets.set_environment, initargs=folder)
        try:
            return self._pool.submit(function, *args, *folder).result()
        except BrokenProcessPool:
            self._stop()
            raise

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._stop()
        if self._folder is not None:
            self._folder.cleanup()
