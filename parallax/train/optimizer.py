"""The optimizer as data: AdamW with a schedule, clipping and accumulation, all of it optax."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import optax

from parallax.models.config import nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101).

    Attributes:
      learning_rate: the largest.
      schedule: `constant`, `cosine`, `linear`, or `wsd` (constant, then linear over the last fifth), all behind a
        linear warm-up.
      warmup: steps until the largest rate.
      final: the last rate as a fraction of the largest; `constant` has no use for it.
      b1, b2, eps: of Adam.
      weight_decay: of matrices and embeddings; scales and biases do not decay.
      clip_norm: longest gradient, by global norm; 0 clips nothing.
      ema: decay of a running mean of the parameters, at most (1 + t) / (10 + t) at step t, which is then what is
        evaluated and exported; 0 keeps none.
    """

    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = 100
    final: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    ema: float = 0.0

    def __post_init__(self):
        known = ("constant", "cosine", "linear", "wsd")
        if self.schedule not in known:
            raise ValueError(f"unknown schedule {self.schedule!r}: expected one of {', '.join(known)}"
                             f"{nearest(self.schedule, known)}")
        for name, low, high in (("learning_rate", 0, float("inf")), ("final", 0, 1), ("warmup", 0, float("inf")),
                                ("weight_decay", 0, float("inf")), ("clip_norm", 0, float("inf")), ("ema", 0, 1),
                                ("b1", 0, 1), ("b2", 0, 1), ("eps", 0, float("inf"))):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"optimizer.{name} must be from {low} to {high}, got {getattr(self, name)}")
        if 0 in (self.learning_rate, self.eps) or 1 in (self.ema, self.b1, self.b2):
            raise ValueError("optimizer.learning_rate and eps must be above 0, and optimizer.ema, b1 and b2 below 1")

    def rate(self, steps: int) -> optax.Schedule:
        """The learning rate at every step of a run of `steps`."""
        top, last = self.learning_rate, self.learning_rate * self.final
        warmup = min(self.warmup, steps)
        rest = max(steps - warmup, 1)
        after = {
            "constant": lambda: optax.constant_schedule(top),
            "cosine": lambda: optax.cosine_decay_schedule(top, rest, self.final),
            "linear": lambda: optax.linear_schedule(top, last, rest),
            "wsd": lambda: optax.linear_schedule(top, last, max(rest // 5, 1), rest - rest // 5),
        }[self.schedule]()
        return optax.join_schedules([optax.linear_schedule(top / max(warmup, 1), top, warmup), after], [warmup])

    def build(self, steps: int, accumulate: int) -> optax.GradientTransformationExtraArgs | optax.MultiSteps:
        """The transformation. With `accumulate` > 1 each update takes that many calls and their mean gradient."""
        chain = optax.adamw(self.rate(steps), b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay,
                            mask=decays)
        if self.clip_norm:
            chain = optax.chain(optax.clip_by_global_norm(self.clip_norm), chain)
        return optax.MultiSteps(chain, accumulate) if accumulate > 1 else chain


def decays(params):
    """True for the leaves that weight decay is for. By name: a stack of norm scales is a matrix too."""
    def matrix(path, leaf):
        name = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)][-1]
        return name not in ("scale", "bias", "b")

    return jax.tree_util.tree_map_with_path(matrix, params)
