"""The cost model: measured once, and what follows from it."""

import json

import pytest

from parallax import costs
from parallax.costs import Costs
from parallax.decoding import make_decoder
from parallax.testing import tiny_model

KNOWN = Costs(rows=(1, 8, 16), ms=(10.0, 15.0, 23.0))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path))
    return tmp_path


def test_between_measured_sizes_times_are_linear_and_behind_them_they_go_on():
    assert [KNOWN.at(rows) for rows in (1, 4.5, 8, 12, 32)] == [10, 12.5, 15, 19, 39]
    assert KNOWN.relative(8) == 1.5 and Costs((1,), (4.0,)).at(9) == 4
    assert KNOWN.doubling(7) == tuple(KNOWN.at(rows) for rows in (1, 2, 4, 8))
    assert costs.mixed_ms(KNOWN, 4.5, 8) == 12.5 and costs.mixed_ms(KNOWN, 1, 1) == 10


def test_speedup_and_break_even_are_those_of_the_step():
    assert costs.expected_speedup(2.1, 15, 1, KNOWN) == pytest.approx(2.1 * 10 / 16)
    loses = costs.break_even(15, 1, KNOWN)
    assert loses == pytest.approx(0.6) and costs.expected_speedup(1 + loses, 15, 1, KNOWN) == pytest.approx(1)


def test_the_explanation_is_one_line_of_numbers():
    assert costs.explain(2.1, 8, 15, 1, KNOWN) == (
        "2.10 tokens per forward, but a block of 8 rows takes 1.50 plain steps and drafting 0.10: expected 1.31x; "
        "below 0.60 accepted tokens per step it loses")
    assert costs.explain(1, 1, 10, 0, KNOWN).endswith("expected 1.00x; it never loses")


def test_what_was_measured_is_kept_and_measured_anew_only_when_asked(cache, monkeypatch):
    model, params = tiny_model()
    calls = []
    forward = costs._forward

    def counted(*args):
        calls.append(args[3])
        return forward(*args)

    monkeypatch.setattr(costs, "_forward", counted)
    first = costs.measure(model, params, rows=(4,), context=16, repeats=1)
    assert first.rows == (1, 4) and min(first.ms) > 0 and calls == [1, 4]
    assert costs.measure(model, params, rows=(4,), context=16, repeats=1) == first and calls == [1, 4]
    wider = costs.measure(model, params, rows=(2, 4), context=16, repeats=1)
    assert (wider.at(1), wider.at(4)) == first.ms and calls == [1, 4, 2]
    costs.measure(model, params, rows=(2,), context=16, repeats=1, fresh=True)
    assert calls == [1, 4, 2, 1, 2]
    costs.measure(model, params, batch=2, rows=(1,), context=16, repeats=1)
    assert len(list((cache / "costs").glob("*.json"))) == 2 and calls[-1] == 1


def test_a_damaged_or_unwritable_store_is_one_that_holds_nothing(cache, monkeypatch):
    model, params = tiny_model()
    costs.measure(model, params, rows=(1,), context=16, repeats=1)
    (file,) = (cache / "costs").glob("*.json")
    kept = json.loads(file.read_text())
    assert kept["config"]["dtype"] == "float32" and kept["forward"].keys() == {"1"}
    file.write_text("{")
    assert costs.measure(model, params, rows=(1,), context=16, repeats=1).at(1) > 0
    assert json.loads(file.read_text())["forward"].keys() == {"1"}
    monkeypatch.setenv("PARALLAX_CACHE", str(file))                        # no folder
    assert costs.measure(model, params, rows=(1,), context=16, repeats=1).at(1) > 0


def test_drafting_is_what_a_step_takes_besides_the_forward(monkeypatch):
    model, params = tiny_model()
    monkeypatch.setattr(costs, "_medians", lambda runs, repeats: {name: {"step": 9.0, 1: 2.0, 4: 5.0}[name]
                                                                  for name in runs})
    decoder = make_decoder("prompt_lookup", model, draft_length=3)
    monkeypatch.setattr(costs, "_step", lambda *_: (None, 4.0))
    assert costs.draft_ms(decoder, {"target": params}, context=16) == 4.0
    monkeypatch.setattr(costs, "_step", lambda *_: (None, 2.5))
    assert costs.draft_ms(decoder, {"target": params}, context=16) == 4.0                    # kept
    assert costs.draft_ms(decoder, {"target": params}, context=16, fresh=True) == 5.5        # half of the steps draft


def test_a_step_is_timed_with_its_drafts():
    model, params = tiny_model()
    decoder = make_decoder("prompt_lookup", model, draft_length=3)
    assert costs.block_rows(decoder, {"target": params}) == 4
    assert costs.block_rows(make_decoder("autoregressive", model), {"target": params}) == 1
    timed, rows = costs._step(decoder, {"target": params}, 2, 32)
    assert timed() > 0 and 1 < rows <= 4
