"""The records as tables for the terminal and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from parallax.proof.record import CAUGHT, CHANCE, CONTROL, LAW, RULE, TARGET, TIE, Record
from parallax.proof.rules import REPLACEMENT, SHAPES
from parallax.proof.structure import ALL, SAMPLED

Group = dict[tuple[str, str], list[Record]]

_TITLES = {TARGET: "Methods on random tiny targets, float32", CONTROL: "Negative controls",
           RULE: "Acceptance rules, by exact enumeration (* siblings drawn with replacement)"}


def tables(records: Sequence[Record], width: int) -> list[Any]:
    """A rich table of the methods per model, one of the rules, one of the negative controls."""
    found = []
    for on in dict.fromkeys(record.on for record in records):
        part = [record for record in records if record.on == on]
        rows = {RULE: _rule, CONTROL: _control}.get(on, _method)
        shown = [rows(group) for group in groups(part).values()]
        found.append(_table(_TITLES.get(on, f"Methods on {on}"), shown, width))
    return found


def groups(records: Iterable[Record]) -> Group:
    """The records by what they are about, in order."""
    result: Group = {}
    for record in records:
        result.setdefault((record.method, record.verifier), []).append(record)
    return result


def failures(records: Iterable[Record]) -> list[str]:
    """A line for each claim that fell."""
    return [f"{' '.join(filter(None, (r.on, r.method, r.verifier)))}, {r.claim}: {r.check}: {r.note}"
            for r in records if not r.passed]


def limits() -> str:
    """What the checks hold their numbers to, in one line."""
    return (f"TV at most {LAW:.0e}; chi-square p at least {CHANCE:.0e}; in bfloat16 tokens may part where both logits "
            f"are within 1/{1 / TIE:.0f} of the largest; a control is caught at a TV of {CAUGHT:.0e} or more")


def write(path: str, records: Sequence[Record], facts: dict[str, Any]) -> None:
    """The JSON file, which takes its place when it is whole."""
    content = {"passed": all(record.passed for record in records), **facts,
               "limits": {"tv": LAW, "p": CHANCE, "near_tie": TIE, "control_tv": CAUGHT},
               "records": [dataclasses.asdict(record) for record in records]}
    target = pathlib.Path(path)
    partial = target.with_name(target.name + ".partial")
    # JSON has no infinity.
    partial.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, target)


def _method(records: list[Record]) -> dict[str, str]:
    by = {record.check: record for record in records}
    invariants = [record for record in records if record.check.removesuffix(SAMPLED) in ALL]
    broken = [record.check for record in invariants if not record.passed]
    row = {"method": records[0].method, "verifier": records[0].verifier, "guarantee": _claim(records),
           "greedy": _equal(by.get("greedy")), "seeded": _equal(by.get("seeded")), "law p": _number(by, "law", "p"),
           "TV of texts": _distance(by),
           "accepted": _first(by, ("law", "seeded", "greedy"), "accepted_per_step")}
    if invariants:
        row["invariants"] = ", ".join(broken) or f"{len(invariants)} of {len(invariants)}"
    return {**row, "bfloat16": _ties(by.get("bfloat16")), "verdict": _verdict(records)}


def _rule(records: list[Record]) -> dict[str, str]:
    """Mean accepted drafts by shape; a star marks siblings that were drawn with replacement."""
    by = {record.check: record for record in records}
    worst = max((record.numbers.get("tv", math.inf) for record in records if record.check != "law"), default=None)
    row = {"rule": records[0].verifier, "guarantee": _claim(records),
           "worst TV": "-" if worst is None else f"{worst:.1e}"}
    for shape in SHAPES:
        found = [(by.get(f"enumerated {shape}{suffix}"), star) for suffix, star in (("", ""), (REPLACEMENT, "*"))]
        row[f"{'accepted: ' * (shape == 'chain')}{shape}"] = ", ".join(
            f"{record.numbers['accepted']:.3f}{star}" for record, star in found if record and record.numbers) or "-"
    return {**row, "law p": _number(by, "law", "p"), "TV of texts": _distance(by),
            "accepted in the loop": _number(by, "law", "accepted_per_step"), "verdict": _verdict(records)}


def _control(records: list[Record]) -> dict[str, str]:
    (record,) = records
    return {"negative control": record.verifier, "TV": f"{record.numbers['tv']:.2g}" if record.numbers else "-",
            "verdict": "[green]caught[/]" if record.passed else "[bold red]NOT CAUGHT[/]"}


def _equal(record: Record | None) -> str:
    if record is None or not record.numbers:
        return "-" if record is None else "[red]broken[/]"
    numbers = record.numbers
    if record.claim == "exact":
        return f"{numbers['equal']} of {numbers['of']}"
    return f"{numbers['equal_tokens']:.0%} equal"


def _ties(record: Record | None) -> str:
    if record is None or not record.numbers:
        return "-" if record is None else "[red]broken[/]"
    numbers = record.numbers
    parted = f", gap {numbers['widest_gap']:.1g}" if numbers["divergences"] else ""
    return f"{numbers['equal']} of {numbers['of']}{parted}"


def _number(by: dict[str, Record], check: str, key: str) -> str:
    record = by.get(check)
    return "-" if record is None or key not in record.numbers else f"{record.numbers[key]:.2g}"


def _first(by: dict[str, Record], checks: Sequence[str], key: str) -> str:
    return next((text for check in checks if (text := _number(by, check, key)) != "-"), "-")


def _distance(by: dict[str, Record]) -> str:
    """Of sampled texts, with what chance alone makes."""
    record = by.get("law")
    if record is None or "tv" not in record.numbers:
        return "-"
    return f"{record.numbers['tv']:.3f} (chance {record.numbers['noise']:.3f})"


def _claim(records: Sequence[Record]) -> str:
    """The weakest of what is claimed: a rule for drawn drafts is exact at temperature 0 alone."""
    order = ("rejected", "exact", "distribution", "stepwise", "lossy")
    return max((record.claim for record in records), key=order.index)


def _verdict(records: Sequence[Record]) -> str:
    if not all(record.passed for record in records):
        return "[bold red]FAILED[/]"
    accepted = [record.numbers["accepted_per_step"] for record in records if "accepted_per_step" in record.numbers]
    if accepted and not any(accepted) and records[0].method != "autoregressive":
        return "[yellow]no draft accepted[/]"                       # so nothing was seen of accepting one
    return "as labelled" if _claim(records) == "lossy" else "[green]proven[/]"


# Left out first where a terminal is narrow; the others always stay.
_LESS_WANTED = ("TV of texts", "accepted in the loop", "accepted", "1x2", "2x1", "bfloat16", "guarantee")


def _table(title: str, rows: Sequence[dict[str, str]], width: int) -> Any:
    """Without columns that no row has anything for, and those that a terminal of `width` characters has no room for."""
    from rich.table import Table
    from rich.text import Text

    names = [name for name in dict.fromkeys(name for row in rows for name in row)
             if any(row.get(name, "-") != "-" for row in rows)]
    size = {name: 3 + max(len(Text.from_markup(text)) for text in [name, *(row.get(name, "-") for row in rows)])
            for name in names}
    for name in _LESS_WANTED:
        if name in names and sum(size[kept] for kept in names) + 1 > width:
            names.remove(name)
    table = Table(*names, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(row.get(name, "-") for name in names))
    return table


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
