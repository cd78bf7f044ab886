"""The law of rejection sampling: by exact enumeration, and of whole texts through the compiled loop."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.decoding import Draft, DraftModel, Greedy, Rejection, Sample, Shape, Speculative, make_decoder
from parallax.decoding.base import policy
from parallax.decoding.verify import judge
from parallax.testing import MarkovModel, markov_law, p_value, run_many, sample_many

# Enumeration. Probabilities are sixths, so that p / q is a multiple of 1/60, and the middles of 60 equal stretches of
# [0, 1) stand for all uniform noise there is.
SIZE, SIXTHS, GRID = 3, 6, 60
SINGLE = np.asarray([1.0, 0, 0])


def laws(seed, *shape):
    """Random laws [*shape, SIZE] of sixths, often with zeros."""
    random = np.random.default_rng(seed)
    weights = random.dirichlet(np.ones(SIZE) * random.choice([0.3, 1, 5]), shape)
    return np.apply_along_axis(lambda w: random.multinomial(SIXTHS, w), -1, weights) / SIXTHS


def tables(seed):
    """Laws of a target over three tokens (first, behind each token, behind each pair), and of a draft over two."""
    p = [laws(seed, *(SIZE,) * depth) for depth in range(3)]
    q = [laws(seed + 1000, *(SIZE,) * depth) for depth in range(2)]
    kind = seed % 6
    if kind == 1:
        q = p[:2]                                                          # always right
    elif kind == 2:
        p, q = [np.roll(x, 1, -1) for x in p], [x * 0 + SINGLE for x in q]  # always the same token
    elif kind == 3:
        p = [x * 0 + SINGLE for x in p]                                    # only one token is right
    elif kind == 4:
        p, q = [x * 0 + SINGLE for x in p], [x * 0 + SINGLE[::-1] for x in q]         # never right
    return p, q


def log(x):
    with np.errstate(divide="ignore"):
        return np.log(x, dtype=np.float32)


_judge = jax.jit(judge)


def enumerated(p, q, valid=None, logged=lambda logq: logq, judge=_judge):
    """(law of the next three tokens, mean number of kept drafts), over all drafts of two tokens and all noise.

    Args:
      p, q: `tables`.
      valid: of the drafted tokens, as a function of (their probability under q [.., 2]); all by default.
      logged: what the draft says of its law.
    """
    first, second = (x.ravel() for x in np.mgrid[:SIZE, :SIZE])
    draws = np.stack([q[0][first], q[1][first, second]], 1)
    ok = np.ones_like(draws, bool) if valid is None else valid(draws)
    uniform = (np.mgrid[:GRID, :GRID].reshape(2, -1).T + 0.5) / GRID

    def repeated(x):
        return jnp.asarray(np.repeat(x, len(uniform), 0))

    logq = np.stack([np.broadcast_to(log(q[0]), (len(first), SIZE)), log(q[1])[first]], 1)
    drafts = Draft(repeated(np.stack([first * 0, first, second], 1)), Shape.chain(2).parents,
                   repeated(np.concatenate([ok[:, :1] | True, ok], 1)), depth=2, kind="sampled",
                   logq=repeated(logged(logq)))
    warped = np.stack([np.broadcast_to(log(p[0]), (len(first), SIZE)), log(p[1])[first], log(p[2])[first, second]], 1)
    kept, weights = judge(drafts, repeated(warped + 3), jnp.tile(jnp.asarray(uniform, jnp.float32), (len(first), 1)))
    kept = np.asarray(kept).reshape(len(first), -1)
    weights = np.asarray(weights, float).reshape(len(first), -1, SIZE)
    weights /= weights.sum(-1, keepdims=True)
    law, mean = np.zeros((SIZE,) * 3), 0.0
    for i, (x, y) in enumerate(zip(first, second)):
        share = q[0][x] * q[1][x, y]
        if not share:
            continue
        after = [share * np.where(kept[i][:, None] == k, weights[i], 0).mean(0) for k in range(3)]
        law += after[0][:, None, None] * p[1][:, :, None] * p[2]
        law[x] += after[1][:, None] * p[2][x]
        law[x, y] += after[2]
        mean += share * kept[i].mean()
    return law, mean


def distance(law, p):
    return np.abs(law - p[0][:, None, None] * p[1][:, :, None] * p[2]).sum() / 2


@pytest.mark.parametrize("seed", range(24))
def test_the_law_is_the_targets_for_all_tables(seed):
    p, q = tables(seed)
    law, kept = enumerated(p, q)
    assert distance(law, p) < 1e-5
    first, both = np.minimum(p[0], q[0]), np.minimum(p[1], q[1]).sum(-1)
    assert kept == pytest.approx(first.sum() + first @ both, abs=1e-5)      # the overlaps along the chain


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_the_law_is_the_targets_where_tokens_are_missing(seed, length):
    p, q = tables(seed)
    law, kept = enumerated(p, q, valid=lambda draws: np.broadcast_to(np.arange(2) < length, draws.shape))
    assert distance(law, p) < 1e-5
    assert kept == pytest.approx(np.minimum(p[0], q[0]).sum() * length, abs=1e-5)


def worst(**changes):
    """The largest distance over some of the random tables."""
    return max(distance(enumerated(*tables(seed), **changes)[0], tables(seed)[0]) for seed in (0, 5, 6, 11))


def test_a_law_logged_at_another_temperature_is_found_out():
    assert worst() < 1e-5
    assert worst(logged=lambda logq: np.asarray(jax.nn.log_softmax(logq / 2, -1))) > 0.05


def test_dropping_a_drafted_token_because_it_looks_weak_is_found_out():
    assert worst(valid=lambda draws: np.cumprod(draws >= 0.4, 1) > 0) > 0.05


def test_drawing_anew_from_the_target_instead_of_the_residual_is_found_out():
    def wrong(draft, warped, uniform):
        kept, _ = _judge(draft, warped, uniform)
        return kept, jnp.exp(jnp.take_along_axis(warped, kept[:, None, None], 1)[:, 0])

    assert worst(judge=wrong) > 0.05


def one(logq, warped, uniform, token=0):
    """Of one drafted token."""
    draft = Draft(jnp.asarray([[0, token]]), (0, 0), jnp.ones((1, 2), bool), depth=1, kind="sampled",
                  logq=jnp.asarray([[logq]], jnp.float32))
    kept, weights = _judge(draft, jnp.asarray([warped], jnp.float32), jnp.asarray([[uniform]], jnp.float32))
    return int(kept[0]), np.asarray(weights[0])


def test_a_rejected_token_of_an_equal_law_is_drawn_anew_from_the_target():
    logp = [0.0, -np.inf, -np.inf]
    kept, weights = one(logp, [logp, logp], uniform=2.0)                   # no noise is that large
    assert kept == 0 and weights.tolist() == [1, 0, 0]


def test_a_draft_model_that_computes_no_numbers_leaves_the_target_alone():
    kept, weights = one([np.nan] * 3, [log([0.5, 0.25, 0.25])] * 2, uniform=0.0)
    assert kept == 0
    np.testing.assert_allclose(weights, [0.5, 0.25, 0.25], rtol=1e-6)


def test_tokens_that_the_target_excludes_are_never_kept_and_tiny_probabilities_are_compared_as_they_are():
    assert one(log([1, 0, 0]), [[-np.inf, 0, 0]] * 2, uniform=0.0)[0] == 0
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


def test_a_greedy_verifier_and_trees_are_refused():
    sampler = SAMPLERS["plain"]
    drafter = DraftModel(model=DRAFT, sampler=sampler, kind="sampled")
    with pytest.raises(ValueError, match="temperature above 0: at temperature 0 use Follow, which is the same"):
        rejecting(drafter, Greedy()).check()
    tree = Draft(jnp.zeros((1, 3), int), (0, 0, 0), jnp.ones((1, 3), bool), depth=1, kind="sampled")
    with pytest.raises(ValueError, match="verifies chains, this draft is a tree"):
        Rejection(sampler=sampler)(tree, jnp.zeros((1, 3, SIZE)), jax.random.split(jax.random.key(0), 1), jnp.ones(1))
