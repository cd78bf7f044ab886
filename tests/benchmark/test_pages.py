"""The tables and the page."""

import dataclasses
import html.parser
import io
import re

import pytest
from rich.console import Console

from parallax.benchmark import numbers, page, tables
from parallax.benchmark.numbers import Equality

VOID = {"meta", "br", "use", "path", "rect", "img", "link"}


class Parsed(html.parser.HTMLParser):
    """Text, attributes and whether every tag is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def records(record, run):
    counts = dict(forwards=[4], accepted=4, proposed=12, accepted_at=[3, 1], proposed_at=[4, 3])
    bare = {"forwards": None, "accepted": None, "proposed": None, "guarantee": None}
    return [record(run(range(8), decode=0.8), (i,), file=file, **{
        "lookup [b] <b>": run(range(8), decode=0.4, **counts),
        "law": run(range(1, 9), decode=0.5, **{**counts, "guarantee": "distribution"}),
        "other & sons": {**run(range(8), decode=1.6), **bare}}) for file in ("code", "chat") for i in range(2)]


@pytest.fixture
def results(records):
    return numbers.results(records, list(records[0]["runs"]))


@pytest.fixture
def made(records, results):
    def make():
        return page.html("tiny: 4 methods", {"model": "tiny <i>"}, results,
                         numbers.by_prompt(records, list(records[0]["runs"])))
    return make


def test_the_page_is_well_formed_and_names_every_method(made):
    parsed = Parsed(made())
    assert parsed.open == []
    names = [text for text in parsed.texts if text in ("autoregressive", "lookup [b] <b>", "law", "other & sons")]
    assert {names.count(name) >= 9 for name in set(names)} == {True} and len(set(names)) == 4
    assert "tiny <i>" in parsed.texts
    text = " ".join(parsed.texts)
    assert "2.00x" in text and "distinct 4-grams" in text and "breaks even" in text


def test_the_page_needs_nothing_from_outside(made):
    text = made()
    assert "http" not in text and "<script" not in text and "@import" not in text
    assert set(re.findall(r"url\(.", text)) == {"url(#"}
    for name, value in Parsed(text).attributes:
        assert name not in ("src", "srcset", "data") and (not name.endswith("href") or value.startswith("#"))


def test_ids_are_unique_and_every_reference_leads_to_one(made):
    parsed, text = Parsed(made()), made()
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {value[1:] for name, value in parsed.attributes if name.endswith("href")}
    assert wanted | set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


def test_every_figure_says_in_words_what_it_shows(made):
    labels = [attributes["aria-label"] for tag, attributes in Parsed(made()).tags
              if tag == "svg" and attributes["role"] == "img"]
    assert len(labels) == 5 and "lookup [b] <b>: 2.00 times plain decoding at 2.00 tokens per forward" in labels[0]
    assert "law: 75%, 33%" in labels[1] and "1.00 on average" in labels[2]


def test_figures_take_the_ink_of_the_page(made):
    text = made()
    assert "currentColor" in text and "#010203" not in text and "prefers-color-scheme: dark" in text
    assert not re.search(r"#000000", text)


def test_the_same_numbers_make_the_same_page(made):
    assert made() == made()


def test_figures_without_numbers_are_left_out(record, run):
    records = [record(run(range(8), decode=0.8))]
    results = numbers.results(records, ["autoregressive"])
    assert [plot.title for plot in page.figures(results, numbers.by_prompt(records, ["autoregressive"]))] == [
        "Where the time goes"]


def test_a_narrow_terminal_gets_fewer_columns_but_never_loses_the_main_ones(results):
    wide, narrow = (list(tables.fitting(results, width)) for width in (300, 40))
    assert wide == list(tables.shown(results)["Speed"])
    assert narrow == ["method", "guarantee", "TPF", "speedup", "tokens equal"]
    assert len(narrow) < len(tables.fitting(results, 110)) < len(wide)


def test_the_terminal_shows_tokens_per_forward_beside_speed(results):
    console = Console(width=200, file=io.StringIO())
    for table in tables.terminal(results, 200):
        console.print(table)
        headers = [column.header for column in table.columns]
        assert headers[2:4] == ["TPF", "speedup"]
    text = console.file.getvalue()
    assert "code (2 prompts, 2 runs)" in text and "all prompt files (4 prompts, 4 runs)" in text
    assert re.search(r"lookup \[b\] <b> +│ exact +│ 2.00 │ +2.00x │ 2.00 \(2.00-2.00\) │ +50.0 \(50.0-50.0\)", text)


def test_markdown_has_a_cell_for_every_header(results):
    text = tables.markdown("tiny", {"model": "a | b"}, results)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3 * 3 * (4 + 2)
    for columns in tables.shown(results).values():
        assert "| " + " | ".join(columns) + " |" in rows
    assert {row.count("|") - 1 for row in rows} == {len(columns) for columns in tables.shown(results).values()}
    assert all(f"- **{name}**" in text for name in numbers.DEFINITIONS)


def test_a_column_is_shown_where_a_method_has_a_number_for_it(results):
    assert "rows per forward" not in tables.shown(results)["Steps"]
    counted = dataclasses.replace(results[1], rows=64)
    assert "rows per forward" in tables.shown([*results, counted])["Steps"]
    assert tables.cells([counted], tables.STEPS)[0][5] == "8.0"


@pytest.mark.parametrize("equal, text", [
    (None, "-"),
    (Equality(True, 20, 20), "20 of 20"),
    (Equality(True, 19, 20, "code", 3, 17, 8.2e-4), "19 of 20 (code 3 at token 17, logits 8e-04 apart)"),
    (Equality(True, 19, 20, "code", 3, 17, None), "19 of 20 (code 3 at token 17)"),
    (Equality(False, 3, 20, "code", 3, 17, None), "law"),
])
def test_equality_says_where_and_how_much(equal, text):
    assert tables.equality(equal) == text
