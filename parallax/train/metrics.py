"""What a run says about itself: figures for TensorBoard and as JSON lines, and a progress bar."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping

from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tqdm import tqdm


class Metrics:
    """Writes to WORKDIR/metrics.jsonl, `{"step": 20, "train/loss": 2.3}` a line, and to WORKDIR/tensorboard.

    A context manager. Everything is on its way to the disk when a method returns, and a method raises OSError, in one
    line, if it cannot be: tensorboardX's own SummaryWriter has a thread write, which a full disk ends in a traceback.
    """

    def __init__(self, workdir: str | pathlib.Path):
        self._folder = pathlib.Path(workdir)
        self._path = self._folder / "metrics.jsonl"
        self._file = None
        self._events = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind, *_) -> None:
        files = [file for file in (self._file, self._events) if file is not None]
        with self._told() if kind is None else contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for file in files:
                stack.callback(file.close)

    def resume(self, step: int) -> None:
        """Drops what was written behind `step`, so that a run which goes on from there has every step once.

        A last line that a kill cut short is dropped as well; 0 drops everything. Comes before all writing.
        """
        with self._told():
            if self._path.exists():
                kept = [line for line in self._path.read_bytes().splitlines() if _step(line) <= step]
                draft = self._path.with_suffix(".tmp")
                draft.write_bytes(b"".join(line + b"\n" for line in kept))
                draft.replace(self._path)
            self._event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one line and one event. A `/` in a name groups curves in TensorBoard."""
        values = {name: float(value) for name, value in values.items()}
        with self._told():
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            line = json.dumps({"step": step, **values}).encode() + b"\n"
            if self._file.write(line) < len(line):          # one call, which a kill does not cut but a full disk does
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            parts = [part for name, value in values.items() for part in summary.scalar(name, value).value]
            self._event(Event(step=step, summary=Summary(value=parts)))

    def text(self, tag: str, text: str) -> None:
        """A text for TensorBoard, as Markdown."""
        with self._told():
            self._event(Event(summary=summary.text(tag, text)))

    def _event(self, event: Event) -> None:
        if self._events is None:
            folder = self._folder / "tensorboard"
            folder.mkdir(parents=True, exist_ok=True)
            # tensorboardX names files by the second, and would write over that of a run that was killed just now.
            self._events = RecordWriter(str(folder / f"events.out.tfevents.{time.time_ns()}"))
            self._event(Event(file_version="brain.Event:2"))
        event.wall_time = time.time()
        self._events.write(event.SerializeToString())
        self._events.flush()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"cannot write the metrics in {self._folder}: {error.strerror or error}") from error


def _step(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


class Progress:
    """The progress of a run, on stderr: a bar, or a line at every step with a loss where nobody watches a terminal.

    A context manager. Rate and time left leave out pauses and all before the first update, which is compilation.

    Args:
      total: steps of the run.
      start: steps that earlier sessions have done.

    Attributes:
      tokens_per_second: between the last two updates with a loss.
    """

    def __init__(self, total: int, start: int = 0):
        self.tokens_per_second = 0.0
        self._total, self._start, self._loss = total, start, ""
        self._since: float | None = None         # up to when time was counted
        self._seconds = self._window_seconds = 0.0
        self._steps = self._window_tokens = 0
        self._bar = tqdm(total=total, initial=start, disable=None, dynamic_ncols=True, file=sys.stderr,
                         bar_format="{n_fmt}/{total_fmt} |{bar:20}| {desc}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def update(self, step: int, loss: float | None, tokens: int) -> None:
        """Step `step` is done, on `tokens` tokens; its loss, if it is known already."""
        if self._since is None:                  # the first one: nothing is known of its time
            self._since = time.perf_counter()
        else:
            self._tick()
            self._steps += 1
            self._window_tokens += tokens
        if loss is not None:
            self._loss = f"loss {loss:.4g}"
            if self._window_tokens:
                self.tokens_per_second = self._window_tokens / self._window_seconds
                self._window_tokens, self._window_seconds = 0, 0.0
        text = self._text(step)
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(step - self._bar.n)
        if self._bar.disable and loss is not None:
            print(f"step {step}/{self._total}: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is no training time."""
        runs = self._since is not None
        if runs:
            self._tick()
        try:
            yield
        finally:
            if runs:
                self._since = time.perf_counter()

    def _tick(self) -> None:
        before, self._since = self._since, time.perf_counter()
        self._seconds += self._since - before
        self._window_seconds += self._since - before

    def _text(self, step: int) -> str:
        parts = [self._loss]
        if self.tokens_per_second:
            parts.append(f"{tqdm.format_sizeof(self.tokens_per_second)} tokens/s")
        if self._steps:
            parts.append(f"{tqdm.format_interval(self._seconds / self._steps * (self._total - step))} left")
        return ", ".join(filter(None, parts))
