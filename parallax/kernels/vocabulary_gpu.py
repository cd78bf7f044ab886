"""One pass over the vocabulary on GPU (Triton).

B sequences, N rows, V vocabulary, K keys of noise, S stretches of the vocabulary.

One program holds one stretch of the vocabulary and one key: it computes the noise of the stretch once and goes through
the rows that take it. Without noise, or with a key for each row, it has one row.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, UInt32

from parallax.kernels import threefry
from parallax.kernels.vocabulary import LOWEST, log_residual, of_rows

_WIDTH = 4096   # columns of a stretch
_WARPS = 8      # so a thread holds 16 of them


def stretches(logits: Float[Array, "B N V"], inverse: Float[Array, "B N"] | None, words: UInt32[Array, "B K 2"] | None,
              row: Int[Array, "B N"] | None, *, names: tuple[str, ...], interpret: bool = False) -> dict[str, Array]:
    """{name: [B, N, S]}, see `parallax.kernels.vocabulary`. interpret: True runs it without a GPU."""
    batch, rows, size = logits.shape
    width = min(_WIDTH, pl.next_power_of_2(size))
    count, keys = pl.cdiv(size, width), rows
    order = first = None
    if row is not None and words.shape[1] >= rows:
        words = of_rows(words, row)
    elif row is not None:                          # the rows of key k are order[first[k]:first[k + 1]]
        keys = words.shape[1]
        order = jnp.argsort(row, 1).astype(jnp.int32)
        first = (row[:, :, None] < jnp.arange(keys + 1)).sum(1, dtype=jnp.int32)
    operands = {"logits": logits, "inverse": inverse, "words": words, "order": order, "first": first}
    operands = {name: x for name, x in operands.items() if x is not None}
    types = [jnp.int32 if name in ("best", "drawn") else jnp.float32 for name in names]
    said = pl.pallas_call(
        partial(_kernel, operands=tuple(operands), names=names, keys=keys, width=width),
        out_shape=[jax.ShapeDtypeStruct((batch, rows, count), dtype) for dtype in types],
        grid=(batch * keys, count),
        **_options(len(operands), len(names)),
        interpret=interpret,
        name="vocabulary",
    )(*operands.values())
    return dict(zip(names, said))


def leftovers(logits: Float[Array, "B N V"], logq: Float[Array, "B I V"], top: Float[Array, "B"],
              lse: Float[Array, "B"], inverse: Float[Array, "B"], node: Int[Array, "B"], rejected: Bool[Array, "B"],
              words: UInt32[Array, "B 2"], *, interpret: bool = False) -> tuple[Array, Array, Array, Array]:
    """[B, S] each, see `parallax.kernels.vocabulary`. interpret: True runs it without a GPU."""
    batch, size = len(node), logits.shape[2]
    width = min(_WIDTH, pl.next_power_of_2(size))
    count = pl.cdiv(size, width)
    return pl.pallas_call(
        partial(_leftovers, width=width),
        out_shape=[jax.ShapeDtypeStruct((batch, count), dtype) for dtype in (jnp.float32, jnp.int32) * 2],
        grid=(batch, count),
        **_options(8, 4),
        interpret=interpret,
        name="leftovers",
    )(logits, logq, top, lse, inverse, node, rejected.astype(jnp.int32), words)


def _options(operands, results):
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return {"in_specs": [whole] * operands, "out_specs": [whole] * results,
            "compiler_params": plgpu.CompilerParams(num_warps=_WARPS)}


def _columns(width, size):
    """The columns of this program's stretch, and which of them the vocabulary has."""
    column = pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
    return column, column < size


def _first(values, column, size):
    """(largest value, its column; of equals the first)."""
    top = jnp.max(values)
    return top, jnp.min(jnp.where(values == top, column, size - 1))


def _kernel(*refs, operands, names, keys, width):
    given, out = dict(zip(operands, refs)), dict(zip(names, refs[len(operands):]))
    b, key, stretch = pl.program_id(0) // keys, pl.program_id(0) % keys, pl.program_id(1)
    size = given["logits"].shape[2]
    column, inside = _columns(width, size)
    noise = threefry.gumbel(given["words"][b, key, 0], given["words"][b, key, 1],
                            column.astype(jnp.uint32)) if "words" in given else None

    def tell(n):
        x = plgpu.load(given["logits"].at[b, n, column], mask=inside, other=-jnp.inf)
        said = {}
        said["top"], said["best"] = _first(x, column, size)
        said["second"] = jnp.max(jnp.where(column == said["best"], -jnp.inf, x))
        z = x - jnp.maximum(said["top"], LOWEST)
        if "inverse" in given:
            z = z * given["inverse"][b, n]
        weights = jnp.exp(z)
        said["total"] = jnp.sum(weights)
        said["moment"] = jnp.sum(weights * jnp.maximum(z, LOWEST))
        if noise is not None:
            said["score"], said["drawn"] = _first(z + noise, column, size)
        for name in names:
            out[name][b, n, stretch] = said[name]

    if "order" not in given:
        tell(key)
    else:
        def body(i, carry):
            tell(given["order"][b, i])
            return carry

        lax.fori_loop(given["first"][b, key], given["first"][b, key + 1], body, 0)


def _leftovers(logits, logq, top, lse, inverse, node, rejected, words, *out, width):
    b, stretch = pl.program_id(0), pl.program_id(1)
    size = logits.shape[2]
    column, inside = _columns(width, size)
    noise = threefry.gumbel(words[b, 0], words[b, 1], column.astype(jnp.uint32))
    x = plgpu.load(logits.at[b, node[b], column], mask=inside, other=-jnp.inf)
    logp = (x - top[b]) * inverse[b] - lse[b]
    drafted = inside & (rejected[b] > 0)
    q = plgpu.load(logq.at[b, jnp.minimum(node[b], logq.shape[1] - 1), column], mask=drafted, other=jnp.inf)
    for values, best, at in ((logp, *out[:2]), (log_residual(logp, q), *out[2:])):
        best[b, stretch], at[b, stretch] = _first(values + noise, column, size)
