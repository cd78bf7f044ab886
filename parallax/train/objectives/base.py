"""What the training loop asks of an objective. B rows, S tokens per row, V vocabulary.

An objective is a frozen dataclass around the model that it trains. The loop knows nothing else of it, so a new training
recipe is one file here and one line in `OBJECTIVES`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from parallax.decoding import Decoder
from parallax.models import Block, Model
from parallax.train.data import Batch, visible
from parallax.train.simulate import Texts

Params = Any
Metrics = dict[str, jax.Array]


class Objective(Protocol):
    """One way of training one model.

    Attributes:
      model: what is trained; its config's dtype is that of the computation, parameters are kept in float32.
      needs_target: whether it trains a drafter, for a target whose parameters are `frozen`.
    """

    model: Model
    needs_target: ClassVar[bool]

    @classmethod
    def from_config(cls, model: Model, target: Model | None, config: dict[str, Any]) -> Objective:
        """From the models and the training config's values. Raises ValueError if they do not fit each other."""

    def init(self, key: jax.Array, frozen: Params) -> Params:
        """Fresh parameters, float32. `frozen` are the target's, or None."""

    def loss(self, params: Params, frozen: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
        """(scalar, named scalars); each is a mean over the positions that count, and `tokens` says how many do."""

    def simulate(self, params: Params, texts: Texts) -> Metrics:
        """What decoding with these parameters will measure on texts that the target wrote greedily; {} if nothing."""

    def decoder(self) -> Decoder:
        """The decoder that the trained model serves: plain decoding for a target, its own for a drafter."""


def forward(model: Model, params: Params, batch: Batch) -> Float[Array, "B S V"]:
    """Logits of whole rows: every token sees what is before it in its own document."""
    block = Block(batch.tokens, batch.positions, visible(batch.segments))
    hidden = model.forward(params, block, model.new_cache(batch.tokens.shape[0], 0)).hidden
    return model.unembed(params, hidden)


def mean(values: Float[Array, "B S"], weights: Float[Array, "B S"]) -> jax.Array:
    """The weighted mean; 0 if nothing counts."""
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1e-9)
