"""A run that is ended by force, at any moment, goes on as if nothing had happened."""

import random
import re
import resource
import time

import pytest

from tests.train.command import STEPS, outcome, train


def complete(workdir):
    """Steps of whole checkpoints."""
    return [int(item.name) for item in workdir.glob("checkpoints/*") if item.name.isdigit()]


def at_random(moments, workdir, last=STEPS):
    """Kills at a random step of those to come, a random part of a step behind its figures."""
    step = moments.randint(max(complete(workdir), default=0) + 1, last)
    delay = moments.uniform(0, 0.05)

    def watch(process, log):
        if f"step {step}/" in log:
            time.sleep(delay)
            process.kill()
    return watch


def while_saving(workdir):
    """Kills as soon as a checkpoint is being written behind a complete one."""
    def watch(process, log):
        if complete(workdir) and list(workdir.glob("checkpoints/*tmp*")):
            process.kill()
    return watch


@pytest.mark.slow
def test_a_run_killed_at_random_steps_ends_like_one_that_was_not(undisturbed, texts, tmp_path):
    moments = random.Random(0)
    for last in (3, STEPS, STEPS):                              # the first before there is any checkpoint
        train(tmp_path / "run", texts, watch=at_random(moments, tmp_path / "run", last))
    ended = train(tmp_path / "run", texts)
    assert ended.status == 0, ended.log
    assert outcome(tmp_path / "run") == outcome(undisturbed)


@pytest.mark.slow
def test_a_run_killed_while_it_writes_a_checkpoint_ends_like_one_that_was_not(undisturbed, texts, tmp_path):
    workdir = tmp_path / "run"
    ended = train(workdir, texts, watch=while_saving(workdir))
    assert ended.status == -9, ended.log
    assert list(workdir.glob("checkpoints/*tmp*"))
    before = max(complete(workdir))
    ended = train(workdir, texts)
    assert ended.status == 0 and f"step {before + 1}/" in ended.log and f"step {before}/" not in ended.log
    assert outcome(workdir) == outcome(undisturbed)


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line_and_the_run_goes_on_when_there_is_room(undisturbed, texts, tmp_path):
    workdir = tmp_path / "run"

    def watch(process, log):
        if complete(workdir):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (30_000, 30_000))

    ended = train(workdir, texts, watch=watch)
    assert ended.status == 2
    told = re.fullmatch(r"error: cannot write checkpoint \d+ in \S+: File too large; the last good one is step (\d+)",
                        ended.log.splitlines()[-1])
    assert told and int(told[1]) == max(complete(workdir)), ended.log
    assert "Traceback" not in ended.log
    ended = train(workdir, texts)
    assert ended.status == 0, ended.log
    assert outcome(workdir) == outcome(undisturbed)


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(undisturbed, texts, tmp_path):
    moments = random.Random(1)
    kills = runs = 0
    while kills < 20:
        runs += 1
        workdir = tmp_path / f"run{runs}"
        end = time.monotonic() + moments.uniform(1, 5)          # while it starts, loads, compiles, evaluates or exports
        for watch in (lambda process, log: process.kill() if time.monotonic() > end else None,
                      at_random(moments, workdir)):
            kills += train(workdir, texts, watch=watch).status == -9
        ended = train(workdir, texts)
        assert ended.status == 0, ended.log
        assert outcome(workdir) == outcome(undisturbed)
