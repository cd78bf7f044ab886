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
    """A process in which functions run one after the other; a new one takes over if it dies. A context manager."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="parallax-aot-")
        self._pool = None

    def run(self, function: Callable, *args: Any) -> Any:
        """`function(*args, folder)`, from there, where folder is that of libtpu's dumps.

        Raises what it raises, and BrokenProcessPool if the process died of it.
        """
        if self._pool is None:
            # A fork would have JAX, and with it the settings of this process.
            self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"),
                                             initializer=targets.set_environment, initargs=(self._folder.name,))
        try:
            return self._pool.submit(function, *args, self._folder.name).result()
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
        self._folder.cleanup()
