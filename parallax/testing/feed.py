"""Leads a drafter along texts that are known in advance, without a model, to see what it drafts at every length.

B sequences, N token slots, K tokens that one step can emit, C prefill chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from parallax.decoding.base import Advance, Context, Draft, Drafter, Step
from parallax.models import Model
from parallax.testing.tiny import tiny_config


class Moment(NamedTuple):
    """A drafter in front of a step: its context, its own state and its draft."""

    ctx: Context
    own: Any
    draft: Draft

    def row(self, b: int) -> list[int]:
        """The draft of a sequence that drafts a chain: its valid tokens behind the pending one."""
        return np.asarray(self.draft.tokens)[b, 1:][np.asarray(self.draft.valid)[b, 1:]].tolist()


def feed(drafter: Drafter, texts: Sequence[Sequence[int]], prompts: Sequence[int], counts: Int[np.ndarray, "steps B"],
         *, vocabulary: int, capacity: int, chunk: int = 4) -> Iterator[Moment]:
    """Every moment of a decoding that writes `texts`.

    Args:
      drafter: without parameters, and without use for the target's logits.
      texts: what is written; a sequence whose text has come to its end is finished.
      prompts: how many tokens of each text are its prompt, at least 1.
      counts: how many tokens every step accepts; cut to 1 .. depth + 1 where a text goes on.
      vocabulary, capacity: of the target, and token slots N.
      chunk: prompt tokens per prefill commit.

    Raises:
      AssertionError: a commit of nothing changed what the drafter keeps of that sequence.
    """
    model = Model(tiny_config(vocab_size=vocabulary))
    propose, observe, init, _ = _compiled(model)
    batch, width = len(texts), max(prompts)
    whole = np.zeros((batch, capacity + drafter.depth + chunk + 2), np.int32)
    for row, text in zip(whole, texts):
        row[:len(text)] = text
    ends, length = np.asarray([len(text) for text in texts]), np.asarray(prompts)

    def commit(own, start, count, size, length, step):
        place = start[:, None] + 1 + np.arange(size)
        tokens = np.where(np.arange(size) < count[:, None], np.take_along_axis(whole, place, 1), vocabulary - 1)
        ctx = _context(model, whole, length, capacity)
        after = observe(drafter, own, _inputs(ctx), jnp.asarray(tokens, jnp.int32), jnp.asarray(count, jnp.int32),
                        jnp.asarray(start, jnp.int32), step)
        for old, new in zip(jax.tree.leaves(own), jax.tree.leaves(after)):
            idle = count == 0
            assert (np.asarray(old)[idle] == np.asarray(new)[idle]).all(), "a commit of nothing changed the state"
        return after

    prompt = np.where(np.arange(width) < length[:, None], whole[:, :width], vocabulary - 1)
    own = init(drafter, _inputs(_context(model, whole, length * 0, capacity)), jnp.asarray(prompt),
               jnp.asarray(length, jnp.int32))
    for start in range(0, width - 1, chunk):
        count = np.clip(length - 1 - start, 0, chunk)
        own = commit(own, np.full(batch, start), count, chunk, length, None)
    for count in counts:
        ctx = _context(model, whole, length, capacity)
        draft, own = propose(drafter, own, _inputs(ctx))
        yield Moment(ctx, own, draft)
        count = np.minimum(np.clip(count, 1, drafter.depth + 1), ends - length)
        own = commit(own, length - 1, count, drafter.depth + 1, length + count, draft)
        length = length + count


def rewound(drafter: Drafter, last: Moment, first: Moment) -> Moment:
    """The drafter in front of the step of `first`, with what it knew in front of that of `last` taken back."""
    *_, rewind = _compiled(first.ctx.model)
    draft, own = rewind(drafter, last.own, _inputs(first.ctx))
    return Moment(first.ctx, own, draft)


def _context(model, whole, length, capacity) -> Context:
    tokens = np.where(np.arange(capacity) < np.maximum(length, 1)[:, None], whole[:, :capacity], 0)
    return Context(model, None, jnp.asarray(tokens), jnp.asarray(length, jnp.int32), None, None)


def _inputs(ctx: Context) -> tuple[Array, Array]:
    return ctx.tokens, ctx.length


@functools.cache
def _compiled(model: Model):
    def context(inputs):
        return Context(model, None, *inputs, None, None)

    def propose(drafter, own, inputs):
        return drafter.propose(None, own, context(inputs))

    def observe(drafter, own, inputs, tokens, count, start, draft):
        step = None if draft is None else Step(draft, None, None, None, None)
        return drafter.observe(None, own, Advance(tokens, count, start, None, None), step, context(inputs))

    def init(drafter, inputs, prompt, prompt_length):
        return drafter.init(None, context(inputs), prompt, prompt_length)

    def rewind(drafter, own, inputs):
        return propose(drafter, drafter.rewind(None, own, context(inputs)), inputs)

    return jax.jit(propose), jax.jit(observe), jax.jit(init), jax.jit(rewind)
