"""The accepted length that a drafter will have, from one training forward over text that the target wrote.

P texts, N token slots, D draft length.

Where the target wrote a text greedily, its drafts need no decoding loop: a draft token counts only if all before it
were right, and then its context is the text itself. So the guesses of the drafter at every position, from one forward,
decide each step of the decoder: the same walk (`tree.walk`) over the same chain, from behind every accepted token.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from parallax.decoding import decode, make_decoder, tree
from parallax.decoding.base import Draft
from parallax.decoding.sampling import argmax
from parallax.models import Block, Model


class Texts(NamedTuple):
    """tokens [P, N], zeros behind `length` [P]; the first `prompt_length` [P] of them are the prompt."""

    tokens: Int[Array, "P N"]
    prompt_length: Int[Array, "P"]
    length: Int[Array, "P"]


def greedy_texts(model: Model, params, prompts: list[list[int]], new_tokens: int, eos: tuple[int, ...] = ()) -> Texts:
    """What the target writes behind each prompt by plain greedy decoding."""
    lengths = np.asarray([len(p) for p in prompts])
    prompt = np.zeros((len(prompts), lengths.max()), np.int32)
    for i, ids in enumerate(prompts):
        prompt[i, :len(ids)] = ids
    capacity = int(lengths.max()) + new_tokens
    result = decode(make_decoder("autoregressive", model, eos=eos), {"target": params}, prompt, lengths, None, 0,
                    lengths + new_tokens, capacity=capacity)
    return Texts(result.tokens, result.prompt_length, result.length)


def guesses(model: Model, params, tokens: Int[Array, "P N"]) -> Int[Array, "P N"]:
    """The model's most likely token behind every token."""
    texts, size = tokens.shape
    block = Block(tokens, jnp.broadcast_to(jnp.arange(size), tokens.shape), jnp.tril(jnp.ones((size, size), bool)))
    return argmax(model.unembed(params, model.forward(params, block, model.new_cache(texts, 0)).hidden))


@functools.partial(jax.jit, static_argnames="draft_length")
def walk(guesses: Int[Array, "P N"], texts: Texts, draft_length: int) -> tuple[Int[Array, "P"], Int[Array, "P"]]:
    """(tokens emitted, target forwards) per text of a decoder that drafts chains of `draft_length` tokens.

    `guesses[p, i]` is the drafter's token behind position i. Holds for texts that the target wrote greedily.
    """
    size = texts.tokens.shape[1]
    index = jnp.arange(size)[:, None] + jnp.arange(draft_length + 1)
    inside = index < size

    def steps(tokens, guesses, start, length):
        ahead = jnp.where(index + 1 < size, tokens[jnp.minimum(index + 1, size - 1)], -1)       # the target's tokens
        draft = guesses[jnp.minimum(index, size - 1)][:, :draft_length]
        draft = Draft(jnp.concatenate([tokens[:, None], draft], 1), tree.Shape.chain(draft_length).parents, inside,
                      depth=draft_length)
        count = tree.walk(draft, ahead).count                                   # from every position

        def advance(carry):
            at, forwards = carry
            return at + count[at - 1], forwards + 1

        end, forwards = lax.while_loop(lambda carry: carry[0] < length, advance, (start, jnp.int32(0)))
        return jnp.minimum(end, length) - start, forwards

    return jax.vmap(steps)(texts.tokens, guesses, texts.prompt_length, texts.length)
