"""Distillation of a draft language model from a target, best on text that the target wrote.

B rows, S tokens per row, V vocabulary. Source: DistillSpec (arXiv:2310.08461) for the choice among divergences;
the acceptance losses `nla` and `lk_hybrid` are those of the speculators project.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from parallax.decoding import make_decoder
from parallax.models import Model
from parallax.train import losses, simulate
from parallax.train.objectives.base import forward, mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill:
    """The drafter learns the target's law at every position of the text.

    Attributes:
      model: the drafter.
      target: the target; its parameters are the loop's `frozen` ones.
      loss_name: a key of `losses.LOSSES`.
      position_weight: a key of `losses.POSITION_WEIGHTS`.
      decay: its number.
      depth: draft length, for the position weights, the accepted lengths that are logged, and the decoder.
      temperature: of both laws, in the loss.
    """

    model: Model
    target: Model
    loss_name: str = "forward_kl"
    position_weight: str = "uniform"
    decay: float = 0.8
    depth: int = 4
    temperature: float = 1.0
    needs_target: ClassVar[bool] = True

    @classmethod
    def from_config(cls, model, target, config):
        options = dict(config["loss"])
        if config["sequence_length"] <= options["depth"]:
            raise ValueError(f"sequence_length={config['sequence_length']} must be longer than the drafts, "
                             f"loss.depth={options['depth']}")
        return cls(model=model, target=target, loss_name=options.pop("name"), **options)

    def __post_init__(self):
        losses.check(self.loss_name, self.position_weight)
        ours, theirs = self.model.config.vocab_size, self.target.config.vocab_size
        if ours != theirs:
            raise ValueError(f"the draft model's vocabulary has {ours} tokens and the target's {theirs}: leave the "
                             "draft's vocab_size at 0, which takes the target's")
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, got {self.depth}")
        if not (self.decay > 0 or self.decay == 0 and self.position_weight != "exponential"):
            raise ValueError(f"decay must be positive, got {self.decay}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")

    def init(self, key, frozen):
        return Model(self.model.config.replace(dtype="float32")).init(key)

    def loss(self, params, frozen, batch, key):
        tokens, weights = batch.tokens[:, 1:], batch.weights[:, 1:]
        theirs = lax.stop_gradient(forward(self.target, frozen, batch)[:, :-1])
        ours = forward(self.model, params, batch)[:, :-1]
        logp, logq = (jax.nn.log_softmax(logits / self.temperature, -1) for logits in (theirs, ours))
        alpha = losses.acceptance(logp, logq)
        value = losses.LOSSES[self.loss_name](logp, logq, tokens)
        share = weights
        if self.position_weight != "uniform":
            share = weights * losses.by_depth(self.position_weight, alpha, self.decay, self.depth, key)
        loss = mean(value, share)
        agreement = mean((ours.argmax(-1) == theirs.argmax(-1)).astype(jnp.float32), weights)
        return loss, {"loss": loss, "agreement": agreement, "acceptance": mean(alpha, weights),
                      "expected_tokens_per_forward": self._expected(alpha, weights), "tokens": weights.sum()}

    def _expected(self, alpha, weights):
        """Tokens per target forward of rejection sampling: 1 + sum_k prod_{i <= k} alpha_i, from every position.

        Rows end in the middle of a text, so only positions with a whole draft in front of them count.
        """
        size = alpha.shape[1] - self.depth + 1
        if size < 1:
            return jnp.float32(jnp.nan)
        reached, whole, total = 1.0, 1.0, 1.0
        for k in range(self.depth):
            reached = reached * alpha[:, k:k + size]
            whole = whole * (weights[:, k:k + size] > 0)
            total = total + reached
        return mean(total, whole)

    def simulate(self, params, texts):
        emitted, forwards = simulate.walk(simulate.guesses(self.model, params, texts.tokens), texts, self.depth)
        return {"tokens_per_forward": emitted.sum() / forwards.sum()}

    def decoder(self):
        return make_decoder("draft_model", self.target, draft=self.model, draft_length=self.depth)
