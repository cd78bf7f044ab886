"""Acceptance rules. B sequences, T nodes, D draft depth, V vocabulary.

Each class says what it guarantees and for which kinds of draft.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float, Int, Key

from parallax.decoding import tree
from parallax.decoding.base import Draft, Guarantee, Kind, Verdict, Verifier, policy
from parallax.decoding.sampling import ACCEPT, RESIDUAL, Greedy, Sampler, argmax, noise_private, private_keys


@policy
class Follow(Verifier):
    """Sample and follow: draw the target's token at every node, and walk down while the tree has it.

    With `Greedy` this is greedy verification. It emits the target's own tokens whatever the draft is, so it is
    exact for every drafter and tree; with noise keyed by position it gives the very tokens of seeded plain
    decoding. It accepts less than rejection sampling when the draft is itself sampled. Source: the naive
    baseline of MCSD (arXiv:2401.06706) and the rule of DFlash; one draw per node, never one per path, which
    would not be lossless.
    """

    sampler: Sampler = Greedy()

    guarantee: ClassVar[Guarantee] = "exact"
    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic", "sampled", "coupled")

    def __call__(self, draft: Draft, logits: Float[Array, "B T V"], keys: Key[Array, "B"],
                 start: Int[Array, "B"]) -> Verdict:
        offsets = tree.depths(draft.parents, draft.depth)
        targets = self.sampler.draw(logits, keys, start, offsets, draft.depth)
        return tree.walk(draft, targets)


@policy
class Rejection(Verifier):
    """Speculative sampling: keep a drafted token with probability p / q, replace the first that falls by the residual.

    p is the target's law, q the draft's, both after their warpers. Token d is kept if u q(d) < p(d); the first that is
    not is drawn anew from [p - q]+, normalised, and if all are kept one more comes from p. So every token has law p,
    and a token is kept with probability sum min(p, q), the most that any rule can reach for one token. The text
    depends on the draft length as well as on the seed: only its law is that of plain decoding. For chains.
    Source: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318).
    """

    sampler: Sampler

    guarantee: ClassVar[Guarantee] = "distribution"
    kinds: ClassVar[tuple[Kind, ...]] = ("sampled",)

    def check(self, kind: Kind) -> None:
        if isinstance(self.sampler, Greedy):
            raise ValueError("rejection sampling needs a temperature above 0: at temperature 0 use Follow, which is "
                             "the same")
        super().check(kind)

    def __call__(self, draft: Draft, logits: Float[Array, "B T V"], keys: Key[Array, "B"],
                 start: Int[Array, "B"]) -> Verdict:
        depth = draft.depth
        if not isinstance(draft.parents, tuple) or draft.parents != tree.Shape.chain(depth).parents:
            raise ValueError("rejection sampling verifies chains, this draft is a tree: use Follow")
        batch = start.shape[0]
        uniform = jnp.stack([jax.vmap(jax.random.uniform)(private_keys(keys, start, start + i, ACCEPT))
                             for i in range(depth)], 1)
        kept, weights = judge(draft, self.sampler.warp(logits), uniform)
        noise = noise_private(keys, start, start + kept, RESIDUAL, logits.shape[-1])
        path = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32), (batch, depth + 1))
        return Verdict(path, kept + 1, argmax(jnp.log(weights) + noise), kept, None)


def judge(draft: Draft, warped: Float[Array, "B T V"], uniform: Float[Array, "B D"]
          ) -> tuple[Int[Array, "B"], Float[Array, "B V"]]:
    """(how many drafted tokens of a chain are kept, the law of the token behind them up to a factor).

    Args:
      draft: a sampled chain.
      warped: the target's log-probabilities up to a constant, behind every node.
      uniform: noise in [0, 1) that decides about each drafted token.
    """
    drafted = draft.tokens[:, 1:, None]
    total = logsumexp(warped, -1)                                                                   # [B, T]
    logp = jnp.take_along_axis(warped[:, :-1], drafted, 2)[..., 0] - total[:, :-1]
    logq = jnp.take_along_axis(draft.logq, drafted, 2)[..., 0]
    keep = draft.valid[:, 1:] & (jnp.log(uniform) + logq < logp)          # as logarithms, so that nothing underflows
    kept = jnp.cumprod(keep, 1, dtype=jnp.int32).sum(1)

    def at(values, index):
        return jnp.take_along_axis(values, index.reshape(-1, *(1,) * (values.ndim - 1)), 1)[:, 0]

    p = jnp.exp(at(warped, kept) - at(total, kept)[:, None])
    # Behind the last kept token there may be no draft, and then nothing was ruled out: q is 0.
    offered = at(jnp.pad(draft.valid[:, 1:], ((0, 0), (0, 1))), kept)
    q = jnp.where(offered[:, None], jnp.exp(at(draft.logq, jnp.minimum(kept, draft.depth - 1))), 0)
    residual = jnp.where(p > q, p - q, 0)
    # Equal laws leave only rounding errors, or nothing: then any draw of p is right.
    return kept, jnp.where(residual.any(-1, keepdims=True), residual, p)
