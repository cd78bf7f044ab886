"""Warpers against numpy, noise that speculation cannot change, and the law of what comes out of the loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallax.decoding import Follow, Greedy, Sample, Shape, Speculative, make_decoder, make_sampler, tree
from parallax.decoding.base import policy
from parallax.decoding.sampling import ACCEPT, DRAFT, RESIDUAL, argmax, noise_private, noise_target, row_keys
from parallax.testing import MarkovModel, OracleDrafter, markov_law, p_value, sample_many

SIZE = 7


def kept(logits, temperature=1.0, top_k=0, top_p=None, min_p=None, slack=0.0):
    """Which tokens of one row survive; `slack` widens what depends on rounding."""
    x = np.asarray(logits, float) / temperature
    keep = np.ones(len(x), bool)
    if top_k:
        keep &= x >= sorted(x)[-min(top_k, len(x))]
    share = np.where(keep, np.exp(x - x.max()), 0)
    if top_p is not None:
        share = share / share.sum()
        keep &= [share[x > mine].sum() < top_p + slack or mine == x.max() for mine in x]
    if min_p is not None:
        keep &= share >= share.max() * min_p * (1 - slack)
    return keep


@jax.jit
def _warp(sampler, logits):
    return sampler.warp(logits)


def warp(sampler, logits):
    """Numbers traced, so that one program serves all of them."""
    return np.asarray(_warp(jax.tree.map(jnp.float32, sampler), jnp.asarray(logits, jnp.float32)))


# A coarse grid makes ties common.
rows = st.lists(st.one_of(st.integers(-12, 12).map(lambda i: i / 4), st.sampled_from([-1e30, -60.0, 60.0])),
                min_size=SIZE, max_size=SIZE)


@settings(deadline=None, max_examples=60)
@given(logits=rows, temperature=st.sampled_from([0.25, 1.0, 2.0]), top_k=st.sampled_from([0, 1, 3, SIZE + 5]),
       top_p=st.one_of(st.none(), st.floats(0.01, 1.0)), min_p=st.one_of(st.none(), st.floats(0.001, 1.0)))
def test_warping_keeps_what_numpy_keeps_and_only_divides(logits, temperature, top_k, top_p, min_p):
    ours = warp(Sample(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p), logits)
    keep = np.isfinite(ours)
    least, most = (kept(logits, temperature, top_k, top_p, min_p, slack) for slack in (-1e-5, 1e-5))
    assert (least <= keep).all() and (keep <= most).all()
    assert keep[np.argmax(logits)]
    scaled = np.asarray(logits, np.float32) / temperature
    np.testing.assert_allclose(ours[keep], (scaled - scaled.max())[keep], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings, left", [
    (dict(), [0, 1, 2, 3, 4, 5, 6]),
    (dict(top_k=1), [1]),
    (dict(top_k=2), [1, 2, 4]),                                       # ties with the second stay
    (dict(top_k=99), [0, 1, 2, 3, 4, 5, 6]),
    (dict(top_p=1e-6), [1]),
    (dict(top_p=1e-45), [1]),
    (dict(top_p=1.0), [0, 1, 2, 3, 4, 5, 6]),
    (dict(min_p=1.0), [1]),
    (dict(min_p=0.3), [1, 2, 4]),
    (dict(temperature=1e-30), [0, 1, 2, 3, 4, 5, 6]),
])
def test_warping_at_the_ends_of_the_ranges(settings, left):
    logits = [0.0, 3.0, 2.0, 1.0, 2.0, -1.0, 1.0]
    assert np.flatnonzero(warp(Sample(**settings), logits) > -np.inf).tolist() == left


def test_equal_logits_are_never_split():
    for sampler in (Sample(top_k=1), Sample(top_p=1e-6), Sample(min_p=1.0)):
        assert np.isfinite(warp(sampler, np.full(SIZE, 2.5))).all()


@pytest.mark.parametrize("probabilities, settings, count, other", [
    ([.5, .3, .2], dict(temperature=2.0, top_p=.75), 3, 2),           # top-p in front of the temperature
    ([.4, .3, .2, .1], dict(temperature=2.0, min_p=.8), 2, 1),        # min-p in front of the temperature
    ([.4, .3, .2, .1], dict(top_k=2, top_p=.5), 1, 2),                # top-p in front of top-k
    ([.4, .3, .2, .1], dict(top_p=.5, min_p=.6), 2, 1),               # min-p in front of top-p
])
def test_warpers_come_in_the_documented_order(probabilities, settings, count, other):
    logits = np.log(probabilities).astype(np.float32)
    assert np.isfinite(warp(Sample(**settings), logits)).sum() == count
    for name in reversed(settings):
        logits = warp(Sample(**{name: settings[name]}), logits)
    assert np.isfinite(logits).sum() == other


@settings(deadline=None, max_examples=25)
@given(logits=rows)
def test_top_k_and_min_p_change_nothing_the_second_time_and_top_p_only_drops(logits):
    for sampler in (Sample(top_k=3), Sample(min_p=0.25)):
        once = warp(sampler, logits)
        np.testing.assert_array_equal(warp(sampler, once), once)
    once = warp(Sample(top_p=0.75), logits)
    twice = warp(Sample(top_p=0.75), once)
    assert (np.isfinite(twice) <= np.isfinite(once)).all()


def test_rows_are_warped_each_by_its_own_settings():
    logits = np.random.default_rng(0).normal(size=(3, 2, SIZE)).astype(np.float32) * 2
    samplers = [Sample(temperature=t, top_k=4, top_p=p, min_p=m)
                for t, p, m in ((.5, .9, .1), (1., .5, .01), (2., 1., .5))]
    stacked = jax.tree.map(lambda *leaves: jnp.asarray(leaves, jnp.float32), *samplers)
    together = jax.vmap(lambda sampler, row: sampler.warp(row))(stacked, logits)
    for sampler, row, ours in zip(samplers, logits, together):
        np.testing.assert_allclose(ours, warp(sampler, row), rtol=1e-6)
        np.testing.assert_array_equal(warp(sampler, row)[1], warp(sampler, row[1]))


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 700])
def test_argmax_is_that_of_numpy(size):
    values = np.random.default_rng(size).integers(0, 4, (6, 2, size)).astype(np.float32)
    values[0], values[1], values[2, :, size // 2:] = -np.inf, 0, -np.inf
    np.testing.assert_array_equal(argmax(jnp.asarray(values)), np.argmax(values, -1))


def test_greedy_takes_the_lowest_of_equal_tokens():
    logits = jnp.asarray([[[0., 2, 1, 2], [3, 3, 3, 3]], [[-jnp.inf, -5, -jnp.inf, -5], [0, 0, 0, 1e30]]])
    keys = row_keys(jax.random.key(0), jnp.arange(2))
    tokens = Greedy().draw(logits, keys, jnp.ones(2, jnp.int32), jnp.zeros(2, int), 0)
    assert tokens.tolist() == [[1, 0], [1, 3]]
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize("settings, message", [
    (dict(temperature=-0.1), "temperature must be 0 .* got -0.1"),
    (dict(temperature=float("nan")), "temperature .* nan"),
    (dict(temperature=1, top_k=-1), "top_k .* got -1"), (dict(temperature=1, top_k=2.5), "top_k .* got 2.5"),
    (dict(temperature=1, top_p=0), "top_p .* got 0"), (dict(temperature=1, top_p=1.01), "top_p .* got 1.01"),
    (dict(temperature=1, min_p=-0.01), "min_p .* got -0.01"), (dict(temperature=1, min_p=1.01), "min_p .* got 1.01"),
    (dict(temperature=0, top_p=2), "top_p .* got 2"),
])
def test_settings_outside_their_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_sampler(**settings)


def test_settings_that_keep_everything_are_left_out_of_the_program():
    bare = jax.tree.structure(Sample(temperature=0.7))
    for keeps_all in (dict(), dict(top_k=0, top_p=1.0, min_p=0.0), dict(top_k=None, top_p=None, min_p=None)):
        assert jax.tree.structure(make_sampler(0.7, **keeps_all)) == bare
    assert make_sampler(0.7, 5, 0.9, 0.1) == Sample(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    assert make_sampler() == make_sampler(0, 0, 1.0, 0.0) == Greedy()
    for pointless in (dict(top_k=5), dict(top_p=0.9), dict(min_p=0.1)):
        with pytest.raises(ValueError, match="change nothing at temperature 0"):
            make_sampler(0, **pointless)


def test_a_token_depends_on_key_row_and_position_alone():
    sampler, depth = Sample(temperature=1.3, top_p=0.95), 3
    offsets = np.asarray([0, 1, 1, 2, 3])
    logits = np.random.default_rng(1).normal(size=(3, len(offsets), SIZE)).astype(np.float32)
    names, start = np.asarray([4, 0, 9]), np.asarray([7, 2, 40])
    keys = row_keys(jax.random.key(5), names)
    draw = jax.jit(sampler.draw, static_argnums=4)
    whole = draw(logits, keys, start, offsets, depth)
    alone = [draw(logits[:, i:i + 1], keys, start + offset, np.zeros(1, int), 0)[:, 0]
             for i, offset in enumerate(offsets)]
    np.testing.assert_array_equal(whole, np.stack(alone, 1))
    ragged = draw(logits, keys, start, np.broadcast_to(offsets, (3, 5)), depth + 2)
    np.testing.assert_array_equal(whole, ragged)
    for row in range(3):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(whole[one], draw(logits[one], row_keys(jax.random.key(5), names[one]), start[one],
                                                       offsets, depth))


def test_noise_differs_between_keys_rows_and_positions():
    noise = [noise_target(row_keys(jax.random.key(seed), jnp.arange(4)), jnp.full(4, position), SIZE)
             for seed in (0, 1) for position in (1, 2, 9)]
    assert len(np.unique(np.concatenate(noise))) == 2 * 3 * 4 * SIZE


def test_private_noise_differs_between_steps_positions_and_purposes_and_is_never_the_targets():
    keys = row_keys(jax.random.key(0), jnp.arange(4))
    places = [(start, position) for start in range(4) for position in range(start, start + 3)]
    private = [noise_private(keys, jnp.full(4, start), jnp.full(4, position), tag, SIZE)
               for start, position in places for tag in (DRAFT, ACCEPT, RESIDUAL)]
    target = [noise_target(keys, jnp.full(4, position), SIZE) for position in range(8)]
    assert len(np.unique(np.concatenate(private + target))) == (3 * len(places) + 8) * 4 * SIZE


def test_private_noise_of_a_row_does_not_depend_on_the_others():
    keys, start = row_keys(jax.random.key(1), jnp.asarray([4, 0, 9])), jnp.asarray([3, 7, 2])
    whole = noise_private(keys, start, start + 1, DRAFT, SIZE)
    for row in range(3):
        one = slice(row, row + 1)
        np.testing.assert_array_equal(whole[one], noise_private(keys[one], start[one], start[one] + 1, DRAFT, SIZE))


def test_private_noise_is_independent_of_the_targets():
    keys, start = row_keys(jax.random.key(2), jnp.arange(4000)), jnp.full(4000, 5)
    noise = [noise_target(keys, start, 2), *(noise_private(keys, start, start, tag, 2)
                                             for tag in (DRAFT, ACCEPT, RESIDUAL))]
    assert np.abs(np.corrcoef(np.concatenate(noise, 1).T) - np.eye(8)).max() < 0.07


# The law of whole texts. A chi-square with p below 1e-6 is no accident, and the seeds are fixed.

TABLE = np.asarray([[0.3, 1.1, 0.0], [0.9, -0.2, 0.4], [0.1, 0.2, 1.2]], np.float32)
DRAWS, NEW, PROMPT = 4000, 3, [0, 1, 2, 0]
SAMPLERS = {
    "plain": Sample(), "cold": Sample(temperature=0.6), "top_k": Sample(top_k=2), "top_p": Sample(top_p=0.8),
    "min_p": Sample(min_p=0.45), "all": Sample(temperature=1.5, top_k=2, top_p=0.99, min_p=0.1),
}
MODEL, TARGET = MarkovModel.create(TABLE)
# Always the same tokens, right or wrong: two branches, each two deep.
FIXED = OracleDrafter(shape=Shape.paths([(0,), (1,), (0, 0), (1, 0)]), right=(True, True))
PARAMS = {"target": TARGET, "draft": np.ones((1, len(PROMPT) + NEW), np.int32)}


def _decoder(name, sampler):
    if name == "oracle":
        return Speculative(model=MODEL, drafter=FIXED, verifier=Follow(sampler=sampler))
    options = {"prompt_lookup": dict(draft_length=2), "token_recycling": dict(nodes=4, max_depth=2, ranks=2)}
    return make_decoder(name, MODEL, sampler=sampler, **options.get(name, {}))


def law(sampler):
    """Of NEW tokens behind PROMPT."""
    warped = np.stack([np.where(kept(row, sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p),
                                np.exp(row / sampler.temperature), 0) for row in TABLE])
    return markov_law(warped / warped.sum(1, keepdims=True), PROMPT[-1], NEW)


@pytest.mark.parametrize("name", SAMPLERS)
def test_plain_decoding_draws_from_the_warped_law(name):
    sampler = SAMPLERS[name]
    assert p_value(sample_many(_decoder("autoregressive", sampler), PARAMS, PROMPT, NEW, DRAWS), law(sampler)) > 1e-6


@pytest.mark.parametrize("name", ["prompt_lookup", "token_recycling", "oracle"])
def test_drafts_change_neither_the_law_nor_a_single_token(name):
    sampler = SAMPLERS["plain"]
    ours = sample_many(_decoder(name, sampler), PARAMS, PROMPT, NEW, DRAWS)
    np.testing.assert_array_equal(ours, sample_many(_decoder("autoregressive", sampler), PARAMS, PROMPT, NEW, DRAWS))
    assert p_value(ours, law(sampler)) > 1e-6


@policy
class PerPath(Follow):
    """Wrong: draws the target's tokens anew for each path, and takes the path that gets furthest."""

    def __call__(self, draft, logits, hidden, ctx):
        parents = draft.parents
        leaves = [node for node in range(len(parents)) if node not in parents[1:]]
        above = tree.ancestors(parents, draft.depth)
        verdicts = []
        for leaf in leaves:
            own = ctx._replace(key=jax.vmap(jax.random.fold_in, (0, None))(ctx.key, leaf))
            verdicts.append(Follow.__call__(self, draft.replace(valid=draft.valid & above[leaf]), logits, hidden, own))
        best = jnp.argmax(jnp.stack([verdict.count for verdict in verdicts]), 0)
        return jax.tree.map(lambda *parts: jax.vmap(lambda part, i: part[i], (1, 0))(jnp.stack(parts), best), *verdicts)


def test_one_draw_per_path_instead_of_one_per_node_is_found_out():
    sampler = SAMPLERS["plain"]
    wrong = dataclasses.replace(_decoder("oracle", sampler), verifier=PerPath(sampler=sampler))
    assert p_value(sample_many(wrong, PARAMS, PROMPT, NEW, DRAWS), law(sampler)) < 1e-6
    assert p_value(sample_many(_decoder("oracle", sampler), PARAMS, PROMPT, NEW, DRAWS), law(SAMPLERS["cold"])) < 1e-6
