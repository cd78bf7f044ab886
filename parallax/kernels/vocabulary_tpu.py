"""One pass over the vocabulary on TPU.

B sequences, N rows, V vocabulary, K keys of noise, S stretches of the vocabulary, W columns of a stretch.

A grid step holds one stretch of up to 64 rows, rows on sublanes. It goes through it in stripes of some hundred lanes
and keeps what it looks for per lane; lanes are joined once, at the end of the step. Steps do not depend on each other,
so a chip with two cores shares them even for one sequence. The noise of a stripe is computed once per key, and each
row picks its own.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, UInt32

from parallax.kernels import threefry
from parallax.kernels.vocabulary import LOWEST, of_rows

_ROWS = 64            # of a grid step, at most
_STRIPE = 8 * 1024    # logits in a stripe: eight registers, so that each operation has eight independent instances
_STEP = 256 * 1024    # logits in a stretch, at most: 1 MiB, held twice
_SUBLANES = 8


class _Cut(NamedTuple):
    """How a step goes through its stretch of a vocabulary of `size`: in `stripes` of `shape`, `unrolled` at once.

    A stripe has the rows of the logits; or `spread` a single one, that many columns on each sublane.
    """

    size: int
    shape: tuple[int, int]
    spread: bool
    unrolled: int
    stripes: int

    @classmethod
    def of(cls, size: int, rows: int) -> _Cut:
        """The cut for blocks of so many rows. Stretches are equal, of whole loop bodies."""
        sublanes = _up(rows, _SUBLANES)
        lanes = _STRIPE // pl.next_power_of_2(sublanes)
        unrolled = 4 if lanes > 128 else 8            # noise of a few registers at a time leaves the units idle
        columns = lanes * (_SUBLANES if rows == 1 else 1)
        stripes = pl.cdiv(size, pl.cdiv(size, _STEP // sublanes) * columns)
        unrolled = min(unrolled, stripes)
        return cls(size, (_SUBLANES if rows == 1 else rows, lanes), rows == 1, unrolled, _up(stripes, unrolled))

    @property
    def columns(self) -> int:
        """Of a stripe."""
        return self.shape[1] * (_SUBLANES if self.spread else 1)

    @property
    def width(self) -> int:
        """Columns of a stretch."""
        return self.columns * self.stripes

    @property
    def count(self) -> int:
        """Of stretches."""
        return pl.cdiv(self.size, self.width)

    def fill(self, x, stretch):
        """Columns behind the end of the vocabulary may hold anything."""
        tail = self.size % self.width
        if tail:
            @pl.when(stretch == self.count - 1)
            def _():
                x[:, :, tail:] = jnp.full((1, x.shape[1], self.width - tail), -jnp.inf, x.dtype)

    def fold(self, update, carry):
        """carry = update(i, carry) for every stripe."""
        def body(i, carry):
            for j in range(self.unrolled):
                carry = update(i * self.unrolled + j, carry)
            return carry

        return lax.fori_loop(0, self.stripes // self.unrolled, body, carry)

    def read(self, x, i, row=0):
        """Stripe i; of this row, if it is spread."""
        def columns(rows, at, size):
            return x[0, rows, pl.ds(pl.multiple_of(at, size), size)]

        lanes = self.shape[1]
        if not self.spread:
            return columns(slice(None), i * lanes, lanes)
        return jnp.concatenate([columns(pl.ds(row, 1), (i * _SUBLANES + k) * lanes, lanes)
                                for k in range(_SUBLANES)], 0)

    def column(self, stretch, i):
        """The columns of stripe i, or of a stripe for each place of it."""
        shape = self.shape if self.spread else (1, self.shape[1])
        within = lax.broadcasted_iota(jnp.int32, shape, 1)
        if self.spread:
            within += lax.broadcasted_iota(jnp.int32, shape, 0) * shape[1]
        return stretch * self.width + i * self.columns + within

    def first(self, values, at, stretch):
        """(largest value, its column, of equals the first) of the rows, for values that lie in the stripes `at`."""
        top = self.over(jnp.max, values)
        # Lanes reduce floats faster than integers; below 2^24 they are exact.
        column = self.column(stretch, at).astype(jnp.float32)
        return top, self.over(jnp.min, jnp.where(values == top, column, self.size - 1.0))

    def over(self, reduce, values):
        """Of every row."""
        return reduce(values, axis=(0, 1) if self.spread else 1, keepdims=True)


def stretches(logits: Float[Array, "B N V"], inverse: Float[Array, "B N"] | None, words: UInt32[Array, "B K 2"] | None,
              row: Int[Array, "B N"] | None, *, names: tuple[str, ...], interpret: bool = False) -> dict[str, Array]:
    """{name: [B, N, S]}, see `parallax.kernels.vocabulary`.

    Args:
      interpret: True, or `pltpu.InterpretParams()`, runs it without a TPU.
    """
    batch, rows, size = logits.shape
    if row is not None and pl.cdiv(words.shape[1], _SUBLANES) >= pl.cdiv(rows, _SUBLANES):
        words, row = of_rows(words, row), None        # fewer keys than rows, but as many registers
    if row is None and rows % _SUBLANES and batch > 1:           # all rows one behind the other, else sublanes idle
        inverse, words = (x if x is None else x.reshape(1, batch * rows, *x.shape[2:]) for x in (inverse, words))
        said = stretches(logits.reshape(1, batch * rows, size), inverse, words, None, names=names, interpret=interpret)
        return {name: value.reshape(batch, rows, -1) for name, value in said.items()}
    tile = min(rows, _ROWS)
    cut = _Cut.of(size, tile)

    def per_row(*shape):
        return pl.BlockSpec((1, tile, *shape), lambda b, n, s: (b, n, 0))

    keys = per_row(2) if row is None else pl.BlockSpec((1, words.shape[1], 2), lambda b, n, s: (b, 0, 0))
    said = pl.pallas_call(
        partial(_stretches, names=names, cut=cut),
        out_shape=jax.ShapeDtypeStruct((batch, cut.count, rows, len(names)), jnp.float32),
        grid=(batch, pl.cdiv(rows, tile), cut.count),
        in_specs=[None if inverse is None else per_row(1), None if words is None else keys,
                  None if row is None else per_row(1), pl.BlockSpec((1, tile, cut.width), lambda b, n, s: (b, n, s))],
        out_specs=pl.BlockSpec((1, 1, tile, len(names)), lambda b, n, s: (b, s, n, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="vocabulary",
    )(None if inverse is None else inverse[..., None], words, None if row is None else row[..., None], logits)
    said = {name: said[..., i].swapaxes(1, 2) for i, name in enumerate(names)}
    return {name: value.astype(jnp.int32) if name in ("best", "drawn") else value for name, value in said.items()}


def leftovers(logits: Float[Array, "B N V"], logq: Float[Array, "B I V"], top: Float[Array, "B"],
              lse: Float[Array, "B"], inverse: Float[Array, "B"], node: Int[Array, "B"], rejected: Bool[Array, "B"],
              words: UInt32[Array, "B 2"], *, interpret: bool = False) -> tuple[Array, Array, Array, Array]:
    """[B, S] each, see `parallax.kernels.vocabulary`. `interpret` as for `stretches`."""
    batch, _, size = logits.shape
    cut = _Cut.of(size, 1)

    def at_node(x):
        rows, last = min(_SUBLANES, x.shape[1]), x.shape[1] - 1         # memory holds rows in tiles of eight
        return pl.BlockSpec((1, rows, cut.width),
                            lambda b, s, node, *_: (b, lax.div(jnp.minimum(node[b], last), rows), s))

    said = pl.pallas_call(
        partial(_leftovers, cut=cut, last=(logits.shape[1] - 1, logq.shape[1] - 1)),
        out_shape=jax.ShapeDtypeStruct((batch, cut.count, 1, 4), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7, grid=(batch, cut.count), in_specs=[at_node(logits), at_node(logq)],
            out_specs=pl.BlockSpec((1, 1, 1, 4), lambda b, s, *_: (b, s, 0, 0))),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 2),
        interpret=interpret,
        name="leftovers",
    )(node, rejected.astype(jnp.int32), top, lse, inverse, words[:, 0], words[:, 1], logits, logq)[:, :, 0]
    return said[..., 0], said[..., 1].astype(jnp.int32), said[..., 2], said[..., 3].astype(jnp.int32)


def _up(n, unit):
    return pl.cdiv(n, unit) * unit


def _stretches(inverse, words, row, x, out, *, names, cut):
    stretch = pl.program_id(2)
    zeros = jnp.zeros(cut.shape, jnp.float32)
    nothing, nowhere = zeros - jnp.inf, jnp.zeros(cut.shape, jnp.int32)
    said = {}
    cut.fill(x, stretch)

    def rank(i, carry):
        top, at, second = carry
        now = cut.read(x, i)
        if second is not None:
            second = jnp.maximum(second, jnp.minimum(now, top))
        if at is None:
            return jnp.maximum(top, now), at, second
        better = now > top
        return jnp.where(better, now, top), jnp.where(better, i, at), second

    placed, runner_up = "best" in names or "second" in names, "second" in names
    tops, at, seconds = cut.fold(rank, (nothing, nowhere if placed else None, nothing if runner_up else None))
    if placed:
        said["top"], said["best"] = cut.first(tops, at, stretch)
    else:
        said["top"] = cut.over(jnp.max, tops)
    if runner_up:
        here = cut.column(stretch, at).astype(jnp.float32) == said["best"]
        said["second"] = cut.over(jnp.max, jnp.where(here, seconds, tops))
    reference = jnp.maximum(said["top"], LOWEST)

    def add(i, carry):
        total, moment, score, at = carry
        z = cut.read(x, i) - reference
        if inverse is not None:
            z = z * inverse[0]
        if total is not None:
            weight = jnp.exp(z)
            total = total + weight
        if moment is not None:
            moment = moment + weight * jnp.maximum(z, LOWEST)
        if score is not None:
            noise = threefry.gumbel(words[0, :, 0:1], words[0, :, 1:2], cut.column(stretch, i).astype(jnp.uint32))
            now = z + _own(noise, row)
            better = now > score
            score, at = jnp.where(better, now, score), jnp.where(better, i, at)
        return total, moment, score, at

    starts = {"total": zeros, "moment": zeros, "score": nothing, "drawn": nowhere}
    if set(starts) & set(names):
        total, moment, score, at = cut.fold(add, tuple(starts[name] if name in names else None for name in starts))
        for name, values in ("total", total), ("moment", moment):
            if values is not None:
                said[name] = cut.over(jnp.sum, values)
        if score is not None:
            said["score"], said["drawn"] = cut.first(score, at, stretch)
    for i, name in enumerate(names):
        out[0, 0, :, i:i + 1] = said[name]


def _own(noise, row):
    """The noise of each row: that of key row[n], or of key n."""
    if row is None:
        return noise
    picked = noise[0:1]
    for key in range(1, noise.shape[0]):
        picked = jnp.where(row[0] == key, noise[key:key + 1], picked)
    return picked


def _leftovers(node, rejected, top, lse, inverse, first, second, p, q, out, *, cut, last):
    b, stretch = pl.program_id(0), pl.program_id(1)
    nothing, nowhere = jnp.full(cut.shape, -jnp.inf, jnp.float32), jnp.zeros(cut.shape, jnp.int32)
    cut.fill(p, stretch)

    def law(x, i, last):
        return cut.read(x, i, lax.rem(jnp.minimum(node[b], last), x.shape[1]))

    def judge(i, carry):
        score, at, rest, rest_at = carry
        logp, logq = (law(p, i, last[0]) - top[b]) * inverse[b] - lse[b], law(q, i, last[1])
        noise = threefry.gumbel(jnp.full((1, 1), first[b]), jnp.full((1, 1), second[b]),
                                cut.column(stretch, i).astype(jnp.uint32))
        above = (logp > logq) & (rejected[b] > 0)
        now = logp + noise
        left = jnp.where(above, now + jnp.log(_less(jnp.where(above, logq - logp, -1.0))), -jnp.inf)
        better, more = now > score, left > rest
        return (jnp.where(better, now, score), jnp.where(better, i, at),
                jnp.where(more, left, rest), jnp.where(more, i, rest_at))

    score, at, rest, rest_at = cut.fold(judge, (nothing, nowhere, nothing, nowhere))
    for i, value in enumerate((*cut.first(score, at, stretch), *cut.first(rest, rest_at, stretch))):
        out[0, 0, :, i:i + 1] = value


def _less(x):
    """1 - exp(x) for x below 0, to a few units in the last place: near 0 by its series."""
    series = 1.0
    for n in range(7, 1, -1):
        series = 1 + x / n * series
    return jnp.where(x > -0.25, -x * series, 1 - jnp.exp(x))
