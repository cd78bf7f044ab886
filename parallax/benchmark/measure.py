"""The order of the measurements: all engines in turn on the same prompts, the first to go changing each time.

A unit, (repeat, prompt file, prompts decoded together), is what a later run of the same benchmark does not repeat.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple

from parallax.benchmark.engine import Engine, Measurement
from parallax.benchmark.numbers import parting
from parallax.benchmark.settings import Settings

Ids = Sequence[int]
Gap = Callable[[Ids, Ids, int, int], float]


class Unit(NamedTuple):
    """`first`: the place of the unit's first prompt among those taken from the file."""

    repeat: int
    file: int
    first: int


def plan(settings: Settings) -> list[Unit]:
    """Repeat by repeat, so that an early stop leaves every prompt measured as often."""
    return [Unit(repeat, file, first) for repeat in range(settings.repeats)
            for file, prompts in enumerate(settings.prompts)
            for first in range(0, len(prompts.texts), settings.batch_size)]


def measure(engines: Sequence[Engine], settings: Settings, rows: Sequence[Sequence[Ids]], done: Container[Unit] = (),
            gap: Gap | None = None) -> Iterator[dict[str, Any]]:
    """Yields a record for each unit that is not done.

    Args:
      engines: plain decoding first: the others' tokens are compared with its.
      rows: the token ids of every prompt of every file.
      gap: called with (prompt ids, ids before the difference, our token, the reference's) where tokens differ.
    """
    units = plan(settings)
    for number, unit in enumerate(units):
        if unit in done:
            continue
        prompts = settings.prompts[unit.file]
        part = slice(unit.first, unit.first + settings.batch_size)
        batch, index = rows[unit.file][part], prompts.index[part]
        runs = {engine.label: _warm(engine, batch, index, settings.seed + unit.repeat)
                for engine in rotated(engines, number % (len(units) // settings.repeats) + unit.repeat)}
        reference = runs[engines[0].label].ids
        gaps = {label: [_gap(gap, *outputs) for outputs in zip(batch, run.ids, reference)]
                for label, run in runs.items() if gap and run.ids != reference}
        yield {"unit": list(unit), "prompts": prompts.label, "index": list(index),
               "prompt_tokens": [len(ids) for ids in batch], "gaps": gaps,
               "runs": {label: dataclasses.asdict(run) for label, run in runs.items()}}


def rotated(engines: Sequence[Engine], number: int) -> list[Engine]:
    """All engines, another one first each time."""
    first = number % len(engines)
    return [*itertools.islice(itertools.cycle(engines), first, first + len(engines))]


def _warm(engine: Engine, batch: Sequence[Ids], index: Sequence[int], seed: int) -> Measurement:
    """A run that compiled nothing; what the one before it spent on that is kept apart."""
    run = engine.run(batch, index, seed)
    if not run.compile:
        return run
    return dataclasses.replace(engine.run(batch, index, seed), compile=run.compile)


def _gap(gap: Gap, prompt: Ids, ours: Ids, theirs: Ids) -> float | None:
    at = parting(ours, theirs)
    if at is None or at >= min(len(ours), len(theirs)):
        return None
    return gap(prompt, theirs[:at], ours[at], theirs[at])
