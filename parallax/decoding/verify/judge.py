"""What the rules for drawn drafts share. B sequences, T nodes, V vocabulary.

Such a rule compares the law of the target, p, with the law that the draft was drawn from, q. It is a pure function of
the two and of one uniform number per node, and it says with which chance every number could have decided otherwise. So
the law of what it emits can be computed, by going through all outcomes of the numbers, with the very code that runs in
the loop (see `parallax.testing.enumerate`).
"""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from parallax.decoding import tree
from parallax.decoding.base import Draft, Guarantee, Kind, Verifier, policy
from parallax.decoding.sampling import ACCEPT, RESIDUAL, Greedy, Sampler, argmax, noise_private, private_keys


class Judgement(NamedTuple):
    """node [B]: the last accepted node; weights [B, V]: the law of the token behind it, up to a factor;
    chances [B, T]: the number of node n was compared with chances[:, n]: it said yes if it was below. Anything in
    [0, 1] where it decided nothing. A number that has decided is not used again.
    """

    node: Int[Array, "B"]
    weights: Float[Array, "B V"]
    chances: Float[Array, "B T"]


@policy
class Judge(Verifier, abc.ABC):
    """A rule that judges drawn drafts by p and q. A subclass needs `judge`.

    Attributes:
      sampler: the target's law.
    """

    sampler: Sampler

    guarantee: ClassVar[Guarantee] = "distribution"
    kinds: ClassVar[tuple[Kind, ...]] = ("sampled",)

    def check(self, source):
        if isinstance(self.sampler, Greedy):
            raise ValueError(f"{type(self).__name__} needs a temperature above 0: at temperature 0 use Follow, which "
                             "is the same")
        super().check(source)

    @abc.abstractmethod
    def judge(self, draft: Draft, logp: Float[Array, "B T V"], uniform: Float[Array, "B T"]) -> Judgement:
        """The decision. `logp` are the target's log-probabilities behind every node, `uniform` numbers in [0, 1)."""

    def __call__(self, draft, logits, hidden, ctx):
        size, start = draft.tokens.shape[1], ctx.length
        uniform = jnp.stack([jax.vmap(jax.random.uniform)(private_keys(ctx.key, start, jnp.full_like(start, n), ACCEPT))
                             for n in range(size)], 1)
        logp = jax.nn.log_softmax(self.sampler.warp(logits, tree.seen(draft, ctx)), -1)
        judgement = self.judge(draft, logp, uniform)
        noise = noise_private(ctx.key, start, start, RESIDUAL, logits.shape[-1])
        return tree.verdict(draft, judgement.node, argmax(jnp.log(judgement.weights) + noise))


def residual(p: Float[Array, "*lead V"], q: Float[Array, "*lead V"]) -> Float[Array, "*lead V"]:
    """[p - q]+, not normalised; p itself where nothing is left, for equal laws leave only rounding errors there."""
    rest = jnp.where(p > q, p - q, 0)
    return jnp.where(rest.any(-1, keepdims=True), rest, p)
