"""Where the end of a text stood before: match lengths of all places at once, and drafts copied from behind a match.

B sequences, N text slots, S source slots, K new tokens, D draft length.

A *run* [B, S] holds, for every place of a source (the text itself, its prompt, a corpus), how many tokens up to that
place equal the last tokens of the text. A suffix automaton finds the longest of them in one state; on a device all of
them cost one vector operation per token and leave the choice among equals open.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from parallax.decoding.base import Context, Draft
from parallax.decoding.tree import Shape


def append(run: Int[Array, "B S"], source: Int[Array, "#B S"], tokens: Int[Array, "B K"],
           count: Int[Array, "B"]) -> Int[Array, "B S"]:
    """The run after `tokens[b, :count[b]]` were written behind the text.

    Where the source is the text itself, only the places in front of its last token mean anything: see `earlier`.
    """
    def body(i, run):
        return jnp.where((i < count)[:, None], grow(run, source, tokens[:, i]), run)

    return lax.fori_loop(0, count.max(), body, run)


def grow(run: Int[Array, "B S"], source: Int[Array, "#B S"], token: Int[Array, "B"]) -> Int[Array, "B S"]:
    """The run after one more token."""
    return jnp.where(source == token[:, None], jnp.pad(run[:, :-1], ((0, 0), (1, 0))) + 1, 0)


def compare(source: Int[Array, "#B S"], places: Bool[Array, "#B S"], tokens: Int[Array, "B N"], length: Int[Array, "B"],
            *, since: Int[Array, "B"] | int = 0, longest: int | None = None) -> Int[Array, "B S"]:
    """The run of the text tokens[b, since:length[b]], from nothing.

    Args:
      source: what to search; no token of the text is negative, so a negative one there never matches.
      places: where a match may end; the run is 0 elsewhere.
      tokens, length, since: the text.
      longest: count no further. Without it the cost grows with the longest match.
    """
    def body(carry):
        back, here, alive, run = carry
        place = length - 1 - back
        wanted = jnp.take_along_axis(tokens, jnp.maximum(place, 0)[:, None], 1)
        alive = alive & (here == wanted) & (place >= since)[:, None]
        return back + 1, jnp.pad(here[:, :-1], ((0, 0), (1, 0)), constant_values=-1), alive, run + alive

    shape = (tokens.shape[0], source.shape[1])
    carry = (jnp.int32(0), jnp.broadcast_to(source, shape), jnp.broadcast_to(places, shape),
             jnp.zeros(shape, jnp.int32))
    if longest is None:
        return lax.while_loop(lambda carry: carry[2].any(), body, carry)[3]
    for _ in range(longest):
        carry = body(carry)
    return carry[3]


def earlier(tokens: Int[Array, "B N"], length: Int[Array, "B"]) -> Bool[Array, "B N"]:
    """The places of a text in front of its last token: there its end may have stood before, for it never matches
    itself."""
    return jnp.arange(tokens.shape[1]) < length[:, None] - 1


def behind(source: Int[Array, "#B S"], end: Int[Array, "B"], stop: Int[Array, "B"] | int,
           size: int) -> tuple[Int[Array, "B D"], Bool[Array, "B D"]]:
    """(tokens, which of them are there): the `size` tokens behind place `end`, up to place `stop` or a negative one."""
    place = end[:, None] + 1 + jnp.arange(size)
    source = jnp.broadcast_to(source, (end.shape[0], source.shape[1]))
    copied = jnp.take_along_axis(source, jnp.clip(place, 0, source.shape[1] - 1), 1)
    there = (place < jnp.asarray(stop).reshape(-1, 1)) & (copied >= 0)
    return jnp.maximum(copied, 0), lax.cumprod(there.astype(jnp.int32), axis=1) > 0


def pending(ctx: Context) -> Int[Array, "B 1"]:
    """The last token of every text, the root of its draft."""
    return jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)


def chain(ctx: Context, tokens: Int[Array, "B D"], valid: Bool[Array, "B D"], match: Int[Array, "B"]) -> Draft:
    """The draft of `tokens` behind the pending one. `match` counts only where there is a draft."""
    size = tokens.shape[1]
    root = pending(ctx)
    return Draft(jnp.concatenate([root, tokens], 1), Shape.chain(size).parents,
                 jnp.concatenate([jnp.ones_like(root, bool), valid], 1), depth=size,
                 match=jnp.where(valid[:, 0], match, 0))
