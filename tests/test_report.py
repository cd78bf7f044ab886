"""Runs as tables and records, and files that are written whole or not at all."""

import dataclasses
import json
import os

import pytest
from rich.console import Console

from parallax import report
from parallax.generate import Completion, Run


def run(*ids, method="prompt_lookup", decode=2.0, proposed=8):
    completions = tuple(Completion((1, 2), tuple(row), "text", "length", 4, 32, 3, proposed, 0, (2, 1), (4, 2))
                        for row in ids)
    return Run(method, "exact", completions, prefill=0.5, decode=decode, compile=1.25)


def cells(table):
    """{row: [cells]}"""
    return {name: list(rest) for name, *rest in zip(*(column.cells for column in table.columns))}


def test_the_table_has_every_number_of_a_run():
    table = report.table([run([5, 6, 7, 8, 9, 10, 11, 12], [5, 6])])
    assert [column.header for column in table.columns] == ["", "prompt_lookup"]
    assert cells(table) == {
        "guarantee": ["exact"], "tokens": ["10"], "target forwards": ["8"], "tokens per forward": ["1.25"],
        "acceptance": ["38%"], "prefill": ["0.50 s"], "decode": ["2.00 s"], "ms per token": ["200.0"],
        "compile": ["1.2 s"]}


def test_a_reference_adds_speed_and_equality():
    reference = run([5, 6], method="autoregressive", decode=3.0, proposed=0)
    table = report.table([run([5, 6]), run([5, 7]), reference], reference)
    rows = cells(table)
    assert rows["speedup (decode)"] == ["1.50x", "1.50x", "1.00x"]
    assert rows["tokens equal"] == ["yes", "0 of 1 (prompt 0 differs at token 1)", "-"]
    assert rows["acceptance"] == ["38%", "38%", "-"]
    console = Console(width=120, record=True, quiet=True)
    console.print(table)


@pytest.mark.parametrize("ours, theirs, expected", [
    ([[1, 2]], [[1, 2]], "yes"),
    ([[1], [2, 3]], [[1], [2, 3]], "all 2"),
    ([[1], [2, 3], [4]], [[1], [2, 4], [5]], "1 of 3 (prompt 1 differs at token 1)"),
    ([[1, 2]], [[1, 2, 3]], "0 of 1 (prompt 0 differs at token 2)"),
    ([[1, 2, 3]], [[1]], "0 of 1 (prompt 0 differs at token 1)"),
])
def test_equality_names_the_first_difference(ours, theirs, expected):
    assert report.equality(run(*ours), run(*theirs)) == expected


def test_tokens_are_not_expected_of_a_method_that_keeps_the_law():
    assert report.equality(dataclasses.replace(run([1]), guarantee="distribution"), run([2])) == "law"


def test_a_run_is_not_compared_with_itself():
    one = run([1])
    assert report.equality(one, one) == "-"


def test_a_record_has_what_it_takes_to_make_the_text_again():
    completion, = run([5, 6]).completions
    assert report.record("a", completion, {"model": "tiny", "seed": 3}) == {
        "prompt": "a", "prompt_ids": (1, 2), "ids": (5, 6), "text": "text", "finish": "length", "target_forwards": 4,
        "target_rows": 32, "accepted": 3, "proposed": 8, "draft_forwards": 0, "accepted_at": (2, 1),
        "proposed_at": (4, 2), "model": "tiny", "seed": 3}


def test_a_path_is_checked_without_touching_it(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_text("mine")
    with report.JsonLines(str(new)), report.JsonLines(str(old), overwrite=True):
        assert not new.exists() and old.read_text() == "mine"
    for path, overwrite, message in ((old, False, "exists: give another --output or add --overwrite"),
                                     (tmp_path, True, "cannot be written: expected a file in an existing folder"),
                                     (tmp_path / "none" / "new", False, "cannot be written"),
                                     (old / "new", False, "cannot be written")):
        with pytest.raises(ValueError, match=message):
            report.JsonLines(str(path), overwrite=overwrite)
    with pytest.raises(ValueError, match="'' cannot be written"):
        report.JsonLines("")


def test_a_file_is_replaced_as_a_whole(tmp_path):
    for text in ("one é", "two 日本"):
        with report.JsonLines(str(tmp_path / "out"), overwrite=True) as file:
            file.write({"text": text})
            file.write({})
    assert (tmp_path / "out").read_text(encoding="utf-8") == '{"text": "two 日本"}\n{}\n'
    assert os.listdir(tmp_path) == ["out"]


def test_what_is_no_text_can_be_written_and_read_back_as_json(tmp_path):
    row = {"prompt": "half a pair: \ud83d, a stray byte: \udcff"}
    with report.JsonLines(str(tmp_path / "out")) as file:
        file.write(row)
    assert json.loads((tmp_path / "out").read_text(encoding="utf-8")) == row


def test_a_failure_keeps_the_rows_so_far_beside_the_old_file(tmp_path, capsys):
    target = tmp_path / "out"
    target.write_text("mine")
    with pytest.raises(KeyboardInterrupt), report.JsonLines(str(target), overwrite=True) as file:
        file.write({"text": "done"})
        raise KeyboardInterrupt
    assert target.read_text() == "mine" and (tmp_path / "out.partial").read_text() == '{"text": "done"}\n'
    assert f"1 completions are in {target}.partial" in capsys.readouterr().err


def test_a_failure_before_the_first_row_leaves_nothing(tmp_path):
    with pytest.raises(OSError), report.JsonLines(str(tmp_path / "out")):
        raise OSError(28, "No space left on device")
    assert os.listdir(tmp_path) == []
