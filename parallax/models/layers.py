"""The linen modules of one transformer layer.

E hidden size, N = B * T rows of the block (and some columns to `fill` up), H query heads, Hkv key/value heads,
G = H / Hkv, D head size, F MLP width.

Activations are feature-major, [E, N], and weights [out, in], so every product is `w @ x`. XLA's CPU library runs
that form 1.5 times faster than `x @ w.T` for blocks of 4 to 16 rows; other backends choose layouts themselves.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from parallax.kernels.attention import attend
from parallax.models import rope
from parallax.models.cache import KV, Cache
from parallax.models.config import ModelConfig

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
}
_weight_init = nn.initializers.normal(0.02)


class Scope(NamedTuple):
    """What every layer of one forward reads: made once, in front of the layers.

    visible [B, T, C+T], positions [B, T], key_positions [B, C+T], cache, and context (or None); rotations: (cos, sin)
    of full and of sliding layers, or None.
    """

    visible: Bool[Array, "B T CT"]
    positions: Int[Array, "B T"]
    key_positions: Int[Array, "B CT"]
    cache: Cache
    context: KV | None
    full_rotation: tuple | None
    local_rotation: tuple | None


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the feature axis, computed in float32."""

    config: ModelConfig
    size: int
    axis: int = 0
    center: bool = True           # head norms are RMSNorm in every family

    @nn.compact
    def __call__(self, x: Array) -> Array:
        cfg = self.config
        layernorm = cfg.norm == "layernorm" and self.center
        init = nn.initializers.zeros if cfg.norm_plus_one else nn.initializers.ones
        shape = [1] * x.ndim
        shape[self.axis] = self.size
        scale = self.param("scale", init, (self.size,), cfg.dtype).astype(jnp.float32).reshape(shape)
        y = x.astype(jnp.float32)
        if layernorm:
            y = y - y.mean(self.axis, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(self.axis, keepdims=True) + cfg.norm_eps)
        y = y * (1 + scale if cfg.norm_plus_one else scale)
        if layernorm:
            y = y + self.param("bias", nn.initializers.zeros, (self.size,), cfg.dtype).reshape(shape)
        return y.astype(x.dtype)


def fill(x: Float[Array, "I N"]) -> Float[Array, "I M"]:
    """Adds zero columns until 5 to 15 columns are 8 or 16. What they become is never read.

    XLA's CPU library multiplies by 8 columns in less time than by 5, and by 16 in less than by 9 (SmolLM2-135M's
    products, two cores, ms: 4 columns 24, 5 35, 8 28, 9 43, 15 52, 16 37); elsewhere tiles are at least that wide.
    """
    columns = x.shape[1]
    wanted = 8 if 4 < columns < 8 else 16 if 8 < columns < 16 else columns
    return jnp.pad(x, ((0, 0), (0, wanted - columns)))


class Linear(nn.Module):
    """`w @ x (+ b)` with w [out, in] and x [in, N]."""

    config: ModelConfig
    features: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "I N"]) -> Float[Array, "O N"]:
        weight = self.param("w", _weight_init, (self.features, x.shape[0]), self.config.dtype)
        y = weight @ x
        if self.bias:
            y = y + self.param("b", nn.initializers.zeros, (self.features,), self.config.dtype)[:, None]
        return y


class Attention(nn.Module):
    """Grouped-query attention of the block; also returns the block's keys and values."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "E N"], scope: Scope, layer, sliding):
        cfg = self.config
        batch, rows = scope.positions.shape
        heads, shared, size = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        qkv = Linear(cfg, (heads + 2 * shared) * size, cfg.qkv_bias, name="qkv")(x)
        qkv = qkv[:, :batch * rows].reshape(heads + 2 * shared, size, batch, rows)
        q, k, v = jnp.split(qkv, [heads, heads + shared])
        if cfg.qk_norm:
            q = Norm(cfg, size, axis=1, center=False, name="q_norm")(q)
            k = Norm(cfg, size, axis=1, center=False, name="k_norm")(k)
        if scope.full_rotation is not None:
            cos, sin = _pick(sliding, scope.local_rotation, scope.full_rotation)
            q, k = rope.rotate(q, cos, sin), rope.rotate(k, cos, sin)
        q = q.reshape(shared, heads // shared, size, batch, rows).transpose(3, 0, 1, 4, 2)
        k, v = k.transpose(2, 0, 3, 1), v.transpose(2, 0, 3, 1)                       # [B, Hkv, T, D]
        keys, values = k, v
        if scope.context is not None:
            earlier_k, earlier_v = (_layer(part, layer) for part in (scope.context.k, scope.context.v))
            keys = jnp.concatenate([earlier_k.swapaxes(1, 2), k], 2)
            values = jnp.concatenate([earlier_v.swapaxes(1, 2), v], 2)
        window = _pick(sliding, cfg.sliding_window, None if isinstance(sliding, bool) else jnp.iinfo(jnp.int32).max)
        y = attend(q, keys, values, scope.cache, layer, visible=scope.visible, positions=scope.positions,
                   key_positions=scope.key_positions, scale=cfg.scale, softcap=cfg.attention_softcap, window=window,
                   kernels=cfg.kernels)
        y = y.transpose(1, 2, 4, 0, 3).reshape(heads * size, batch * rows)
        y = Linear(cfg, cfg.hidden_size, cfg.out_bias, name="out")(fill(y))
        return y, k.swapaxes(1, 2), v.swapaxes(1, 2)


class Mlp(nn.Module):
    """`down(act(gate(x)) * up(x))`, or without the gate."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "E N"]) -> Float[Array, "E N"]:
        cfg = self.config
        act = _ACTIVATIONS[cfg.activation]
        up = Linear(cfg, cfg.intermediate_size, cfg.mlp_bias, name="up")(x)
        if cfg.gated_mlp:                      # gate and up stay apart: XLA's CPU library runs the two side by side
            up = act(Linear(cfg, cfg.intermediate_size, cfg.mlp_bias, name="gate")(x)) * up
        else:
            up = act(up)
        return Linear(cfg, cfg.hidden_size, cfg.mlp_bias, name="down")(up)


class Layer(nn.Module):
    """Pre-norm attention and MLP, each with an optional norm behind it (sandwich)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "E N"], scope: Scope, layer, sliding):
        cfg = self.config

        def norm(name, y):
            return Norm(cfg, cfg.hidden_size, name=name)(y)

        y, k, v = Attention(cfg, name="attention")(norm("attention_norm", x), scope, layer, sliding)
        x = x + (norm("attention_post_norm", y) if cfg.sandwich_norms else y)
        y = Mlp(cfg, name="mlp")(norm("mlp_norm", x))
        return x + (norm("mlp_post_norm", y) if cfg.sandwich_norms else y), k, v


def _pick(flag, yes, no):
    """`yes` or `no`: at trace time where `flag` is a bool, elementwise where it is traced (scanned layers)."""
    if flag is True or flag is False:
        return yes if flag else no
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), yes, no)


def _layer(stacked, layer):
    """Layer `layer` of a tuple of layers, also for a traced index."""
    return stacked[layer] if isinstance(layer, int) else jnp.stack(stacked)[layer]
