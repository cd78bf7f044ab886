"""The figures of a benchmark, as SVG text that is the same for the same numbers.

Sizes are those of a phone's screen: a page shows a figure at its own width there and larger elsewhere. Ink is whatever
colour the page writes with; the other colours differ for colour-blind readers too (Okabe and Ito), and every series
also has its own marker or hatching.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from markupsafe import escape
from matplotlib import ticker
from matplotlib.figure import Figure

from parallax.benchmark import tables
from parallax.benchmark.numbers import Numbers
from parallax.benchmark.settings import REFERENCE

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_MARKERS, _HATCHES = "osD^vP", ("", "//", "\\\\", "xx", "--", "||")
_INK = "#010203"                    # stands for the page's own colour
_WIDTH = 5.0                        # inches
_STYLE = {
    "svg.hashsalt": "parallax", "svg.fonttype": "none", "savefig.transparent": True,
    "font.size": 10.5, "text.parse_math": False, "hatch.linewidth": 0.6, "legend.frameon": False,
    "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "axes.grid": True, "grid.color": _INK, "grid.alpha": 0.15,
}


def svg(draw, *args, name: str, label: str) -> str:
    """What `draw(figure, *args)` draws, for the inside of a page.

    Args:
      name: begins every id inside, which must be unique on a page.
      label: says the figure in words.
    """
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, 3.4), layout="constrained")
        draw(figure, *args)
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawing = text.getvalue()[text.getvalue().index("<svg"):]
    box = re.search(r'viewBox="([^"]*)"', drawing)[1]
    head = f'<svg viewBox="{box}" role="img" aria-label="{escape(label)}">'
    drawing = re.sub(r"<svg[^>]*>", lambda _: head, drawing, count=1)       # as it is: a label may hold a backslash
    drawing = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", drawing, count=1, flags=re.DOTALL)
    drawing = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", drawing)
    return re.sub(r"font-family: [^;\"]*", "font-family: inherit", drawing.replace(_INK, "currentColor"))


def speedup(figure: Figure, results: Sequence[Numbers]) -> None:
    """Bars of the median speedup with the 10-90 % range, and beside each the tokens per forward, per prompt file."""
    files, methods = list(tables.groups(results)), _drafting(results)
    figure.set_size_inches(_WIDTH, 1.2 + 0.34 * len(methods) * (len(files) + 0.6))
    axes = figure.add_subplot()
    height = 0.8 / len(files)
    for i, (file, rows) in enumerate(tables.groups(results).items()):
        rows = [row for row in rows if row.method in methods]
        at = np.arange(len(rows)) + (i - (len(files) - 1) / 2) * height
        middle = np.asarray([row.speedup_by_run.median for row in rows])
        ends = [[row.speedup_by_run.low for row in rows], [row.speedup_by_run.high for row in rows]]
        axes.barh(at, middle, 0.9 * height, color=COLOURS[i % 6], hatch=_HATCHES[i % 6], edgecolor=_INK, linewidth=0.6,
                  label=file if len(files) > 1 else "speedup, median and 10-90 %")
        axes.errorbar(middle, at, xerr=np.abs(np.asarray(ends) - middle), fmt="none", ecolor=_INK, capsize=3)
        known = [(row.tokens_per_forward, y) for row, y in zip(rows, at) if row.tokens_per_forward is not None]
        axes.plot(*zip(*known) if known else ([], []), "D", color=_INK, markersize=6, fillstyle="none",
                  label="tokens per forward" if i == len(files) - 1 else None)
    axes.axvline(1, color=_INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(methods)), _wrapped(methods))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)
    axes.set_xlabel("times plain decoding")
    figure.legend(loc="outside upper left", ncols=1 if len(files) > 2 else 2)


def depths(figure: Figure, rows: Sequence[Numbers]) -> None:
    """Acceptance over depth, a line per method."""
    axes = figure.add_subplot()
    for i, row in enumerate(rows):
        known = [(depth, at) for depth, at in enumerate(row.acceptance_at, 1) if at is not None]
        axes.plot(*zip(*known), color=COLOURS[i % 6], marker=_MARKERS[i % 6], label=_wrap(row.method))
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("depth in the draft")
    axes.set_ylabel("accepted, of those offered")
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside upper left", ncols=2)


def lengths(figure: Figure, rows: Sequence[Numbers]) -> None:
    """Shares of the steps by how many draft tokens they accepted, a panel per method."""
    figure.set_size_inches(_WIDTH, 0.6 + 1.5 * len(rows))
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True)[:, 0]
    for i, (axes, row) in enumerate(zip(panels, rows)):
        steps = np.asarray(row.accepted_steps)
        axes.bar(range(len(steps)), steps / steps.sum(), color=COLOURS[i % 6], hatch=_HATCHES[i % 6], edgecolor=_INK,
                 linewidth=0.6)
        axes.set_title(row.method, fontsize="medium", loc="left")
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="x", visible=False)
    panels[-1].set_xlabel("draft tokens accepted in a step")
    figure.supylabel("steps", fontsize="medium")


def shares(figure: Figure, rows: Sequence[Numbers]) -> None:
    """Milliseconds per token: prefill, plain steps, the rest, a stacked bar per method."""
    figure.set_size_inches(_WIDTH, 1.3 + 0.45 * len(rows))
    axes = figure.add_subplot()
    left = np.zeros(len(rows))
    parts = {"prefill": "prefill", "plain": "as many plain steps", "rest": "the rest"}
    for i, (part, label) in enumerate(parts.items()):
        values = np.maximum([getattr(row.shares, part) for row in rows], 0)
        axes.barh(range(len(rows)), values, 0.7, left, color=COLOURS[i], hatch=_HATCHES[i], edgecolor=_INK,
                  linewidth=0.6, label=label)
        left += values
    axes.set_yticks(range(len(rows)), _wrapped([row.method for row in rows]))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("milliseconds per token")
    figure.legend(loc="outside upper left", ncols=3, handlelength=1.2, columnspacing=1)


def prompts(figure: Figure, points: Sequence[dict[str, Any]], methods: Sequence[str]) -> None:
    """Tokens per forward against speedup, a point per prompt."""
    axes = figure.add_subplot()
    for i, method in enumerate(methods):
        mine = [p for p in points if p["method"] == method]
        axes.plot([p["tokens_per_forward"] for p in mine], [p["speedup"] for p in mine], _MARKERS[i % 6], markersize=5,
                  color=COLOURS[i % 6], markeredgecolor=_INK, markeredgewidth=0.4, label=_wrap(method))
    right = max(p["tokens_per_forward"] for p in points if p["method"] in methods)
    axes.plot([1, max(right, 1.1)], [1, max(right, 1.1)], ":", color=_INK, linewidth=1, label="if drafts cost nothing")
    axes.axhline(1, color=_INK, linestyle="--", linewidth=1, label="plain decoding")
    axes.set_xlabel("tokens per forward")
    axes.set_ylabel("speedup")
    figure.legend(loc="outside upper left", ncols=2)


def _drafting(results: Sequence[Numbers]) -> list[str]:
    return [name for name in dict.fromkeys(row.method for row in results) if name != REFERENCE]


def _wrap(label: str) -> str:
    return textwrap.fill(label, 20, break_long_words=False)


def _wrapped(labels: Sequence[str]) -> list[str]:
    return [_wrap(label) for label in labels]
