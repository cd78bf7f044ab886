import contextlib
import json
import resource
import struct
import time

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from parallax.train.metrics import Metrics, Progress


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def events(folder):
    """Of every file, oldest first: records are length [8 bytes], its checksum [4], bytes, their checksum [4]."""
    result = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            length = struct.unpack("Q", data[:8])[0]
            result.append(Event.FromString(data[12:12 + length]))
            data = data[16 + length:]
    return result


def curve(folder, name):
    """What TensorBoard shows: events behind the start of a later session are gone."""
    points = []
    for event in events(folder):
        if event.session_log.status == SessionLog.START:
            points = [point for point in points if point[0] < event.step]
        points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == name]
    return points


@contextlib.contextmanager
def files_end_at(size):
    """No file grows beyond `size` bytes: to a writer this is a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_every_write_is_a_line_and_an_event_on_disk_at_once(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.scalars(2, {"train/loss": 1.5, "train/rate": 0.25})
        metrics.scalars(4, {"eval/loss": 1.25})
        assert lines(tmp_path) == [{"step": 2, "train/loss": 1.5, "train/rate": 0.25}, {"step": 4, "eval/loss": 1.25}]
        assert curve(tmp_path, "train/rate") == [(2, 0.25)]
        assert curve(tmp_path, "eval/loss") == [(4, 1.25)]


def test_a_text_reaches_tensorboard(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.text("config", "**steps** 10")
    value, = (value for event in events(tmp_path) for value in event.summary.value)
    assert value.tag == "config/text_summary"
    assert list(value.tensor.string_val) == [b"**steps** 10"]


def test_a_resumed_run_has_every_step_once(tmp_path):
    with Metrics(tmp_path) as metrics:
        for step in (2, 4, 6):
            metrics.scalars(step, {"loss": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')                                # a kill
    with Metrics(tmp_path) as metrics:
        metrics.resume(4)
        metrics.scalars(6, {"loss": 60})
    assert lines(tmp_path) == [{"step": 2, "loss": 2}, {"step": 4, "loss": 4}, {"step": 6, "loss": 60}]
    assert curve(tmp_path, "loss") == [(2, 2), (4, 4), (6, 60)]


def test_resuming_from_the_start_drops_everything(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.scalars(1, {"loss": 1})
    with Metrics(tmp_path) as metrics:
        metrics.resume(0)
    assert lines(tmp_path) == [] and curve(tmp_path, "loss") == []


def test_a_run_that_is_started_again_within_the_second_keeps_the_events_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    for step in (1, 2):
        with Metrics(tmp_path) as metrics:
            metrics.scalars(step, {"loss": step})
    assert curve(tmp_path, "loss") == [(1, 1), (2, 2)]


@pytest.mark.parametrize("size", [10, 60])                            # in the line; in the event file
def test_a_full_disk_ends_in_one_line(tmp_path, size):
    with pytest.raises(OSError) as error, files_end_at(size), Metrics(tmp_path) as metrics:
        metrics.scalars(1, {"train/loss": 1.0, "train/grad_norm": 2.0})
    assert str(error.value).startswith(f"cannot write the metrics in {tmp_path}: ")
    assert "\n" not in str(error.value)


def test_what_ends_a_run_is_told_even_if_the_metrics_cannot_be_closed(tmp_path):
    with pytest.raises(FloatingPointError), files_end_at(60), Metrics(tmp_path) as metrics:
        with contextlib.suppress(OSError):
            metrics.scalars(1, {"train/loss": 1.0, "train/grad_norm": 2.0})
        raise FloatingPointError


class Clock:
    """Time that passes when told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def step(self, progress, step, loss=None, seconds=2.0):
        self.now += seconds
        progress.update(step, loss, tokens=100)


def test_the_rate_leaves_out_compilation_and_pauses(monkeypatch):
    clock = Clock(monkeypatch)
    with Progress(10) as progress:
        with progress.paused():
            clock.now += 50
        clock.step(progress, 1, seconds=70)                           # compilation
        clock.step(progress, 2)
        with progress.paused():
            clock.now += 30
        clock.step(progress, 3, loss=2.0)
        assert progress.tokens_per_second == 200 / 4
        clock.step(progress, 4, loss=2.0, seconds=1.0)
        assert progress.tokens_per_second == 100 / 1                  # since the last loss


def test_where_nobody_watches_there_is_a_line_at_every_loss(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    with Progress(20, start=15) as progress:
        clock.step(progress, 16)
        clock.step(progress, 17, loss=2.345678)
        clock.step(progress, 18)
    assert capsys.readouterr().err == "step 17/20: loss 2.346, 50.0 tokens/s, 00:06 left\n"


def test_on_a_terminal_there_is_a_bar(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    clock = Clock(monkeypatch)
    with Progress(20, start=15) as progress:
        for step in range(16, 21):
            clock.step(progress, step, loss=2.5)
    last = capsys.readouterr().err.split("\r")[-1]
    assert last.startswith("20/20 |") and "loss 2.5, 50.0 tokens/s, 00:00 left" in last


def test_a_rate_is_zero_until_it_is_known(capsys):
    with Progress(2) as progress:
        progress.update(1, 2.0, tokens=8)
        assert progress.tokens_per_second == 0.0
    assert capsys.readouterr().err == "step 1/2: loss 2\n"
