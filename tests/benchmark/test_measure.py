"""The order of measurements, warm-up, and what an engine of ours reports."""

import dataclasses

import pytest

from parallax.benchmark import measure
from parallax.benchmark.engine import Measurement, Parallax, engines, logit_gap
from parallax.benchmark.settings import Contender

ROWS = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


class Scripted:
    """Appends what it was asked to `calls`; its first run of each prompt length compiles."""

    def __init__(self, label, calls, ids=(1, 2, 3)):
        self.label, self.calls, self.ids, self.seen = label, calls, list(ids), set()

    def run(self, prompts, row_ids, seed):
        new = len(prompts[0]) not in self.seen
        self.seen.add(len(prompts[0]))
        self.calls.append((self.label, tuple(map(tuple, prompts)), tuple(row_ids), seed))
        return Measurement([self.ids for _ in prompts], 0.1, 9.0 if new else 1.0, 4.0 if new else 0.0)


def test_units_come_repeat_by_repeat(settings):
    assert measure.plan(settings()) == [(r, f, i) for r in (0, 1) for f in (0, 1) for i in (0, 1)]
    assert measure.plan(settings(batch_size=2)) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]


def test_all_engines_run_on_a_prompt_before_the_next_and_another_is_first_each_time(settings):
    calls = []
    contenders = [Scripted(name, calls) for name in "abc"]
    for engine in contenders:
        engine.seen.add(2)
    list(measure.measure(contenders, settings(), ROWS))
    turns = ["".join(label for label, *_ in calls[i:i + 3]) for i in range(0, len(calls), 3)]
    assert turns == ["abc", "bca", "cab", "abc", "bca", "cab", "abc", "bca"]
    assert all(len({call[1:] for call in calls[i:i + 3]}) == 1 for i in range(0, len(calls), 3))
    assert [call[1:] for call in calls[::3]] == [(((token, token + 1),), (row,), 7 + repeat) for repeat in (0, 1)
                                                 for token, row in ((1, 0), (3, 5), (5, 0), (7, 5))]


def test_a_run_that_compiles_counts_for_nothing_but_its_compile_time(settings):
    calls = []
    records = list(measure.measure([Scripted("a", calls)], settings(repeats=1), [[[1], [2]], [[1, 2], [3]]]))
    assert [record["runs"]["a"]["decode"] for record in records] == [1.0] * 4
    assert [record["runs"]["a"]["compile"] for record in records] == [4.0, 0.0, 4.0, 0.0]
    assert [call[1] for call in calls] == [((1,),), ((1,),), ((2,),), ((1, 2),), ((1, 2),), ((3,),)]


def test_what_is_done_is_not_measured_again_and_the_order_stays(settings):
    calls = []
    contenders = [Scripted(name, calls) for name in "abc"]
    done = set(measure.plan(settings())[:5])
    records = list(measure.measure(contenders, settings(), ROWS, done))
    assert [tuple(record["unit"]) for record in records] == measure.plan(settings())[5:]
    assert [label for label, *_ in calls[::2]][:3] == ["c", "a", "b"] and list(records[0]["runs"]) == ["c", "a", "b"]
    assert list(records[1]["runs"]) == ["a", "b", "c"]


def test_a_difference_is_measured_where_the_tokens_part(settings):
    asked = []

    def gap(*arguments):
        asked.append(arguments)
        return 0.5

    outputs = {"a": (1, 2, 3), "same": (1, 2, 3), "other": (1, 9, 3), "short": (1,)}
    contenders = [Scripted(name, [], ids) for name, ids in outputs.items()]
    record = next(measure.measure(contenders, settings(), ROWS, gap=gap))
    assert record["gaps"] == {"other": [0.5], "short": [None]}
    assert asked == [([1, 2], [1], 9, 2)]
    assert next(measure.measure(contenders, settings(), ROWS))["gaps"] == {}


def test_an_engine_of_ours_reports_what_generate_did(tiny_lm, settings):
    lookup = settings().contenders[1]
    prompts = [tiny_lm.encode("the quick brown fox the quick brown"), tiny_lm.encode("a cat")]
    measured = Parallax(tiny_lm, lookup, settings().decoding).run(prompts, (4, 9), 3)
    run = tiny_lm.generate(prompts, method="prompt_lookup", max_new_tokens=8, batch_size=2)
    assert measured.ids == [list(c.ids) for c in run.completions]
    assert measured.forwards == [c.target_forwards for c in run.completions]
    assert measured.accepted == sum(c.accepted for c in run.completions)
    assert measured.proposed == sum(c.proposed for c in run.completions) > 0
    assert measured.accepted_at == [sum(at) for at in zip(*(c.accepted_at for c in run.completions))]
    assert measured.guarantee == "exact" and measured.prefill > 0 and measured.decode > 0


def test_the_noise_of_a_prompt_is_that_of_its_place_in_the_file(tiny_lm, settings):
    decoding = {**settings().decoding, "temperature": 1.0}
    engine = Parallax(tiny_lm, Contender("autoregressive", "autoregressive"), decoding)
    prompt = tiny_lm.encode("the town")
    ids = {(row, seed): engine.run([prompt], (row,), seed).ids for row in (0, 5) for seed in (1, 2)}
    assert len({str(value) for value in ids.values()}) == 4
    assert engine.run([prompt], (5,), 2).ids == ids[5, 2]


def test_a_bench_of_ours_compiles_once_per_prompt_bucket(tiny_lm, settings):
    few = settings(repeats=1)
    few = dataclasses.replace(few, decoding={**few.decoding, "max_new_tokens": 5})          # a shape of its own
    rows = [[tiny_lm.encode("a cat"), tiny_lm.encode("a dog")], [tiny_lm.encode("the town"), [5] * 40]]
    records = list(measure.measure(engines(tiny_lm, few), few, rows))
    assert [record["runs"]["lookup"]["compile"] > 0 for record in records] == [True, False, False, True]
    assert all(record["runs"]["lookup"]["ids"] == record["runs"]["autoregressive"]["ids"] for record in records)


def test_the_gap_is_that_of_the_logits(tiny_lm):
    prompt = tiny_lm.encode("the lazy dog")
    ids = tiny_lm.generate([prompt], method="autoregressive", max_new_tokens=3).completions[0].ids
    best = ids[2]
    assert logit_gap(tiny_lm, prompt, ids[:2], best, best) == 0.0
    gaps = [logit_gap(tiny_lm, prompt, ids[:2], best, other) for other in (3, 17)]
    assert min(gaps) > 0 and gaps[0] != pytest.approx(gaps[1])
