"""Lossy rules: what they share, and those that judge a token by the target's law alone.

B sequences, T nodes, E hidden size, V vocabulary.

Such a rule calls a drafted token good enough, where an exact one would now and then have taken another. It accepts the
deepest node that is good enough together with all its ancestors, of equally deep ones that whose path the target finds
most likely; the token behind it is the target's own, greedy or drawn, as plain decoding would have it there. Speed is
bought with the law of the text, so measure a task beside it.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding import tree, warpers
from parallax.decoding.base import Context, Draft, Guarantee, Kind, Verifier, policy
from parallax.decoding.sampling import Greedy, Sampler, Seen, argmax
from parallax.decoding.verify.judge import Judgement


@policy
class Relaxed(Verifier, abc.ABC):
    """A lossy rule. A subclass needs `accepts`.

    Attributes:
      sampler: how the target's own tokens are drawn.
    """

    sampler: Sampler = Greedy()

    guarantee: ClassVar[Guarantee] = "lossy"
    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic", "sampled", "coupled")

    @abc.abstractmethod
    def accepts(self, draft: Draft, logits: Float[Array, "B T V"], targets: Int[Array, "B T"],
                hidden: Float[Array, "B T E"], ctx: Context) -> Bool[Array, "B T"]:
        """Which nodes are good enough, each seen for itself. `targets` are the target's own tokens behind the nodes."""

    def __call__(self, draft, logits, hidden, ctx):
        offsets = tree.depths(draft.parents, draft.depth)
        targets = self.sampler.draw(logits, ctx.key, ctx.length, offsets, draft.depth, tree.seen(draft, ctx))
        node = likeliest(draft, self.accepts(draft, logits, targets, hidden, ctx), logits)
        return tree.verdict(draft, node, jnp.take_along_axis(targets, node[:, None], 1)[:, 0], targets)


@policy
class ByLaw(Relaxed):
    """A rule of the target's law alone. A subclass needs `passes`."""

    @abc.abstractmethod
    def passes(self, draft: Draft, logp: Float[Array, "B T V"]) -> Bool[Array, "B T"]:
        """Which nodes are good enough. `logp` are the target's log-probabilities behind every node."""

    def law(self, logits: Float[Array, "B T V"], seen: Seen) -> Float[Array, "B T V"]:
        """The logits that the rule looks at: after bias and penalties, whatever the temperature."""
        return self.sampler.penalise(logits, seen)

    def accepts(self, draft, logits, targets, hidden, ctx):
        return self.passes(draft, jax.nn.log_softmax(self.law(logits, tree.seen(draft, ctx)), -1))

    def judge(self, draft: Draft, logp: Float[Array, "B T V"], uniform: Float[Array, "B T"]) -> Judgement:
        """The decision for a target of law exp(logp). As in `Judge.judge`; no number decides anything."""
        accepted = self.passes(draft, logp)
        node = likeliest(draft, accepted, logp)
        behind = jnp.take_along_axis(logp, node[:, None, None], 1)[:, 0]
        return Judgement(node, jnp.exp(behind), accepted.astype(logp.dtype))


def likeliest(draft: Draft, accepted: Bool[Array, "B T"], logits: Float[Array, "B T V"]) -> Int[Array, "B"]:
    """The deepest node accepted with all its ancestors; of equals that of the largest likelihood, then lowest index."""
    if isinstance(draft.parents, tuple) and draft.parents == tree.Shape.chain(draft.depth).parents:
        return tree.deepest(draft, accepted)                                   # no two nodes are equally deep
    level = jnp.broadcast_to(jnp.asarray(tree.depths(draft.parents, draft.depth)), draft.tokens.shape)
    above = jnp.asarray(tree.ancestors(draft.parents, draft.depth))
    alive = (~above | (draft.valid & accepted | (level == 0))[:, None]).all(-1)
    least = jnp.finfo(logits.dtype).min
    logp = drafted(draft, logits) - behind(draft, jax.nn.logsumexp(logits, -1))
    logp = jnp.where(alive & (level > 0), jnp.maximum(logp, least / draft.tokens.shape[1]), 0)
    likelihood = jnp.where(above, logp[:, None], 0).sum(-1)
    level = jnp.where(alive, level, -1)
    best = level == level.max(-1, keepdims=True)
    return jnp.argmax(jnp.where(best, likelihood, -jnp.inf), -1).astype(jnp.int32)


def behind(draft: Draft, values: Array) -> Array:
    """values[b, parent of n]: what the target says in front of node n, for values [B, T, ...]."""
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
    return jax.vmap(lambda row, parents: row[parents])(values, parents)


def drafted(draft: Draft, logits: Float[Array, "B T V"]) -> Float[Array, "B T"]:
    """The logit of every node's token behind its parent."""
    parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
    return jax.vmap(lambda row, parents, tokens: row[parents, tokens])(logits, parents, draft.tokens)


def rank(draft: Draft, logits: Float[Array, "B T V"]) -> Int[Array, "B T"]:
    """Place of every node's token among the target's, 0 the most likely; of equals the lowest id comes first."""
    value, rows = drafted(draft, logits)[..., None], behind(draft, logits)
    earlier = jnp.arange(logits.shape[-1]) < draft.tokens[..., None]
    return ((rows > value) | (rows == value) & earlier).sum(-1, dtype=jnp.int32)


def checked(name: str, value, low: float, high: float, words: str) -> None:
    """Raises ValueError for a number outside its range. Traced values pass: they were checked before."""
    if isinstance(value, (int, float)) and not low <= value <= high:
        raise ValueError(f"{name} must be {words}, got {value}")


@policy
class Typical(ByLaw):
    """Typical acceptance: token x is good enough if p(x) > min(epsilon, delta exp(-H(p))).

    p is the target's law after its warpers, H its entropy in nats; so where the target is unsure, less likely tokens
    pass. At temperature 0 p is certain and only the most likely token passes. Epsilon 0 lets every token pass that the
    target can draw. Source: Medusa (arXiv:2401.10774, section 2.3.2), with the defaults of its generation entry point.

    Attributes:
      epsilon: the threshold is never larger.
      delta: factor of exp(-H); about sqrt(epsilon).
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        checked("epsilon", self.epsilon, 0, 1, "in [0, 1]")
        checked("delta", self.delta, 0, 1, "in [0, 1]")

    def law(self, logits, seen):
        return self.sampler.warp(logits, seen)

    def passes(self, draft, logp):
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-warpers.entropy(logp)[..., 0]))
        return drafted(draft, logp) > behind(draft, jnp.log(threshold))


@policy
class TopK(ByLaw):
    """Good enough is a token among the target's k most likely; k = 1 is greedy.

    Source: blockwise parallel decoding (Stern et al., arXiv:1811.03115, section 5.1).
    """

    k: int = 2

    def __post_init__(self):
        checked("k", self.k, 1, float("inf"), "at least 1")

    def passes(self, draft, logp):
        return (rank(draft, logp) < self.k) & (drafted(draft, logp) > -jnp.inf)


@policy
class Distance(ByLaw):
    """Good enough is a token whose id is at most `distance` from the most likely one's; 0 is greedy.

    For vocabularies in which near ids mean near things, such as grey levels.
    Source: blockwise parallel decoding (Stern et al., arXiv:1811.03115, section 5.2).
    """

    distance: int = 2

    def __post_init__(self):
        checked("distance", self.distance, 0, float("inf"), "at least 0")

    def passes(self, draft, logp):
        return jnp.abs(draft.tokens - behind(draft, argmax(logp))) <= self.distance


@policy
class NearBest(ByLaw):
    """Good enough is a token among the beta most likely whose log-probability is at most tau below the best.

    beta = 1 with tau = 0 is greedy. The defaults are those of the source's scripts.
    Source: SpecDec, generalised aggressive decoding (Xia et al., arXiv:2203.16487).
    """

    beta: int = 5
    tau: float = 3.0

    def __post_init__(self):
        checked("beta", self.beta, 1, float("inf"), "at least 1")
        checked("tau", self.tau, 0, float("inf"), "at least 0")

    def passes(self, draft, logp):
        near = drafted(draft, logp) >= behind(draft, logp.max(-1)) - self.tau
        return (rank(draft, logp) < self.beta) & near


@policy
class MinBlock(Relaxed):
    """At least `length` tokens of the first path are good enough whatever they are; then the target's own tokens.

    The first path goes from the root to the first valid child, and on. 0 is sample-and-follow; the draft's depth takes
    drafts as they come, which is the drafter alone with the target as a looker-on.
    Source: blockwise parallel decoding (Stern et al., arXiv:1811.03115, section 5.3).
    """

    length: int = 2

    def __post_init__(self):
        checked("length", self.length, 0, float("inf"), "at least 0")

    def accepts(self, draft, logits, targets, hidden, ctx):
        size = draft.tokens.shape[1]
        parents = jnp.broadcast_to(jnp.asarray(draft.parents), draft.tokens.shape)
        older = jnp.tril(parents[:, :, None] == parents[:, None], -1) & (jnp.arange(size) > 0) & draft.valid[:, None]
        first = ~older.any(-1)
        above = jnp.asarray(tree.ancestors(draft.parents, draft.depth))
        forced = (~above | first[:, None]).all(-1)
        forced &= jnp.asarray(tree.depths(draft.parents, draft.depth)) <= self.length
        return forced | (draft.tokens == behind(draft, targets))
