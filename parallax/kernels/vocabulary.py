"""What verification and unmasking need of logits, in one pass over the vocabulary and without probabilities in memory.

B sequences, N rows, V vocabulary, R noise rows, I rows of a draft's law, S stretches of the vocabulary.

The kernels cut the vocabulary into stretches and say of each what `merge` needs to join them: its largest logit, and
everything else in relation to that. So nothing overflows at a low temperature, and no stretch waits for another.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from parallax.kernels import threefry
from parallax.kernels.dispatch import Kernels, dispatch, late

LOWEST = -3.4e38   # stands for -inf where a difference is taken
Wanted = Literal["best", "second", "lse", "mean"]
# What kernels say of a stretch: which fields need it.
_PARTS = {"best": ("best",), "second": ("second",), "total": ("lse", "mean"), "moment": ("mean",)}
_MODULES = "vocabulary_tpu", "vocabulary_gpu"


class Noise(NamedTuple):
    """Gumbel noise: that of `keys[b, row[b, n]]` for row n. keys [B, R]; row [N] or [B, N], below R."""

    keys: Key[Array, "B R"]
    row: Int[Array, "B N"]


class Statistics(NamedTuple):
    """Of every row of logits, with z = (logits - top) / temperature. What was not asked for is None.

    top [B, N]: the largest logit; best [B, N]: its index, of equals the lowest; second [B, N]: z of the runner-up;
    lse [B, N]: log sum exp z; mean [B, N]: the expected z under softmax z; drawn [B, N]: the index of the largest
    z + noise.
    """

    top: Float[Array, "B N"]
    best: Int[Array, "B N"] | None = None
    second: Float[Array, "B N"] | None = None
    lse: Float[Array, "B N"] | None = None
    mean: Float[Array, "B N"] | None = None
    drawn: Int[Array, "B N"] | None = None


class Confidence(NamedTuple):
    """How sure each row is: its most likely token, that token's probability, the entropy of the law in nats, and how
    far the runner-up's probability is behind."""

    token: Int[Array, "B N"]
    probability: Float[Array, "B N"]
    entropy: Float[Array, "B N"]
    margin: Float[Array, "B N"]


def in_use(kernels: Kernels) -> bool:
    """Whether a program of this choice may run the kernels. If not, it need not be written for them."""
    return kernels == "pallas" or kernels == "auto" and jax.default_backend() != "cpu"


def statistics(logits: Float[Array, "B N V"], want: tuple[Wanted, ...] = (), *,
               temperature: Float[Array, "B"] | float | None = None, noise: Noise | None = None,
               kernels: Kernels = "auto") -> Statistics:
    """`Statistics` of the logits; `drawn` is among them if there is noise.

    Args:
      logits: float32; -inf excludes a token.
      want: which fields to compute, static. None costs anything if it is not asked for.
      temperature: one number or one per sequence, above 0; None is 1.
      kernels: which version runs, see `parallax.kernels.dispatch`.
    """
    batch, rows, _ = logits.shape
    if temperature is not None:
        temperature = jnp.broadcast_to(jnp.asarray(temperature, logits.dtype), (batch,))
    if noise is not None:
        noise = Noise(noise.keys, jnp.broadcast_to(jnp.asarray(noise.row, jnp.int32), (batch, rows)))
        kernels = kernels if threefry.usable(noise.keys) else "xla"
    tpu, gpu = (partial(statistics_by, late(module, "stretches"), want=want) for module in _MODULES)
    return dispatch(kernels, logits, temperature, noise, xla=partial(reference, want=want), tpu=tpu, gpu=gpu,
                    layouts=("b", "b", "b"), out="b")


def confidence(logits: Float[Array, "B N V"], *, temperature: Float[Array, "B"] | float | None = None,
               kernels: Kernels = "auto") -> Confidence:
    """What diffusion decoding unmasks by. Arguments as of `statistics`."""
    said = statistics(logits, ("best", "second", "lse", "mean"), temperature=temperature, kernels=kernels)
    likely = jnp.exp(-said.lse)
    return Confidence(said.best, likely, said.lse - said.mean, likely - jnp.exp(said.second - said.lse))


def residual(logits: Float[Array, "B N V"], top: Float[Array, "B N"], lse: Float[Array, "B N"],
             logq: Float[Array, "B I V"], node: Int[Array, "B"], rejected: Bool[Array, "B"], keys: Key[Array, "B"], *,
             temperature: Float[Array, "B"] | float | None = None, kernels: Kernels = "auto") -> Int[Array, "B"]:
    """A token from [p - q]+, normalised, where `rejected`, else from p, by the Gumbel noise of `keys`.

    p is the law of row `node` of the logits, q that of the same row of `logq`; of p also where nothing is left of
    [p - q]+, for equal laws leave only rounding errors there.

    Args:
      top, lse: the `Statistics` of the logits at this temperature.
      node: below N, and below I where `rejected`.
    """
    if temperature is not None:
        temperature = jnp.broadcast_to(jnp.asarray(temperature, logits.dtype), node.shape)
    top, lse = (jnp.take_along_axis(x, node[:, None], 1)[:, 0] for x in (top, lse))
    if not threefry.usable(keys):
        kernels = "xla"
    tpu, gpu = (partial(residual_by, late(module, "leftovers")) for module in _MODULES)
    return dispatch(kernels, logits, logq, top, lse, node, rejected, keys, temperature, xla=residual_reference, tpu=tpu,
                    gpu=gpu, layouts=("b",) * 8, out="b")


def reference(logits, temperature, noise, want):
    """As `statistics`, in XLA's words."""
    top = logits.max(-1)
    z = logits - top[..., None]
    if temperature is not None:
        z = z / temperature[:, None, None]
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    said = {"best": best, "lse": jax.nn.logsumexp(z, -1)}
    others = jnp.arange(logits.shape[-1]) != best[..., None]
    said["second"] = jnp.where(others, z, -jnp.inf).max(-1)
    said["mean"] = jnp.where(z > -jnp.inf, jnp.exp(z - said["lse"][..., None]) * z, 0).sum(-1)
    said = {name: said[name] for name in want}
    if noise is not None:
        drawn = jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:])))(noise.keys)
        drawn = jnp.take_along_axis(drawn, noise.row[..., None], 1)
        said["drawn"] = jnp.argmax(z + drawn, -1).astype(jnp.int32)
    return Statistics(top, **said)


def log_residual(logp, logq):
    """log [p - q]+, not normalised."""
    above = logp > logq
    return jnp.where(above, logp + jnp.log(-jnp.expm1(jnp.where(above, logq - logp, -1))), -jnp.inf)


def residual_reference(logits, logq, top, lse, node, rejected, keys, temperature):
    batch = jnp.arange(len(node))
    z = logits[batch, node] - top[:, None]
    if temperature is not None:
        z = z / temperature[:, None]
    logp = z - lse[:, None]
    rest = log_residual(logp, logq[batch, jnp.minimum(node, logq.shape[1] - 1)])
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    some = rejected & (rest > -jnp.inf).any(-1)
    return jnp.argmax(jnp.where(some[:, None], rest, logp) + noise, -1).astype(jnp.int32)


def residual_by(kernel, logits, logq, top, lse, node, rejected, keys, temperature, **options):
    """Through a kernel `leftovers`: of each stretch the largest log p + noise and its index, the same of the rest."""
    inverse = jnp.ones_like(top) if temperature is None else 1 / temperature
    score, drawn, rest, rest_drawn = kernel(logits, logq, top, lse, inverse, node, rejected, jax.random.key_data(keys),
                                            **options)
    some = (rest > -jnp.inf).any(-1)
    score, drawn = jnp.where(some[:, None], rest, score), jnp.where(some[:, None], rest_drawn, drawn)
    return jnp.take_along_axis(drawn, jnp.argmax(score, -1, keepdims=True), 1)[:, 0]


def statistics_by(kernel, logits, temperature, noise, want, **options):
    """Through a kernel `stretches`.

    It takes logits, 1 / temperature [B, N] or None, the words of the keys [B, K, 2] or None, and which of them each row
    takes [B, N] or None. It returns {name: [B, N, S]} for the names that it is given; z is here relative to the largest
    logit of the stretch:
      top, best, second: as of `Statistics`, but `second` is a logit; total: sum exp z; moment: sum of z exp z;
      score, drawn: the largest z + noise and its index.
    """
    inverse = words = row = None
    if temperature is not None:
        inverse = jnp.broadcast_to(1 / temperature[:, None], logits.shape[:2])
    if noise is not None:
        words, row = jax.random.key_data(noise.keys), noise.row
    names = ["top"] + [part for part, fields in _PARTS.items() if set(fields) & set(want)]
    names += [] if noise is None else ["score", "drawn"]
    said = kernel(logits, inverse, words, row, names=tuple(names), **options)
    return merge(said, None if inverse is None else inverse[..., None], want)


def of_rows(words: UInt32[Array, "B K 2"], row: Int[Array, "B N"]) -> UInt32[Array, "B N 2"]:
    """A key for each row."""
    return jnp.take_along_axis(words, row[..., None], 1)


def merge(parts: dict[str, Array], inverse: Float[Array, "B N 1"] | None, want: tuple[Wanted, ...]) -> Statistics:
    """Joins stretches [B, N, S] in the order of the vocabulary; of equals the first wins."""
    tops = parts["top"]
    top = tops.max(-1)
    base = jnp.maximum(top, LOWEST)[..., None]

    def relative(x):
        return x - base if inverse is None else (x - base) * inverse

    def at(values, where):
        return jnp.take_along_axis(values, where, -1)

    shift, said = relative(tops), {}
    first = jnp.argmax(tops, -1, keepdims=True)
    if "best" in want:
        said["best"] = at(parts["best"], first)[..., 0]
    if "second" in want:
        others = jnp.arange(tops.shape[-1]) != first
        said["second"] = relative(jnp.where(others, tops, parts["second"]).max(-1, keepdims=True))[..., 0]
    if "total" in parts:
        totals = jnp.exp(shift) * parts["total"]
        total = totals.sum(-1)
        said["lse"] = jnp.log(total)
        if "mean" in want:
            moments = jnp.where(totals == 0, 0, jnp.exp(shift) * parts["moment"] + shift * totals)
            said["mean"] = moments.sum(-1) / total
    if "score" in parts:
        said["drawn"] = at(parts["drawn"], jnp.argmax(parts["score"] + shift, -1, keepdims=True))[..., 0]
    return Statistics(top, **said)
