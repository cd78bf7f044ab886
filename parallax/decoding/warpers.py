"""Warpers: what changes the target's logits before a token is drawn, one function each, in the order of their use.

B sequences, T nodes, V vocabulary, N text slots, S draft slots, K biased tokens.

Order (that of Hugging Face's `generate`, which has no presence and frequency penalty): logit bias, repetition penalty,
presence penalty, frequency penalty, temperature, top-k, top-p, min-p, typical-p, epsilon cutoff, eta cutoff.

Every setting is one number or one per sequence [B]. The value that keeps everything leaves a sequence's logits as they
are, to the bit: so a sequence gets in any batch what it would get alone. The penalties count the prompt and the drafts
in front of a node as well, so each node of a draft has the logits that plain decoding would have there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding.base import policy


class Seen(NamedTuple):
    """The text in front of each of T rows, for warpers that count tokens.

    tokens [B, N], length [B]: what is decided; path [B, T, S], along [B, T, S]: drafts between that and the row, where
    `along` is true.
    """

    tokens: Int[Array, "B N"]
    length: Int[Array, "B"]
    path: Int[Array, "B T S"]
    along: Bool[Array, "B T S"]

    @classmethod
    def text(cls, tokens: Int[Array, "B N"], length: Int[Array, "B"]) -> Seen:
        """Decided text alone, in front of one row."""
        nothing = jnp.zeros((tokens.shape[0], 1, 0), jnp.int32)
        return cls(tokens, length, nothing, nothing.astype(bool))

    def counts(self, size: int, dtype) -> Float[Array, "B T V"]:
        """How often each token occurs in front of each row."""
        def tally(tokens, weights):
            return jnp.zeros((size,), dtype).at[tokens].add(weights.astype(dtype))

        inside = jnp.arange(self.tokens.shape[1]) < self.length[:, None]
        return jax.vmap(tally)(self.tokens, inside)[:, None] + jax.vmap(jax.vmap(tally))(self.path, self.along)


class Bias(NamedTuple):
    """What is added to the logits of some tokens; a leading axis of 1 is for all sequences."""

    tokens: Int[Array, "B K"]
    values: Float[Array, "B K"]


@policy
class Penalties:
    """The warpers that greedy decoding has too.

    Attributes:
      logit_bias: added to the logits of single tokens.
      repetition_penalty: tokens of the text so far have positive logits divided and negative ones multiplied by it
        (CTRL, arXiv:1909.05858); 1 changes nothing.
      presence_penalty: taken off the logits of tokens of the text so far (OpenAI); 0 changes nothing.
      frequency_penalty: taken off the logits once per occurrence (OpenAI); 0 changes nothing.
    """

    logit_bias: Bias | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def penalise(self, logits: Float[Array, "B T V"], seen: Seen | None = None) -> Float[Array, "B T V"]:
        """The logits after bias and penalties. `seen` is the text in front of each row, which only penalties need."""
        if self.logit_bias is not None:
            bias = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (logits.shape[0], leaf.shape[1])), self.logit_bias)
            logits = jax.vmap(lambda row, tokens, values: row.at[..., tokens].add(values))(logits, *bias)
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if all(penalty is None for penalty in penalties):
            return logits
        if seen is None:
            raise ValueError("penalties count the tokens of the text so far: give it as `seen`")
        counts = seen.counts(logits.shape[-1], logits.dtype)
        repetition, presence, frequency = (by_row(penalty, logits) for penalty in penalties)
        if repetition is not None:
            repeated = jnp.where(logits < 0, logits * repetition, logits / repetition)
            logits = jnp.where(counts > 0, repeated, logits)
        if presence is not None:
            logits = logits - presence * (counts > 0)
        if frequency is not None:
            logits = logits - frequency * counts
        return logits


def by_row(value, logits: Float[Array, "*lead V"]):
    """A setting in a shape that goes with the logits: a number as it is, [B] along their first axis.

    Raises:
      ValueError: one per sequence, but for another number of sequences.
    """
    if value is None or jnp.ndim(value) == 0:
        return value
    value = jnp.asarray(value)
    if value.shape != logits.shape[:1]:
        raise ValueError(f"a setting of the sampler has {value.shape[0]} values for {logits.shape[0]} sequences: give "
                         "one number, or one per sequence")
    return value.reshape(-1, *(1,) * (logits.ndim - 1))


def top_k(logits: Float[Array, "*lead V"], k) -> Float[Array, "*lead V"]:
    """Keeps the k most likely tokens, ties with the k-th included; 0 keeps all."""
    k = by_row(k, logits)
    return keep(logits, logits, jnp.ones_like(logits), jnp.where(k == 0, jnp.inf, k))


def top_p(logits: Float[Array, "*lead V"], p) -> Float[Array, "*lead V"]:
    """Keeps the smallest set of most likely tokens with at least this probability (arXiv:1904.09751); 1 keeps all."""
    p = by_row(p, logits)
    return keep(logits, logits, jax.nn.softmax(logits, -1), jnp.where(p < 1, p, jnp.inf))


def min_p(logits: Float[Array, "*lead V"], fraction) -> Float[Array, "*lead V"]:
    """Keeps tokens with at least this fraction of the largest probability (arXiv:2407.01082); 0 keeps all."""
    floor = logits.max(-1, keepdims=True) + jnp.log(by_row(fraction, logits))
    return jnp.where(logits >= floor, logits, -jnp.inf)


def typical_p(logits: Float[Array, "*lead V"], mass) -> Float[Array, "*lead V"]:
    """Keeps tokens whose surprise is nearest to the entropy, up to this mass (arXiv:2202.00666); 1 keeps all.

    The most likely token may fall.
    """
    mass = by_row(mass, logits)
    logp = jax.nn.log_softmax(logits, -1)
    nearness = -jnp.abs(logp + entropy(logp))
    return keep(logits, nearness, jnp.exp(logp), jnp.where(mass < 1, mass, jnp.inf))


def epsilon_cutoff(logits: Float[Array, "*lead V"], epsilon) -> Float[Array, "*lead V"]:
    """Drops tokens of a smaller probability, but never the most likely (arXiv:2210.15191); 0 keeps all."""
    return _at_least(logits, jax.nn.log_softmax(logits, -1), by_row(epsilon, logits))


def eta_cutoff(logits: Float[Array, "*lead V"], epsilon) -> Float[Array, "*lead V"]:
    """As `epsilon_cutoff` with the smaller of epsilon and sqrt(epsilon) exp(-entropy) (arXiv:2210.15191)."""
    epsilon = by_row(epsilon, logits)
    logp = jax.nn.log_softmax(logits, -1)
    return _at_least(logits, logp, jnp.minimum(epsilon, jnp.sqrt(epsilon) * jnp.exp(-entropy(logp))))


def entropy(logp: Float[Array, "*lead V"]) -> Float[Array, "*lead 1"]:
    """In nats, of log-probabilities that may be -inf."""
    return -jnp.where(logp > -jnp.inf, jnp.exp(logp) * logp, 0).sum(-1, keepdims=True)


def _at_least(logits, logp, probability):
    best = logits == logits.max(-1, keepdims=True)
    return jnp.where((jnp.exp(logp) >= probability) | best, logits, -jnp.inf)


def keep(logits: Float[Array, "*lead V"], rank: Float[Array, "*lead V"], weights: Float[Array, "*lead V"],
         limit) -> Float[Array, "*lead V"]:
    """Drops every token above which, in `rank`, tokens of total weight `limit` or more lie; the highest always stays.

    Finds the lowest rank that is kept by bisection over all floats, in 32 sums over the vocabulary: sorting 8 rows of
    49152 takes a CPU 60 to 80 ms, this 4 to 8.
    """
    real = rank.dtype
    whole, top = (jnp.int64, 2**63 - 1) if real == jnp.float64 else (jnp.int32, 2**31 - 1)

    def to_key(x):                                  # whole numbers in the order of the floats; its own inverse
        bits = lax.bitcast_convert_type(x, whole)
        return bits ^ jnp.where(bits < 0, whole(top), whole(0))

    def halve(_, bounds):
        low, high = bounds                          # too much lies above low, not too much above high
        middle = (low & high) + ((low ^ high) >> 1)
        value = lax.bitcast_convert_type(middle ^ jnp.where(middle < 0, whole(top), whole(0)), real)
        enough = jnp.where(rank > value, weights, 0).sum(-1, keepdims=True) >= limit
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    best = to_key(rank.max(-1, keepdims=True))
    low = jnp.full_like(best, to_key(real.type(-jnp.inf)) - 1)
    lowest = lax.fori_loop(0, jnp.finfo(real).bits, halve, (low, best))[1]
    return jnp.where(to_key(rank) >= lowest, logits, -jnp.inf)
