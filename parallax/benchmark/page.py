"""The results as one HTML file: no script, nothing fetched, light and dark as the reader's system is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jinja2

from parallax.benchmark import plots, tables
from parallax.benchmark.numbers import DEFINITIONS, Numbers
from parallax.benchmark.settings import REFERENCE


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure, its title, and what it shows."""

    title: str
    caption: str
    svg: str


def html(title: str, facts: dict[str, str], results: Sequence[Numbers], points: Sequence[dict[str, Any]]) -> str:
    """The page.

    Args:
      facts: what was measured where, name by name.
      points: of `numbers.by_prompt`.
    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_PAGE).render(
        title=title, facts=facts, groups=tables.groups(results), tables=tables.shown(results), cells=tables.cells,
        heading=tables.heading, reasons=tables.reasons(results), plots=figures(results, points),
        definitions=DEFINITIONS, reference=REFERENCE)


def figures(results: Sequence[Numbers], points: Sequence[dict[str, Any]]) -> list[Plot]:
    """Those that there are numbers for."""
    total = list(tables.groups(results).values())[-1]                 # over all files
    counted = [row for row in total if row.shares is not None]
    others = [row for row in total if row.method != REFERENCE]
    drafting = [row for row in others if row.accepted_steps and row.acceptance is not None]
    known = [row.method for row in others if row.tokens_per_forward is not None]
    found = []
    if others:
        label = _says(others, lambda r: f"{r.speedup_by_run.median:.2f} times plain decoding at "
                                        f"{tables.SPEED['TPF'](r)} tokens per forward")
        found += [Plot("Speedup", "Median of the time per token of plain decoding over that of the method, with the "
                       "range of 10 to 90 % of the runs. The diamond is tokens per forward: the speedup, if steps "
                       "cost what plain ones do.",
                       plots.svg(plots.speedup, results, name="speedup", label=f"Speedup. {label}"))]
    if drafting:
        label = _says(drafting, lambda r: ", ".join(f"{at or 0:.0%}" for at in r.acceptance_at[:6]))
        found += [Plot("Acceptance by depth", "Accepted, of the steps that had a token to offer at that depth.",
                       plots.svg(plots.depths, drafting, name="depths", label=f"Acceptance by depth. {label}"))]
        label = _says(drafting, lambda r: f"{r.accepted_per_forward:.2f} on average")
        found += [Plot("Accepted length", "Steps by how many draft tokens they accepted.",
                       plots.svg(plots.lengths, drafting, name="lengths",
                                 label=f"Draft tokens accepted per step. {label}"))]
    label = _says(counted, lambda r: f"prefill {r.shares.prefill:.2f}, plain steps {r.shares.plain:.2f}, "
                                     f"the rest {r.shares.rest:.2f}")
    found += [Plot("Where the time goes", "Per token: prefill, what as many plain one-row steps of the target take, "
                   "and the rest: drafting, wider blocks, verifying.",
                   plots.svg(plots.shares, counted, name="shares", label=f"Milliseconds per token. {label}"))]
    if known:
        found += [Plot("Prompt by prompt", "Tokens per forward against speedup; what lies below the dotted line is the "
                       "cost of drafts.",
                       plots.svg(plots.prompts, points, known, name="prompts",
                                 label="Tokens per forward against speedup, a point per prompt and method"))]
    return found


def _says(rows: Sequence[Numbers], text) -> str:
    return "; ".join(f"{row.method}: {text(row)}" for row in rows)


_PAGE = """\
{% macro section(title) %}
<h2>{{ title }}</h2>
{% for name, rows in groups.items() %}
<h3>{{ heading(name, rows) }}</h3>
<div class="wide" tabindex="0" role="region" aria-label="{{ title }}, {{ name }}">
<table>
<thead><tr>
{% for column in tables[title] %}
<th scope="col">{{ column | replace("10-90 %", "10\u201190\u00a0%") }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in cells(rows, tables[title]) %}
<tr{% if row[0] == reference %} class="reference"{% endif %}><th scope="row">{{ row[0] }}</th>
{%- for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
</div>
{% endfor %}
{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>
:root { --ink: #1a1d21; --paper: #ffffff; --line: #d5d9de; --faint: #f4f6f8; --soft: #5b636d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #15181c; --line: #383e46; --faint: #1e2228; --soft: #a3abb5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; font-size: 1.25rem; overflow-wrap: anywhere; }
h3 { margin: 1.2rem 0 .4rem; font-size: 1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
tbody th { min-width: 9rem; color: var(--ink); }
tr.reference { background: var(--faint); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; padding: 1rem; border: 1px solid var(--line); border-radius: .5rem; }
figure h3 { margin: 0 0 .5rem; }
figcaption { margin-top: .5rem; color: var(--soft); font-size: .9rem; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
@media (max-width: 32rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<dl>
{% for name, text in facts.items() %}
<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}
</dl>
{{ section("Speed") }}
<h2>Figures</h2>
<div class="plots">
{% for plot in plots %}
<figure>
<h3>{{ plot.title }}</h3>
{{ plot.svg | safe }}
<figcaption>{{ plot.caption }}</figcaption>
</figure>
{% endfor %}
</div>
{% for title in tables if title != "Speed" %}
{{ section(title) }}
{% endfor %}
{% if reasons %}
<h2>Why tokens per forward are not speed</h2>
<dl>
{% for name, text in reasons.items() %}
<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}
</dl>
{% endif %}
<h2>What the numbers mean</h2>
<dl>
{% for name, text in definitions.items() %}
<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}
</dl>
</body>
</html>
"""
