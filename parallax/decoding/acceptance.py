"""How often the drafter's token of each rank is the target's next one. It shapes trees, see `growth.Sequoia`.

P texts, N token slots, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from parallax.models.cache import Block
from parallax.models.transformer import Model


def measure(model: Model, params, texts: Any, ranks: int = 8, layers: int | None = None) -> tuple[float, ...]:
    """The fraction of the tokens that the target wrote which were the drafter's first choice, its second, and so on.

    One forward over the texts, no decoding: where a text was written greedily, its tokens are what the drafter has to
    guess.

    Args:
      model, params: the drafter's; of an early exit, the target's.
      texts: what the target wrote: `tokens` [P, N], of which `prompt_length` [P] are the prompt, and `length` [P]; a
        `Result` of `decode`, for example.
      ranks: how many.
      layers: of an early exit.

    Raises:
      ValueError: more ranks than tokens, or nothing was written.
    """
    size = model.config.vocab_size
    if not 1 <= ranks <= size:
        raise ValueError(f"ranks must be 1 to the vocabulary's {size}, got {ranks}")
    hits, written = _count(model, params, *(jnp.asarray(x) for x in (texts.tokens, texts.prompt_length, texts.length)),
                           ranks=ranks, layers=layers)
    if not written:
        raise ValueError("the target wrote nothing behind its prompts: give texts that go on")
    return tuple((hits / written).tolist())


@functools.partial(jax.jit, static_argnums=0, static_argnames=("ranks", "layers"))
def _count(model: Model, params, tokens: Int[Array, "P N"], prompt_length: Int[Array, "P"], length: Int[Array, "P"], *,
           ranks: int, layers: int | None) -> tuple[Float[Array, "R"], Int[Array, ""]]:
    texts, size = tokens.shape
    index = jnp.arange(size)
    block = Block(tokens, jnp.broadcast_to(index, tokens.shape), jnp.tril(jnp.ones((size, size), bool)))
    out = model.forward(params, block, model.new_cache(texts, 0), layers=(0, layers))
    logits = model.unembed(params, out.hidden)[:, :-1]
    following = tokens[:, 1:, None]
    own = jnp.take_along_axis(logits, following, 2)
    before = jnp.arange(logits.shape[2]) < following                            # of equals the lowest id is first
    rank = ((logits > own) | (logits == own) & before).sum(-1)
    written = (index[1:] >= prompt_length[:, None]) & (index[1:] < length[:, None])
    hits = ((rank[..., None] == jnp.arange(ranks)) & written[..., None]).sum((0, 1))
    return hits, written.sum()
