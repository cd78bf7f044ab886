"""Next-token training of a target: the cross-entropy of each token given those before it in its document."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import optax

from parallax.decoding import make_decoder
from parallax.models import Model
from parallax.train.objectives.base import forward, mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextToken:
    """Maximum likelihood.

    Attributes:
      model: the target.
    """

    model: Model
    needs_target: ClassVar[bool] = False

    @classmethod
    def from_config(cls, model, target, config):
        return cls(model=model)

    def init(self, key, frozen):
        return Model(self.model.config.replace(dtype="float32")).init(key)

    def loss(self, params, frozen, batch, key):
        logits, tokens, weights = forward(self.model, params, batch)[:, :-1], batch.tokens[:, 1:], batch.weights[:, 1:]
        loss = mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens), weights)
        right = mean((logits.argmax(-1) == tokens).astype(jnp.float32), weights)
        return loss, {"loss": loss, "accuracy": right, "tokens": weights.sum()}

    def simulate(self, params, texts):
        return {}

    def decoder(self):
        return make_decoder("autoregressive", self.model)
