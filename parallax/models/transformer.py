"""The model contract: pure functions over a parameter tree.

B batch, T block rows, C context rows, E hidden size, V vocabulary, L layers, Hkv key/value heads, D head size.

Parameters: {"embed": {"tokens" [V, E], "positions"}, "layers": one tree whose leaves hold all layers, "final_norm",
"head" [V, E] if untied}; with a reduced vocabulary "head" [Vd, E] and "d2t" [Vd], the ids of its rows, ascending.
A leaf of "layers" is one array [L, ...] or a tuple of L arrays; both forms work everywhere. Scanned layers want stacked
leaves, unrolled ones want tuples (a slice of a stacked weight costs a copy of it each step on CPU): `stack_layers` and
`split_layers` convert, and nothing else differs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float, Int

from parallax.models import rope
from parallax.models.cache import KV, Block, Cache, Output
from parallax.models.config import ModelConfig
from parallax.models.layers import Layer, Norm, Scope, fill

Params = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder-only transformer: `config` is all there is to it, so it is a fine static argument of `jax.jit`."""

    config: ModelConfig

    def init(self, key: jax.Array) -> Params:
        """Random parameters. `key` is consumed."""
        cfg = self.config
        embed_key, head_key, layers_key, position_key = jax.random.split(key, 4)
        table = nn.initializers.normal(0.02)
        params = {"embed": {"tokens": table(embed_key, (cfg.vocab_size, cfg.hidden_size), cfg.dtype)}}
        if cfg.positions == "learned":
            params["embed"]["positions"] = table(position_key, (cfg.max_positions, cfg.hidden_size), cfg.dtype)
        x = jnp.zeros((cfg.hidden_size, 1), cfg.dtype)
        scope = self._scope(Block(*(jnp.zeros((1, 1), jnp.int32),) * 2, jnp.ones((1, 1), bool)),
                            self.new_cache(1, 0), None)
        params["layers"] = jax.vmap(lambda k: Layer(cfg).init(k, x, scope, 0, False)["params"])(
            jax.random.split(layers_key, cfg.num_layers))
        params["final_norm"] = self._final_norm.init(head_key, x)["params"]
        if not cfg.tie_embeddings:
            params["head"] = table(head_key, (cfg.draft_vocab or cfg.vocab_size, cfg.hidden_size), cfg.dtype)
        if cfg.draft_vocab:
            params["d2t"] = jnp.arange(cfg.draft_vocab, dtype=jnp.int32)
        return params if cfg.scan_layers else split_layers(params)

    def embed(self, params: Params, tokens: Int[Array, "..."]) -> Float[Array, "... E"]:
        """Token embeddings, scaled as the model wants them, without positions."""
        x = jnp.take(params["embed"]["tokens"], tokens, axis=0, mode="clip")
        return x if self.config.embed_scale == 1.0 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def forward(self, params: Params, block: Block, cache: Cache, *, context: KV | None = None,
                layers: tuple[int, int | None] = (0, None)) -> Output:
        """Runs the block over the committed prefix. Writes nothing; computes no logits.

        Args:
          params: the parameter tree.
          block: the rows, see `Block`.
          cache: committed keys and values of (at least) the layers that run.
          context: keys and values of earlier uncommitted rows, the first columns of `block.visible`.
          layers: half-open range of layers; (0, 4) is an exit after four layers.
        """
        cfg = self.config
        batch, rows = block.tokens.shape
        first, last = layers[0], cfg.num_layers if layers[1] is None else layers[1]
        x = self.embed(params, block.tokens)
        if block.embeds is not None:
            x = jnp.where(block.soft[..., None], block.embeds.astype(x.dtype), x)
        if cfg.positions == "learned":
            x = x + jnp.take(params["embed"]["positions"], block.positions, axis=0, mode="clip")
        x = fill(x.reshape(batch * rows, cfg.hidden_size).T)
        scope = self._scope(block, cache, context)
        run = self._scanned if cfg.scan_layers else self._unrolled
        x, keys, values, taps = run(params["layers"], x, scope, first, last)
        hidden = self._rows(x, batch, rows)
        # Ties the keys and values to the end of the forward. Without it XLA may write the cache before the last layer
        # has read it, and then copies the whole cache every step. It cannot fold a comparison with the hidden state.
        tie = (hidden[0, 0, 0] == jnp.inf).astype(cfg.dtype)
        kv = KV(tuple(k + tie for k in keys), tuple(v + tie for v in values), block.positions)
        taps = [self._rows(tap, batch, rows) for tap in taps]
        taps = jnp.stack(taps, 2) if taps else jnp.zeros((batch, rows, 0, cfg.hidden_size), hidden.dtype)
        return Output(hidden, taps, kv)

    def unembed(self, params: Params, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Final norm and head, on the rows that the caller picks: float32 logits, -inf where the head has no row."""
        cfg = self.config
        lead = hidden.shape[:-1]
        x = self._final_norm.apply({"params": params["final_norm"]}, hidden.reshape(-1, cfg.hidden_size).T)
        head = params["embed"]["tokens"] if cfg.tie_embeddings else params["head"]
        # The barrier keeps XLA from turning the product into its slower token-major form (9.0 against 6.1 ms for 8 rows
        # of a 49152-token vocabulary on two CPU cores).
        logits = lax.optimization_barrier(jnp.matmul(head, fill(x), preferred_element_type=jnp.float32))
        if cfg.logit_softcap is not None:
            logits = cfg.logit_softcap * jnp.tanh(logits / cfg.logit_softcap)
        if cfg.draft_vocab:
            logits = jnp.full((cfg.vocab_size, logits.shape[1]), -jnp.inf).at[params["d2t"]].set(
                logits, indices_are_sorted=True, unique_indices=True, mode="promise_in_bounds")
        return logits[:, :x.shape[1]].T.reshape(*lead, cfg.vocab_size)

    def new_cache(self, batch: int, capacity: int, layers: int | None = None) -> Cache:
        """An empty cache of `capacity` slots per sequence, for the first `layers` layers (all by default)."""
        cfg = self.config
        count = cfg.num_layers if layers is None else layers
        shape = (batch, cfg.num_kv_heads, capacity, cfg.head_dim)
        length = jnp.zeros((batch,), jnp.int32)
        if cfg.scan_layers:
            return Cache(jnp.zeros((count, *shape), cfg.dtype), jnp.zeros((count, *shape), cfg.dtype), length)
        return Cache(*(tuple(jnp.zeros(shape, cfg.dtype) for _ in range(count)) for _ in range(2)), length)

    @property
    def _final_norm(self) -> Norm:
        return Norm(self.config, self.config.hidden_size)

    def _rows(self, x, batch, rows):
        """[E, N and filling] -> [B, T, E]."""
        return x[:, :batch * rows].T.reshape(batch, rows, self.config.hidden_size)

    def _scope(self, block: Block, cache: Cache, context: KV | None) -> Scope:
        cfg = self.config
        batch, rows = block.tokens.shape
        visible = jnp.broadcast_to(block.visible, (batch, rows, block.visible.shape[-1]))
        key_positions = block.positions
        if context is not None:
            key_positions = jnp.concatenate([context.positions, key_positions], 1)
        full = local = None
        if cfg.positions == "rope":
            full = rope.table(block.positions, rope.frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling))
            local = full
            if cfg.local_rope_theta is not None:
                local = rope.table(block.positions, rope.frequencies(cfg.head_dim, cfg.local_rope_theta))
        return Scope(visible, block.positions, key_positions, cache, context, full, local)

    def _unrolled(self, stack, x, scope, first, last):
        keys, values, taps = [], [], {}
        for i in range(first, last):
            weights = jax.tree.map(lambda w: w[i], stack, is_leaf=lambda w: isinstance(w, tuple))
            x, k, v = Layer(self.config).apply({"params": weights}, x, scope, i, self.config.sliding(i))
            keys.append(k)
            values.append(v)
            taps[i] = x
        return x, keys, values, [taps[tap] for tap in self.config.taps if first <= tap < last]

    def _scanned(self, stack, x, scope, first, last):
        cfg = self.config
        stack = stack_layers({"layers": stack})["layers"]
        uniform = len({cfg.sliding(i) for i in range(first, last)}) == 1
        sliding = cfg.sliding(first) if uniform else jnp.asarray([cfg.sliding(i) for i in range(first, last)])
        wanted = [tap for tap in cfg.taps if first <= tap < last]

        def body(carry, inputs):
            x, taps = carry
            weights, i, kind = inputs
            x, k, v = Layer(cfg).apply({"params": weights}, x, scope, i, sliding if uniform else kind)
            taps = tuple(jnp.where(i == tap, x, old) for tap, old in zip(wanted, taps))
            return (x, taps), (k, v)

        indices = jnp.arange(first, last)
        whole = (first, last) == (0, cfg.num_layers)
        weights = stack if whole else jax.tree.map(lambda w: w[first:last], stack)
        kinds = jnp.zeros(last - first, bool) if uniform else sliding
        (x, taps), (keys, values) = lax.scan(body, (x, (x,) * len(wanted)), (weights, indices, kinds))
        return x, tuple(keys), tuple(values), list(taps)


def stack_layers(params: Params) -> Params:
    """Layer leaves as one array [L, ...] each, for scanned layers."""
    stacked = jax.tree.map(lambda w: jnp.stack(w) if isinstance(w, tuple) else w, params["layers"],
                           is_leaf=lambda w: isinstance(w, tuple))
    return {**params, "layers": stacked}


def split_layers(params: Params) -> Params:
    """Layer leaves as a tuple of L arrays each, for unrolled layers."""
    return {**params, "layers": jax.tree.map(lambda w: w if isinstance(w, tuple) else tuple(w), params["layers"],
                                             is_leaf=lambda w: isinstance(w, tuple))}
