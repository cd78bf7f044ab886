"""Rejection sampling of chains: its law by exact enumeration, and of whole texts through the compiled loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Draft, DraftModel, Greedy, Rejection, Sample, Shape, Speculative, make_decoder
from parallax.decoding.base import policy
from parallax.testing import (
    MarkovModel,
    Source,
    Tables,
    enumerate_law,
    markov_law,
    p_value,
    random_tables,
    run_many,
    sample_many,
)

RULE, CHAIN = Rejection(sampler=Sample()), Shape.chain(2)


def overlaps(tables):
    """Mean number of tokens that rejection keeps of a chain of two: what the laws have in common."""
    first, both = np.minimum(tables.p[0], tables.q[0]), np.minimum(tables.p[1], tables.q[1]).sum(-1)
    return first.sum(-1), (first * both).sum(-1)


def test_the_law_is_the_targets_and_what_is_kept_is_the_overlap_for_all_tables():
    tables = random_tables()
    law = enumerate_law(RULE, CHAIN, tables)
    assert law.tv.max() < 1e-9
    np.testing.assert_allclose(law.accepted, sum(overlaps(tables)), atol=1e-9)


def test_the_law_is_the_targets_for_laws_that_are_certain_equal_or_apart():
    p, q = random_tables(1, 1)
    one = np.asarray([1.0, 0, 0])
    sides = [([x * 0 + one for x in p], [x * 0 + one for x in q], 2), ([x * 0 + one for x in p], q, None),
             (p, [x * 0 + one for x in q], None), ([x * 0 + one for x in p], [x * 0 + one[::-1] for x in q], 0),
             (p, p[:2], 2)]
    for p, q, accepted in sides:
        law = enumerate_law(RULE, CHAIN, Tables(tuple(p), tuple(q)))
        assert law.tv.max() < 1e-9
        assert accepted is None or law.accepted == pytest.approx(accepted)


@pytest.mark.parametrize("length", [0, 1])
def test_the_law_is_the_targets_where_tokens_are_missing(length):
    tables = random_tables(count=6)
    law = enumerate_law(RULE, Source(CHAIN, valid=lambda chances: jnp.arange(3) <= length), tables)
    assert law.tv.max() < 1e-9
    np.testing.assert_allclose(law.accepted, overlaps(tables)[0] * length, atol=1e-9)


@policy
class Redrawing(Rejection):
    """Wrong: draws anew from the target, not from the residual."""

    def judge(self, draft, logp, uniform):
        judged = super().judge(draft, logp, uniform)
        weights = jnp.exp(jnp.take_along_axis(logp, judged.node[:, None, None], 1)[:, 0])
        return judged._replace(weights=weights)


def test_drawing_anew_from_the_target_instead_of_the_residual_is_found_out():
    assert enumerate_law(Redrawing(sampler=Sample()), CHAIN, random_tables(count=6)).tv.max() > 0.05


_judge = jax.jit(RULE.judge)


def log(x):
    with np.errstate(divide="ignore"):
        return np.log(x, dtype=np.float32)


def one(logq, logp, uniform, token=0):
    """Of one drafted token: (kept, law of the next token)."""
    draft = Draft(jnp.asarray([[0, token]]), (0, 0), jnp.ones((1, 2), bool), depth=1, kind="sampled",
                  logq=jnp.asarray([[logq]], jnp.float32))
    judged = _judge(draft, jnp.asarray([logp], jnp.float32), jnp.full((1, 2), uniform))
    return int(judged.node[0]), np.asarray(judged.weights[0])


def test_a_rejected_token_of_an_equal_law_is_drawn_anew_from_the_target():
    logp = [0.0, -np.inf, -np.inf]
    kept, weights = one(logp, [logp, logp], uniform=2.0)                   # no noise is that large
    assert kept == 0 and weights.tolist() == [1, 0, 0]


def test_a_draft_model_that_computes_no_numbers_leaves_the_target_alone():
    kept, weights = one([np.nan] * 3, [log([0.5, 0.25, 0.25])] * 2, uniform=0.0)
    assert kept == 0
    np.testing.assert_allclose(weights, [0.5, 0.25, 0.25], rtol=1e-6)


def test_tokens_that_the_target_excludes_are_never_kept_and_tiny_probabilities_are_compared_as_they_are():
    assert one(log([0.5, 0.5, 0]), [log([0, 0.5, 0.5])] * 2, uniform=0.0)[0] == 0
    tiny = [-120.0, -60.0, 0.0]                                            # e^-120 is no float32
    assert one(tiny, [[-110, -60, 0.0]] * 2, uniform=0.9)[0] == 1
    assert one(tiny, [[-121, -60, 0.0]] * 2, uniform=0.9)[0] == 0


# Whole texts through the compiled loop. A chi-square with p below 1e-6 is no accident, and the seeds are fixed.

TABLE = np.asarray([[0.3, 1.1, 0.0], [0.9, -0.2, 0.4], [0.1, 0.2, 1.2]], np.float32)
GUESS = np.asarray([[1.2, 0.1, 0.3], [0.5, 0.6, -0.9], [1.0, -0.4, 0.2]], np.float32)
DRAWS, NEW, PROMPT = 4000, 3, [0, 1, 2, 0]
MODEL, TARGET = MarkovModel.create(TABLE)
DRAFT, WEIGHTS = MarkovModel.create(GUESS)
PARAMS = {"target": TARGET, "draft": WEIGHTS}
SAMPLERS = {"plain": Sample(), "cold": Sample(temperature=0.6),
            "all": Sample(temperature=1.5, top_k=2, top_p=0.99, min_p=0.1)}


def decoder(sampler, **options):
    return make_decoder("draft_model", MODEL, sampler=sampler, draft=DRAFT, **{"draft_length": 2, **options})


def rejecting(drafter, sampler):
    return Speculative(model=MODEL, drafter=drafter, verifier=Rejection(sampler=sampler))


def warped(table, sampler):
    return np.asarray(jax.nn.softmax(sampler.warp(jnp.asarray(table)), -1))


def law(sampler):
    return markov_law(warped(TABLE, sampler), PROMPT[-1], NEW)


@functools.cache
def drawn(name):
    return sample_many(decoder(SAMPLERS[name], verifier="rejection"), PARAMS, PROMPT, NEW, DRAWS)


@pytest.mark.parametrize("name", SAMPLERS)
def test_texts_have_the_law_of_plain_sampling(name):
    assert p_value(drawn(name), law(SAMPLERS[name])) > 1e-6


def test_the_test_of_the_law_tells_samplers_apart():
    assert p_value(drawn("plain"), law(SAMPLERS["cold"])) < 1e-6


@pytest.mark.parametrize("drafts", [Sample(temperature=0.4), Sample(top_k=1)])
def test_the_draft_may_be_drawn_in_any_way_as_long_as_its_law_is_told(drafts):
    ours = rejecting(DraftModel(model=DRAFT, sampler=drafts, draft_length=2, kind="sampled"), SAMPLERS["plain"])
    assert p_value(sample_many(ours, PARAMS, PROMPT, NEW, DRAWS), law(SAMPLERS["plain"])) > 1e-6


@policy
class Mislogged(DraftModel):
    """Wrong: says that its tokens were drawn at twice their temperature."""

    def propose(self, params, own, ctx):
        draft, own = super().propose(params, own, ctx)
        return draft.replace(logq=jax.nn.log_softmax(draft.logq / 2, -1)), own


def test_a_draft_that_says_another_law_than_it_was_drawn_from_is_found_out():
    wrong = rejecting(Mislogged(model=DRAFT, sampler=Sample(temperature=0.5), draft_length=2, kind="sampled"),
                      SAMPLERS["plain"])
    assert p_value(sample_many(wrong, PARAMS, PROMPT, NEW, DRAWS), law(SAMPLERS["plain"])) < 1e-6


def accepted(ours):
    """Fraction of first and second tokens of a draft that were accepted, over one step."""
    info = run_many(ours, PARAMS, PROMPT, 1, DRAWS).info
    assert (info.target_forwards == 1).all() and (info.proposed == 2).all()
    return info.accepted_at[:, 0].mean(0)


def test_the_accepted_fraction_is_the_overlap_of_the_two_laws():
    sampler = SAMPLERS["plain"]
    p, q = warped(TABLE, sampler), warped(GUESS, sampler)
    overlap, both = np.minimum(p, q), p * q
    ours = accepted(decoder(sampler, verifier="rejection"))
    noise = 4 * 0.5 / np.sqrt(DRAWS)
    assert np.abs(ours - [overlap[0].sum(), overlap[0] @ overlap.sum(1)]).max() < noise
    apart = DraftModel(model=DRAFT, sampler=sampler, draft_length=2, kind="sampled")
    following = accepted(dataclasses.replace(decoder(sampler), drafter=apart))
    assert np.abs(following - [both[0].sum(), both[0] @ both.sum(1)]).max() < noise
    coupled = accepted(decoder(sampler))                                   # the same noise brings the two together
    assert (following + 2 * noise < coupled).all() and (coupled < ours + noise).all()


def test_the_guarantee_is_the_law_and_not_the_tokens():
    ours = decoder(SAMPLERS["plain"], verifier="rejection")
    assert (ours.guarantee, ours.drafter.kind) == ("distribution", "sampled")
    plain = sample_many(make_decoder("autoregressive", MODEL, sampler=SAMPLERS["plain"]), PARAMS, PROMPT, NEW, DRAWS)
    assert (drawn("plain") != plain).any(1).mean() > 0.2


@pytest.mark.parametrize("kind", ["coupled", "sampled"])
def test_following_the_same_drafts_gives_the_tokens_of_plain_sampling(kind):
    sampler = SAMPLERS["all"]
    drafter = DraftModel(model=DRAFT, sampler=sampler, draft_length=2, kind=kind)
    ours = dataclasses.replace(decoder(sampler), drafter=drafter)
    plain = make_decoder("autoregressive", MODEL, sampler=sampler)
    np.testing.assert_array_equal(sample_many(ours, PARAMS, PROMPT, NEW, 200),
                                  sample_many(plain, PARAMS, PROMPT, NEW, 200))


def test_at_temperature_zero_rejection_is_following():
    ours = decoder(Greedy(), verifier="rejection")
    assert ours == decoder(Greedy()) and ours.guarantee == "exact" and ours.drafter.kind == "deterministic"


@pytest.mark.parametrize("kind", ["deterministic", "coupled"])
def test_drafts_without_a_law_of_their_own_are_refused(kind):
    sampler = SAMPLERS["plain"]
    with pytest.raises(ValueError, match=f"Rejection cannot verify a {kind} draft: it takes sampled"):
        rejecting(DraftModel(model=DRAFT, sampler=sampler, kind=kind), sampler).check()


def test_a_greedy_verifier_and_a_draft_without_its_law_are_refused():
    sampler = SAMPLERS["plain"]
    drafter = DraftModel(model=DRAFT, sampler=sampler, kind="sampled")
    with pytest.raises(ValueError, match="temperature above 0: at temperature 0 use Follow, which is the same"):
        rejecting(drafter, Greedy()).check()
    unknown = Draft(jnp.zeros((1, 3), int), CHAIN.parents, jnp.ones((1, 3), bool), depth=2, kind="sampled")
    with pytest.raises(ValueError, match="no logq .q missing.: log the law that its tokens were drawn from"):
        Rejection(sampler=sampler).check(unknown)
