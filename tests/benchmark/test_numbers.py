"""Each number against one computed by hand."""

import pytest

from parallax.benchmark import expected, numbers, tables


@pytest.fixture
def pair(record, run):
    """Two prompts, the second of which is one token over and over."""
    counts = [dict(forwards=[4], accepted=4, proposed=12, accepted_at=[3, 1], proposed_at=[4, 3], rows=16),
              dict(forwards=[3], accepted=3, proposed=9, accepted_at=[3, 0], proposed_at=[3, 3], rows=12)]
    texts, plain, fast = [range(8), [5] * 6], [0.8, 0.6], [0.4, 0.6]
    return [record(run(text, decode=slow), (i,), m=run(text, decode=quick, **count))
            for i, (text, slow, quick, count) in enumerate(zip(texts, plain, fast, counts))]


def test_every_number_is_what_its_definition_says(pair):
    n = numbers.numbers(pair, "m", "code")
    assert (n.prompts, n.method, n.guarantee, n.prompt_count, n.runs) == ("code", "m", "exact", 2, 2)
    assert (n.tokens, n.forwards, n.rows, n.draft_forwards) == (14, 7, 28, 0)
    assert n.tokens_per_forward == 2.0
    assert n.speedup == pytest.approx(1.4 / 1.0)
    assert (n.speedup_by_run.median, n.speedup_by_run.low, n.speedup_by_run.high) == pytest.approx((1.5, 1.1, 1.9))
    assert n.step_cost == pytest.approx(1.0 / 7 / 0.1)
    assert n.tokens_per_forward / n.step_cost == pytest.approx(n.speedup)
    assert (n.ms_per_token.median, n.ms_per_token.low) == pytest.approx((75, 55))
    assert n.tokens_per_second == pytest.approx(14)
    assert n.prefill_ms.median == pytest.approx(100)
    assert (n.shares.prefill, n.shares.plain, n.shares.rest) == pytest.approx((200 / 14, 700 / 14, 300 / 14))
    assert n.acceptance == pytest.approx(7 / 21)
    assert n.acceptance_at == pytest.approx((6 / 7, 1 / 6))
    assert n.accepted_per_forward == 1.0
    assert n.accepted_steps == (1, 5, 1)
    assert n.distinct_4grams == pytest.approx((1 + 1 / 3) / 2)
    assert n.equal == numbers.Equality(True, 2, 2)


def test_plain_decoding_is_the_reference_and_drafts_nothing(pair):
    n = numbers.numbers(pair, "autoregressive", "code")
    assert n.speedup == n.tokens_per_forward == n.step_cost == 1.0
    assert n.acceptance is n.accepted_per_forward is n.equal is None and n.accepted_steps == ()
    assert n.shares.rest == pytest.approx(0)


def test_an_engine_that_counts_nothing_has_only_times(record, run):
    n = numbers.numbers([record(run(range(8), decode=0.8), other={
        **run(range(8), decode=1.6), "forwards": None, "accepted": None, "proposed": None, "guarantee": None})],
        "other", "code")
    assert n.speedup == 0.5 and n.ms_per_token.median == pytest.approx(200)
    assert n.forwards is n.tokens_per_forward is n.step_cost is n.shares is n.acceptance is n.guarantee is None


def test_times_are_per_token_where_lengths_differ(record, run):
    n = numbers.numbers([record(run(range(8), decode=0.8), m=run(range(4), decode=0.2, guarantee="distribution"))],
                        "m", "code")
    assert n.speedup == pytest.approx(2.0) and n.speedup_by_run.median == pytest.approx(2.0)


def test_prompts_decoded_together_share_their_steps(record, run):
    plain = run(range(8), range(4), decode=0.8)                     # 8 steps of 0.1
    fast = run(range(8), range(4), decode=0.6, forwards=[3, 4], accepted=6, proposed=9, accepted_at=[6],
               proposed_at=[6])                                     # 4 steps of 0.15
    n = numbers.numbers([record(plain, (0, 1), m=fast)], "m", "code")
    assert n.prompt_count == 2 and n.runs == 1 and n.tokens_per_forward == 12 / 7
    assert n.step_cost == pytest.approx(1.5) and n.shares.plain == pytest.approx(400 / 12)


def test_results_are_per_file_and_over_all(record, run):
    def one(file, decode):
        return record(run(range(8), decode=0.8), file=file, m=run(range(8), decode=decode, forwards=[4]))
    both = numbers.results([one("code", 0.2), one("chat", 0.8)], ["autoregressive", "m"])
    assert [(n.prompts, n.method) for n in both] == [(file, method) for file in ("code", "chat", None)
                                                     for method in ("autoregressive", "m")]
    assert [n.speedup for n in both[1::2]] == pytest.approx([4.0, 1.0, 1.6])
    assert [n.prompt_count for n in both[1::2]] == [1, 1, 2]
    alone = numbers.results([one("code", 0.2)], ["m"])
    assert [n.prompts for n in alone] == ["code"]


def test_ratios_pair_what_one_unit_holds(record, run):
    """The machine was three times slower in the second repeat; both methods were."""
    slowed = [record(run(range(8), decode=0.8 * slow), repeat=i, m=run(range(8), decode=0.4 * slow))
              for i, slow in enumerate((1, 3))]
    spread = numbers.numbers(slowed, "m", "code").speedup_by_run
    assert (spread.low, spread.median, spread.high) == pytest.approx((2, 2, 2))


def test_a_prompt_is_equal_only_if_it_is_in_every_repeat(record, run):
    plain = run([1, 2, 3, 4], decode=1)
    rows = [record(plain, (3,), 0, m=plain), record(plain, (5,), 0, m=plain),
            record(plain, (3,), 1, m=run([1, 2, 9, 4], decode=1), gaps={"m": [0.25]})]
    assert numbers.equality(rows, "m") == numbers.Equality(True, 1, 2, "code", 3, 2, 0.25)


def test_a_method_that_keeps_the_law_is_not_asked_for_the_tokens(record, run):
    rows = [record(run([1, 2], decode=1), m=run([1, 3], decode=1, guarantee="distribution"))]
    assert not numbers.equality(rows, "m").expected


@pytest.mark.parametrize("ours, theirs, at", [
    ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None)])
def test_outputs_part_where_a_token_or_the_end_differs(ours, theirs, at):
    assert numbers.parting(ours, theirs) == at


@pytest.mark.parametrize("ids, expected", [
    ([1, 2, 3], None), ([1, 2, 3, 4], 1.0), ([7] * 5, 0.5), ([1, 2, 1, 2, 1, 2, 1], 0.5)])
def test_distinct_4grams(ids, expected):
    assert numbers.distinct_4grams(ids) == expected


def test_the_histogram_counts_every_step():
    assert numbers.histogram(10, [6, 6, 1]) == (4, 0, 5, 1)
    assert numbers.histogram(10, []) == (10,)


def test_by_prompt_takes_the_median_over_repeats(record, run):
    rows = [record(run(range(4), decode=1.0), (i,), repeat, m=run(range(4), decode=decode, forwards=[2]))
            for i, times in enumerate(((1.0, 0.5, 0.25), (0.1, 0.1, 0.1))) for repeat, decode in enumerate(times)]
    assert numbers.by_prompt(rows, ["m"]) == [
        {"prompts": "code", "index": [0], "method": "m", "tokens_per_forward": 2.0, "speedup": 2.0},
        {"prompts": "code", "index": [1], "method": "m", "tokens_per_forward": 2.0, "speedup": 10.0}]


def test_the_cost_model_is_told_beside_what_was_counted(run, record):
    records = [record(run([1] * 8, decode=0.08), lookup=run([1] * 8, decode=0.06, forwards=[4], rows=32, accepted=4,
                                                            proposed=28))]
    plain, lookup = (expected.added(row, {"lookup": {"block": 8, "plain": 10.0, "target": 15.0, "drafting": 1.0}})
                     for row in numbers.results(records, ["autoregressive", "lookup"]))
    assert plain.why is None and plain.expected_speedup is None
    assert lookup.expected_speedup == pytest.approx(2 * 10 / 16) and lookup.break_even == pytest.approx(0.6)
    assert "a block of 8 rows takes 1.50 plain steps and drafting 0.10: expected 1.25x" in lookup.why
    assert tables.reasons([plain, lookup]) == {"lookup": lookup.why}
    assert lookup.why in tables.markdown("t", {}, [plain, lookup]) and "1.25x" in tables.markdown("t", {}, [lookup])
