"""What `python -m parallax.bench` does once its flags are parsed."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from tqdm import tqdm

from parallax.benchmark import expected, facts, measure, numbers, page, tables
from parallax.benchmark.engine import Engine, engines, logit_gap
from parallax.benchmark.folder import Folder, units
from parallax.benchmark.settings import BUILT_IN, Settings, resolve
from parallax.generate import LanguageModel

Baselines = Mapping[str, Callable[[LanguageModel, Settings], Engine]]


def bench(config: Any, given: Mapping[str, Any], flags: Any, baselines: Baselines) -> None:
    """Measures what the folder does not hold yet, writes its pages and prints the speeds.

    Args:
      config: the resolved benchmark config.
      given: settings from flags, which win over the config.
      flags: output, overwrite.
      baselines: other engines by their labels, made of (model, settings) once the model is loaded.

    Raises:
      ValueError: bad input, before the model is loaded wherever possible.
    """
    settings = resolve(config, given, tuple(baselines))
    folder = Folder(flags.output, settings, overwrite=flags.overwrite)
    records = folder.records()
    left = len(measure.plan(settings)) - len(units(records))
    if left:
        records = _run(settings, folder, records, baselines)
    else:
        print(f"all of it was measured before ({flags.output}); --overwrite measures anew", file=sys.stderr)
    results = _write(settings, folder, records)
    console = Console()
    for table in tables.terminal(results, console.width):
        console.print(table)
    for name, text in tables.reasons(results).items():
        console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{pathlib.Path(flags.output) / 'index.html'}", markup=False, highlight=False, soft_wrap=True)


def _run(settings: Settings, folder: Folder, records: list[dict[str, Any]], baselines: Baselines):
    """Loads the model and measures; all records, old and new."""
    lm = LanguageModel.load(settings.model, draft=settings.draft or None, kernels=settings.kernels)
    rows = _encode(lm, settings)
    contenders = [*engines(lm, settings), *(make(lm, settings) for make in baselines.values())]
    folder.start()
    process = {"process": secrets.token_hex(4), **facts.process(lm)}
    folder.append(process)
    records.append(process)
    if settings.costs:
        record = {"process": process["process"], "costs": expected.measured(lm, settings)}
        folder.append(record)
        records.append(record)
    done = units(records)
    plan = measure.plan(settings)
    gap = (lambda *where: logit_gap(lm, *where)) if settings.decoding["temperature"] == 0 else None
    try:
        with tqdm(total=len(plan), initial=len(done), unit="prompt", disable=not sys.stderr.isatty()) as bar:
            for record in measure.measure(contenders, settings, rows, done, gap):
                record = {**record, "process": process["process"]}
                folder.append(record)
                records.append(record)
                bar.update()
    except KeyboardInterrupt:
        print(f"{len(units(records))} of {len(plan)} measurements are in {folder.path}; the same command goes on there",
              file=sys.stderr)
        raise
    return records


def _encode(lm: LanguageModel, settings: Settings) -> list[list[list[int]]]:
    """Token ids of all prompts; those that do not fit are refused before anything is compiled."""
    new, room = settings.decoding["max_new_tokens"], lm.model.config.max_positions
    result = []
    for prompts in settings.prompts:
        chat = settings.chat or prompts.file == BUILT_IN and lm.chats
        result.append([lm.encode(text, chat=chat, system=settings.system or None) for text in prompts.texts])
        for index, ids in zip(prompts.index, result[-1]):
            if len(ids) + new > room:
                raise ValueError(f"{prompts.file}: prompt {index} has {len(ids)} tokens and max_new_tokens={new}, "
                                 f"together more than the model's {room} positions: shorten one of them")
    return result


def _write(settings: Settings, folder: Folder, records: Sequence[dict[str, Any]]) -> list[numbers.Numbers]:
    """The pages, from the records alone."""
    measured = list(units(records).values())
    used = {record["process"] for record in measured}
    processes = [record for record in records if "started" in record and record["process"] in used]
    costs = next((record["costs"] for record in reversed(records) if "costs" in record), {})
    results = [expected.added(row, costs) for row in numbers.results(measured, settings.labels)]
    points = numbers.by_prompt(measured, settings.labels)
    title, head = f"{settings.model}: {len(settings.labels)} methods", facts.summary(settings, processes, measured)
    content = {"settings": settings.describe(), "processes": processes, "definitions": numbers.DEFINITIONS,
               "results": [dataclasses.asdict(result) for result in results], "by_prompt": points}
    folder.write("results.json", json.dumps(content, indent=1) + "\n")
    folder.write("results.md", tables.markdown(title, head, results))
    folder.write("index.html", page.html(title, head, results, points))
    return results
