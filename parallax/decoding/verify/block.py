"""Block verification: all tokens of a chain are judged together.

B sequences, D depth, T = D + 1 nodes, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from parallax.decoding.base import Draft, policy
from parallax.decoding.tree import Shape
from parallax.decoding.verify.judge import Judge, Judgement, drawn, log_ratio, residual, row, static_parents


@policy
class Block(Judge):
    """Keep the longest beginning of a chain that passes, judged by the probabilities of whole beginnings.

    P_i = min(1, P_{i-1} p(d_i) / q(d_i)) is how likely the first i tokens are to be kept. The whole chain passes with
    P_D, a shorter beginning with S / (S + 1 - P), where S = sum [P p - q]+ is what the token behind it would still
    need from the residual. It keeps at least as many tokens as `Rejection`, on average, from the same laws. A chain may
    end early, where its tail is not valid. Source: Sun et al. (arXiv:2403.10444).
    """

    def check(self, source):
        super().check(source)
        if isinstance(source, Draft) and static_parents(source) != Shape.chain(source.depth).parents:
            raise ValueError(f"{type(self).__name__} verifies chains, this draft is a tree: use a chain, or "
                             "Traversal, which is the same rule for trees")

    def judge(self, draft, logp, uniform):
        count = drawn(draft)[:, 1:].sum(1)
        kept, weights, chances = joint(logp, draft.logq, log_ratio(draft, logp)[:, 1:], count, uniform[:, 1:])
        return Judgement(kept, weights, jnp.pad(chances, ((0, 0), (1, 0))))


def joint(logp: Float[Array, "B T V"], logq: Float[Array, "B D V"], ratio: Float[Array, "B D"], length: Int[Array, "B"],
          uniform: Float[Array, "B D"]) -> tuple[Int[Array, "B"], Float[Array, "B V"], Float[Array, "B D"]]:
    """(tokens kept, weights of the next one, chances) of chains, of which the first `length` tokens were drawn.

    ratio: log p / q of the tokens.
    """
    depth = ratio.shape[1]
    logs = [jnp.zeros_like(ratio[:, 0])]
    for i in range(depth):
        logs.append(jnp.minimum(logs[-1] + jnp.where(i < length, ratio[:, i], 0), 0))
    logs = jnp.stack(logs, 1)                                                                       # [B, T], log P
    open_ = jnp.maximum(jnp.exp(logs[:, :-1, None] + logp[:, :-1]) - jnp.exp(logq[:, :depth]), 0).sum(-1)    # [B, D], S
    chances = jnp.concatenate([keeping(open_, logs[:, :-1])[:, 1:], jnp.zeros_like(logs[:, :1])], 1)
    index = jnp.arange(1, depth + 1)
    chances = jnp.where(index == length[:, None], jnp.exp(logs[:, 1:]), chances)
    chances = jnp.where(index <= length[:, None], chances, 0)
    kept = jnp.where(uniform < chances, index, 0).max(1, initial=0).astype(jnp.int32)
    q = jnp.where((kept < length)[:, None], jnp.exp(row(logq, kept)), 0)
    return kept, residual(jnp.exp(row(logp, kept)), q / jnp.exp(row(logs, kept))[:, None]), chances


def keeping(rest: Float[Array, "*lead"], log_alpha: Float[Array, "*lead"]) -> Float[Array, "*lead"]:
    """S / (S + 1 - alpha): of keeping a beginning, whose continuation fell. Certain where no chance is left over."""
    total = rest - jnp.expm1(log_alpha)
    return jnp.where(total > 0, rest / jnp.where(total > 0, total, 1), 1)
