"""Numbers as text: what each column shows, as a table for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parallax.benchmark.numbers import DEFINITIONS, Equality, Numbers, Spread

Column = Callable[[Numbers], str]

ALL = "all prompt files"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _spread(spread: Spread, form: str) -> str:
    return f"{spread.median:{form}} ({spread.low:{form}}-{spread.high:{form}})"


def equality(equal: Equality | None) -> str:
    """`20 of 20`, `19 of 20 (code 3 at token 17, logits 8e-04 apart)`, `law`, or `-` for plain decoding itself."""
    if equal is None:
        return "-"
    if not equal.expected:
        return "law"
    if equal.token is None:
        return f"{equal.same} of {equal.of}"
    gap = "" if equal.gap is None else f", logits {equal.gap:.0e} apart"
    return f"{equal.same} of {equal.of} ({equal.file} {equal.prompt} at token {equal.token}{gap})"


def _levels(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values[:8]) + " ..." * (len(values) > 8) or "-"


_METHOD: dict[str, Column] = {"method": lambda n: n.method, "guarantee": lambda n: n.guarantee or "-"}
SPEED: dict[str, Column] = {
    **_METHOD,
    "TPF": lambda n: _number(n.tokens_per_forward, ".2f"),
    "speedup": lambda n: f"{n.speedup:.2f}x",
    "median (10-90 %)": lambda n: _spread(n.speedup_by_run, ".2f"),
    "ms/token (10-90 %)": lambda n: _spread(n.ms_per_token, ".1f" if n.ms_per_token.median >= 1 else ".2f"),
    "tokens/s": lambda n: f"{n.tokens_per_second:.1f}",
    "acceptance": lambda n: _number(n.acceptance, ".0%"),
    "distinct 4-grams": lambda n: _number(n.distinct_4grams, ".2f"),
    "tokens equal": lambda n: equality(n.equal),
}
STEPS: dict[str, Column] = {
    **_METHOD,
    "tokens": lambda n: str(n.tokens),
    "target forwards": lambda n: _number(n.forwards, "d"),
    "draft forwards": lambda n: _number(n.draft_forwards, "d"),
    "rows per forward": lambda n: _number(n.rows and n.rows / n.forwards, ".1f"),
    "accepted per forward": lambda n: _number(n.accepted_per_forward, ".2f"),
    "acceptance by depth": lambda n: _levels([at for at in n.acceptance_at if at is not None]),
    "step cost": lambda n: _number(n.step_cost, ".2f"),
    "expected speedup": lambda n: "-" if n.expected_speedup is None else f"{n.expected_speedup:.2f}x",
    "break-even": lambda n: _number(n.break_even, ".2f"),
}
TIME: dict[str, Column] = {
    **_METHOD,
    "prefill ms (10-90 %)": lambda n: _spread(n.prefill_ms, ".0f"),
    "compile s": lambda n: f"{n.compile_seconds:.1f}",
    "prefill": lambda n: _share(n, "prefill"),
    "plain steps": lambda n: _share(n, "plain"),
    "the rest": lambda n: _share(n, "rest"),
}
_TABLES = {"Speed": SPEED, "Steps": STEPS, "Time, in ms per token": TIME}


def _share(numbers: Numbers, part: str) -> str:
    if numbers.shares is None:
        return "-"
    value, total = getattr(numbers.shares, part), numbers.shares.prefill + numbers.shares.plain + numbers.shares.rest
    return f"{value:.2f} ({value / total:.0%})"


def shown(results: Sequence[Numbers]) -> dict[str, dict[str, Column]]:
    """The tables by title, without columns that no method has a number for."""
    return {title: {name: column for name, column in columns.items() if any(column(row) != "-" for row in results)}
            for title, columns in _TABLES.items()}


def groups(results: Sequence[Numbers]) -> dict[str, list[Numbers]]:
    """The numbers by prompt file, those over all files last."""
    found: dict[str, list[Numbers]] = {}
    for numbers in results:
        found.setdefault(ALL if numbers.prompts is None else numbers.prompts, []).append(numbers)
    return found


def heading(name: str, rows: Sequence[Numbers]) -> str:
    return f"{name} ({rows[0].prompt_count} prompts, {rows[0].runs} runs)"


def cells(rows: Sequence[Numbers], columns: dict[str, Column]) -> list[list[str]]:
    return [[column(numbers) for column in columns.values()] for numbers in rows]


# Left out first where a terminal is narrow; the others always stay.
_LESS_WANTED = ("tokens/s", "median (10-90 %)", "acceptance", "distinct 4-grams", "ms/token (10-90 %)")


def fitting(results: Sequence[Numbers], width: int) -> dict[str, Column]:
    """The columns of the speed table that a terminal of `width` characters has room for."""
    columns = shown(results)["Speed"]
    widths = {name: 3 + max(map(len, [name, *map(column, results)])) for name, column in columns.items()}
    for name in _LESS_WANTED:
        if sum(widths[kept] for kept in columns) + 1 > width:
            columns.pop(name, None)
    return columns


def reasons(results: Sequence[Numbers]) -> dict[str, str]:
    """Per method, over all prompts: why tokens per forward are not speed, where costs were measured."""
    return {row.method: row.why for row in list(groups(results).values())[-1] if row.why}


def terminal(results: Sequence[Numbers], width: int) -> list[Any]:
    """A rich table of the speeds per prompt file."""
    from rich.markup import escape
    from rich.table import Table

    tables, speed = [], fitting(results, width)
    for name, rows in groups(results).items():
        table = Table(*speed, title=escape(heading(name, rows)), title_justify="left")
        for column in table.columns[2:]:
            column.justify = "right"
        for row in cells(rows, speed):
            table.add_row(*map(escape, row))
        tables.append(table)
    return tables


def markdown(title: str, facts: dict[str, str], results: Sequence[Numbers]) -> str:
    """The whole result as a Markdown document."""
    lines = [f"# {title}", "", *(f"- {name}: {text}" for name, text in facts.items())]
    for name, rows in groups(results).items():
        lines += ["", f"## {heading(name, rows)}"]
        for title, columns in shown(results).items():
            lines += ["", f"### {title}", "", _row(columns), "|" + "---|" * 2 + "---:|" * (len(columns) - 2)]
            lines += [_row(row) for row in cells(rows, columns)]
    why = [f"- **{name}**: {text}" for name, text in reasons(results).items()]
    lines += ["", "## Why tokens per forward are not speed", "", *why] if why else []
    lines += ["", "## What the numbers mean", "", *(f"- **{name}**: {text}" for name, text in DEFINITIONS.items())]
    return "\n".join(lines) + "\n"


def _row(parts) -> str:
    return "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"
