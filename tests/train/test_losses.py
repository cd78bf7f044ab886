"""Losses and position weights against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.train import losses

P, Q = np.asarray([0.5, 0.3, 0.2]), np.asarray([0.2, 0.2, 0.6])
KL = 0.5 * np.log(2.5) + 0.3 * np.log(1.5) + 0.2 * np.log(1 / 3)
REVERSE = 0.2 * np.log(0.4) + 0.2 * np.log(2 / 3) + 0.6 * np.log(3)
ALPHA = 0.2 + 0.2 + 0.2
BY_HAND = {"ce": -np.log(0.6), "forward_kl": KL, "reverse_kl": REVERSE, "tv": 1 - ALPHA, "nla": -np.log(ALPHA),
           "lk_hybrid": np.exp(-3 * ALPHA) * KL + (1 - np.exp(-3 * ALPHA)) * (1 - ALPHA)}


def test_every_loss_has_a_number_worked_out_by_hand():
    assert set(BY_HAND) == set(losses.LOSSES)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_a_loss_is_the_number_worked_out_by_hand(name):
    value = losses.LOSSES[name](jnp.log(P), jnp.log(Q), jnp.asarray(2))
    assert float(value) == pytest.approx(BY_HAND[name], rel=1e-5)


@pytest.mark.parametrize("name", [name for name in losses.LOSSES if name != "ce"])
def test_a_divergence_is_zero_with_zero_gradient_where_the_laws_agree(name):
    def loss(logits):
        return losses.LOSSES[name](jnp.log(P), jax.nn.log_softmax(logits), jnp.asarray(0))

    at = jnp.log(P) + 3.0                                       # the same law from other logits
    assert float(loss(at)) == pytest.approx(0, abs=1e-6)
    if name not in ("tv", "nla", "lk_hybrid"):                  # these have a kink there
        np.testing.assert_allclose(jax.grad(loss)(at), 0, atol=1e-6)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_descending_a_loss_raises_the_acceptance(name):
    """On random laws, where no token stands out: also for cross-entropy, when its tokens come from p."""
    random = np.random.default_rng(1)
    logp = jax.nn.log_softmax(jnp.asarray(random.normal(size=(64, 5)), jnp.float32))
    tokens = jax.random.categorical(jax.random.key(0), logp[0], shape=(2000,))
    logp = jnp.broadcast_to(logp[0], (2000, 5))

    @jax.jit
    def improve(logits):
        def loss(x):
            return losses.LOSSES[name](logp, jnp.broadcast_to(jax.nn.log_softmax(x), logp.shape), tokens).mean()
        return jax.lax.fori_loop(0, 200, lambda _, x: x - 0.2 * jax.grad(loss)(x), logits)

    start = jnp.asarray(random.normal(size=5), jnp.float32)
    before, after = (float(losses.acceptance(logp[0], jax.nn.log_softmax(x))) for x in (start, improve(start)))
    assert after > 0.93 > before


def test_the_hybrid_does_not_learn_through_its_share():
    def grad(loss):
        return jax.grad(lambda x: loss(jnp.log(P), jax.nn.log_softmax(x), jnp.asarray(0)))(jnp.log(Q))

    share = np.exp(-3 * ALPHA)
    expected = share * grad(losses.forward_kl) + (1 - share) * grad(losses.total_variation)
    np.testing.assert_allclose(grad(losses.lk_hybrid), expected, atol=1e-6)


@pytest.mark.parametrize("name, decay, expected", [
    ("uniform", 0.8, [1, 1, 1]),
    ("power", 0.5, [1, 0.5, 0.25]),
    ("exponential", 4.0, [1, np.exp(-0.25), np.exp(-0.5)]),
    ("prospective", 0.5, [0.75 + 0.75 * 0.6 + 0.75 * 0.6 * 0.9, 0.75 * 0.6 + 0.75 * 0.6 * 0.9, 0.75 * 0.6 * 0.9]),
])
def test_position_weights_are_those_worked_out_by_hand_and_have_mean_one(name, decay, expected):
    alpha = jnp.asarray([0.5, 0.2, 0.8])
    weights = losses.position_weights(name, alpha, decay)
    np.testing.assert_allclose(weights, np.asarray(expected) / np.mean(expected), rtol=1e-5)


def test_no_gradient_flows_through_prospective_weights():
    grad = jax.grad(lambda a: losses.position_weights("prospective", a, 0.5)[0])(jnp.asarray([0.5, 0.2, 0.8]))
    np.testing.assert_array_equal(grad, 0)


def test_along_a_text_the_weights_repeat_every_draft_and_start_anywhere():
    starts = set()
    for seed in range(12):
        weights = np.asarray(losses.by_depth("power", jnp.full((2, 9), 0.5), 0.5, 3, jax.random.key(seed)))
        np.testing.assert_allclose(weights[:, 3:], weights[:, :-3], rtol=1e-5)
        starts.add(int(weights[0, :3].argmax()))
    assert starts == {0, 1, 2}


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown loss .forward-kl.: .*; did you mean .forward_kl."):
        losses.check("forward-kl", "uniform")
    with pytest.raises(ValueError, match="unknown position weight 'expo': expected one of uniform"):
        losses.check("tv", "expo")
