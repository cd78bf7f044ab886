"""Targets and drafters whose right answers are known in advance.

B sequences, T block rows or tree nodes, V vocabulary, N token slots.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from parallax.decoding import loop
from parallax.decoding.base import Decoder, Draft, Drafter, Kind, Result, policy, static
from parallax.decoding.sampling import DRAFT, argmax, noise_private
from parallax.decoding.tree import Shape
from parallax.models import KV, Block, Cache, Model, Output
from parallax.testing.tiny import tiny_config


@dataclasses.dataclass(frozen=True)
class MarkovModel(Model):
    """A target whose next token depends on the current one alone: params["table"] [V, V] are its logits.

    With it the law of every continuation can be written down (`markov_law`), so a decoder's output can be tested
    against the exact law through the real compiled loop.
    """

    @classmethod
    def create(cls, table: Float[np.ndarray, "V V"]) -> tuple[MarkovModel, dict]:
        """(model, parameters) of a table of logits."""
        size = len(table)
        model = cls(tiny_config(vocab_size=size, hidden_size=size, num_layers=1, num_heads=1, num_kv_heads=1,
                                head_dim=2))
        return model, {"table": jnp.asarray(table, jnp.float32)}

    def embed(self, params, tokens):
        return params["table"][tokens]

    def forward(self, params, block: Block, cache: Cache, *, context=None, layers=(0, None)) -> Output:
        batch, rows = block.tokens.shape
        hidden = self.embed(params, block.tokens)
        empty = (jnp.zeros((batch, rows, 1, self.config.head_dim)),)
        return Output(hidden, jnp.zeros((batch, rows, 0, hidden.shape[-1])), KV(empty, empty, block.positions))

    def unembed(self, params, hidden):
        return hidden


def markov_law(probabilities: Float[np.ndarray, "V V"], first: int, length: int) -> Float[np.ndarray, "outcomes"]:
    """Probability of every continuation of `length` tokens behind token `first`, in base-V order."""
    size = len(probabilities)
    law = probabilities[first]
    for _ in range(length - 1):
        last = np.arange(len(law)) % size
        law = (law[:, None] * probabilities[last]).reshape(-1)
    return law


def run_many(decoder: Decoder, params, prompt: list[int], new_tokens: int, draws: int, seed: int = 0) -> Result:
    """`draws` independent runs of one prompt, each through the compiled loop alone; leaves have [draws, 1, ...]."""
    capacity = len(prompt) + new_tokens
    inputs = loop.cast(decoder, params, [prompt], len(prompt), None, seed, capacity, capacity=capacity)

    def one(row):
        return loop.run(inputs._replace(row_ids=row[None]), capacity)

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(one))(jnp.arange(draws)))


def sample_many(decoder: Decoder, params, prompt: list[int], new_tokens: int, draws: int, seed: int = 0) -> np.ndarray:
    """`draws` independent continuations [draws, new_tokens] of one prompt."""
    return run_many(decoder, params, prompt, new_tokens, draws, seed).tokens[:, 0, len(prompt):]


def p_value(samples: Int[np.ndarray, "draws length"], law: Float[np.ndarray, "outcomes"]) -> float:
    """Of continuations under their law (of `markov_law`), by chi-square. 0 if one of them cannot occur."""
    from scipy.special import chdtrc  # late: the oracles themselves need no statistics

    draws, length = samples.shape
    size = round(len(law) ** (1 / length))
    seen = np.bincount(samples @ size ** np.arange(length)[::-1], minlength=len(law))
    if seen[law == 0].any():
        return 0.0
    expected = draws * law[law > 0]
    return float(chdtrc(len(expected) - 1, ((seen[law > 0] - expected) ** 2 / expected).sum()))


@policy
class OracleDrafter(Drafter):
    """Drafts from the right answer: params["draft"] [B, N] holds the target's own tokens.

    Attributes:
      shape: the tree.
      right: per depth, whether the right token is among the siblings; the sibling that has it changes from position to
        position. So the number of accepted tokens of every step is known.
    """

    shape: Shape = static()
    right: tuple[bool, ...] = static(default=())

    @property
    def depth(self) -> int:
        return self.shape.depth

    @functools.cached_property
    def _siblings(self) -> tuple[int, ...]:
        """How many children each node's parent has."""
        parents = self.shape.parents
        return tuple(parents[1:].count(parent) for parent in parents)

    def propose(self, params: Int[Array, "B N"], own, ctx):
        size = ctx.model.config.vocab_size
        columns = [jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)]
        for node in range(1, len(self.shape.parents)):
            depth, rank, siblings = self.shape.depths[node], self.shape.ranks[node], self._siblings[node]
            position = ctx.length + depth - 1
            token = jnp.take_along_axis(params, jnp.minimum(position, params.shape[1] - 1)[:, None], 1)
            place = position[:, None] % siblings if self.right[depth - 1] else -1
            columns.append((token + rank - place) % size)
        tokens = jnp.concatenate(columns, 1)
        return Draft(tokens, self.shape.parents, jnp.ones_like(tokens, bool), depth=self.depth), own


@policy
class SampledDrafter(Drafter):
    """Draws trees of any static shape from a Markov law: params["draft"] [V, V] are its logits behind every token.

    Attributes:
      shape: the tree.
      replacement: whether siblings are drawn independently, else one after the other (by Gumbel-top-k).
    """

    shape: Shape = static()
    replacement: bool = static(default=False)

    kind: ClassVar[Kind] = "sampled"

    @property
    def depth(self) -> int:
        return self.shape.depth

    def propose(self, params: Float[Array, "V V"], own, ctx):
        logq = jax.nn.log_softmax(params, -1)
        parents, size = self.shape.parents, params.shape[1]
        columns = [jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)[:, 0]]
        valid = [jnp.ones_like(columns[0], bool)]
        for node, parent in enumerate(parents[1:], 1):
            noisy = node if self.replacement else parent            # siblings without replacement share their noise
            law = logq[columns[parent]]
            score = law + noise_private(ctx.key, ctx.length, jnp.full_like(ctx.length, noisy), DRAFT, size)
            earlier = [] if self.replacement else [n for n in range(1, node) if parents[n] == parent]
            for sibling in earlier:
                score = jnp.where(jnp.arange(size) == columns[sibling][:, None], -jnp.inf, score)
            columns.append(argmax(score))
            valid.append(valid[parent] & (score.max(1) > -jnp.inf))
        tokens = jnp.stack(columns, 1)
        return Draft(tokens, parents, jnp.stack(valid, 1), depth=self.depth, kind="sampled",
                     logq=logq[tokens[:, :1 + max(parents)]], replacement=self.replacement), own
