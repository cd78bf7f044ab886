"""What a draft position costs: losses between the target's law and the drafter's, and the weight of each position.

V vocabulary, K draft depth. Every loss takes logp and logq, log-probabilities [..., V], and tokens [...], and gives a
number per position [...], zero when the two laws agree (cross-entropy apart). Every position weight takes alpha
[..., K] and its own number `decay`, and gives [..., K]. The divergences are those that DistillSpec (arXiv:2310.08461)
compares; `nla` and `lk_hybrid` are the speculators project's.

Notation: p the target's law, q the drafter's, alpha = sum_x min(p, q) the chance that rejection sampling accepts.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

from parallax.models.config import nearest


def acceptance(logp: Float[Array, "*lead V"], logq: Float[Array, "*lead V"]) -> Float[Array, "*lead"]:
    """alpha = sum_x min(p(x), q(x)) = 1 - TV(p, q): the chance that rejection sampling accepts a draft from q."""
    return jnp.exp(jnp.minimum(logp, logq)).sum(-1)


def cross_entropy(logp, logq, tokens):
    """-log q(token): the token in the text, whatever else the target found likely."""
    return optax.losses.softmax_cross_entropy_with_integer_labels(logq, tokens)


def forward_kl(logp, logq, tokens):
    """KL(p || q): q covers all that p does."""
    return (jnp.exp(logp) * (logp - logq)).sum(-1)


def reverse_kl(logp, logq, tokens):
    """KL(q || p): q stays where p is large."""
    return (jnp.exp(logq) * (logq - logp)).sum(-1)


def total_variation(logp, logq, tokens):
    """1 - alpha, the chance of a rejection itself."""
    return 1 - acceptance(logp, logq)


def negative_log_acceptance(logp, logq, tokens):
    """-log alpha: as the total variation, with gradients that do not vanish where little is accepted."""
    return -jnp.log(jnp.maximum(acceptance(logp, logq), 1e-9))


def lk_hybrid(logp, logq, tokens):
    """s KL(p || q) + (1 - s)(1 - alpha) with the share s = exp(-3 alpha): learns the law first, then acceptance."""
    alpha = acceptance(logp, logq)
    share = lax.stop_gradient(jnp.exp(-3 * alpha))
    return share * forward_kl(logp, logq, tokens) + (1 - share) * (1 - alpha)


Loss = Callable[[Float[Array, "*lead V"], Float[Array, "*lead V"], Int[Array, "*lead"]], Float[Array, "*lead"]]

LOSSES: dict[str, Loss] = {"ce": cross_entropy, "forward_kl": forward_kl, "reverse_kl": reverse_kl,
                           "tv": total_variation, "nla": negative_log_acceptance, "lk_hybrid": lk_hybrid}


def uniform(alpha, decay):
    """Every depth counts the same."""
    return jnp.ones_like(alpha)


def power(alpha, decay):
    """decay ** k for k = 0, 1, ... (0.8 in EAGLE-3, 0.6 in FastMTP)."""
    return jnp.broadcast_to(decay ** jnp.arange(alpha.shape[-1]), alpha.shape)


def exponential(alpha, decay):
    """exp(-k / decay) (4 in DFlash)."""
    return jnp.broadcast_to(jnp.exp(-jnp.arange(alpha.shape[-1]) / decay), alpha.shape)


def prospective(alpha, decay):
    """How many tokens hang on this position: sum over j >= k of prod_{i <= j} s_i with s = (1 - decay) alpha + decay.

    D-PACE, with decay 0.5; `decay` keeps positions behind an unlikely one from counting nothing.
    """
    reached = jnp.cumprod((1 - decay) * lax.stop_gradient(alpha) + decay, -1)
    return jnp.flip(jnp.cumsum(jnp.flip(reached, -1), -1), -1)


POSITION_WEIGHTS: dict[str, Callable[[Float[Array, "*lead K"], float], Float[Array, "*lead K"]]] = {
    "uniform": uniform, "power": power, "exponential": exponential, "prospective": prospective}


def position_weights(name: str, alpha: Float[Array, "*lead K"], decay: float) -> Float[Array, "*lead K"]:
    """Weight of every depth, with mean 1 over all, so that a learning rate means the same under each of them."""
    weights = POSITION_WEIGHTS[name](alpha, decay)
    return weights / jnp.maximum(weights.mean(), 1e-9)


def by_depth(name: str, alpha: Float[Array, "B S"], decay: float, depth: int, key: jax.Array) -> Float[Array, "B S"]:
    """Position weights along a text that is cut into drafts of `depth` tokens, the first cut at a random place.

    A drafter that is trained on whole texts sees each token at every depth in turn; the last, incomplete draft of a
    row goes on at its start.
    """
    batch, length = alpha.shape
    shift = jax.random.randint(key, (), 0, depth)
    padded = jnp.pad(alpha, ((0, 0), (0, -length % depth)))
    windows = jnp.roll(padded, shift, 1).reshape(batch, -1, depth)
    weights = position_weights(name, windows, decay)
    return jnp.roll(weights.reshape(padded.shape), -shift, 1)[:, :length]


def check(loss: str, weight: str) -> None:
    """Raises ValueError for a loss or a position weight that is not there, with those that are."""
    for what, name, known in (("loss", loss, LOSSES), ("position weight", weight, POSITION_WEIGHTS)):
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: expected one of {', '.join(known)}{nearest(name, known)}")
