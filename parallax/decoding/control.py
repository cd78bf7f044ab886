"""Controllers: how deep the draft of each sequence goes. B sequences, D depth of the tree, W rows of a level.

A controller decides before a draft (`longest`) and after each of its levels (`goes_on`), for every sequence by itself,
so results do not depend on the batch. It may read what was drafted and it may stop, but the level at which it stops
stays in the draft: a rule that threw the token away that it does not like would change the law of the text. In a
sampled tree every path ends by its own tokens: rules that choose among paths want them independent. The levels that
were not grown are invalid nodes; growth ends with the last path that goes on.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from parallax.decoding.base import Kind, policy, static


class Level(NamedTuple):
    """What was just drawn and would go on: logp [B, W] of each token at its place, total [B, W] of its whole path,
    -inf where there is none."""

    logp: Float[Array, "B W"]
    total: Float[Array, "B W"]


@policy
class Controller:
    """A subclass changes what it needs; as it is, every draft has all levels.

    scored: reads probabilities. certain: never stops. kinds: of drafts whose guarantee it leaves as it is.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic", "coupled", "sampled")
    scored: ClassVar[bool] = False
    certain: ClassVar[bool] = False

    def init(self, batch: int, depth: int) -> Any:
        """Its state."""
        return ()

    def longest(self, own: Any, batch: int, depth: int) -> Int[Array, "B"]:
        """Levels of the next draft at most, 1 to `depth`."""
        return jnp.full((batch,), depth, jnp.int32)

    def goes_on(self, level: Level) -> Bool[Array, "B W"] | None:
        """Which tokens of this level are written on; None for all."""
        return None

    def update(self, own: Any, drafted: Int[Array, "B"], accepted: Int[Array, "B"], depth: int) -> Any:
        """Its state behind a step that accepted so many of the levels that were drafted."""
        return own


@policy
class Constant(Controller):
    """All levels, always."""

    certain: ClassVar[bool] = True


@policy
class Heuristic(Controller):
    """Two tokens more after a draft that was accepted as a whole, else one less: Hugging Face's `heuristic` schedule.

    Attributes:
      start: levels of the first draft.
    """

    start: int = static(default=5)

    def __post_init__(self):
        if self.start < 1:
            raise ValueError(f"start must be at least 1, got {self.start}")

    def init(self, batch, depth):
        return jnp.full((batch,), min(self.start, depth), jnp.int32)

    def longest(self, own, batch, depth):
        return own

    def update(self, own, drafted, accepted, depth):
        return jnp.clip(jnp.where(accepted == drafted, own + 2, own - 1), 1, depth)


@policy
class Confidence(Controller):
    """Ends behind the first token that the draft itself finds unlikely: `assistant_confidence_threshold` elsewhere.

    The unlikely token stays in the draft. In a tree every path ends on its own.

    Attributes:
      threshold: least probability, under the draft's law, of a token that is written on.
    """

    threshold: float = 0.4

    scored: ClassVar[bool] = True

    def __post_init__(self):
        _probability(self.threshold, "threshold")

    def goes_on(self, level):
        return level.logp >= jnp.log(self.threshold)


@policy
class DynamicDepth(Controller):
    """Ends where the paths of a level are together unlikely: dynamic depth of a beam. Not for sampled drafts, where a
    path must not end because of the tokens of another one.

    Source: DDD (Brown et al., arXiv:2409.00142), which compares at a few depths only; here every level is free to.

    Attributes:
      threshold: least sum of the probabilities of the paths that go on.
    """

    threshold: float = 0.3

    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic", "coupled")
    scored: ClassVar[bool] = True

    def __post_init__(self):
        _probability(self.threshold, "threshold")

    def goes_on(self, level):
        return jax.nn.logsumexp(level.total, -1, keepdims=True) >= jnp.log(self.threshold)


@policy
class CostModel(Controller):
    """The length with the most expected tokens per time, from measured times and a running acceptance of its own.

    Attributes:
      target_ms: time of a target forward of 1, 2, 4, 8, ... rows, in any unit. One number is a block that costs the
        same for every draft: so it is where the tree is padded to one size. Empty: 1, and `row_cost` for each further
        row.
      draft_ms: time of one level of the draft, in the same unit.
      row_cost: see `target_ms`.
      prior: acceptance of a token before anything was seen.
      decay: weight of what was seen before, each time that a token of the same depth is judged.
    """

    target_ms: tuple[float, ...] = ()
    draft_ms: float = 0.15
    row_cost: float = 0.05
    prior: float = 0.7
    decay: float = 0.9

    def __post_init__(self):
        for name in ("prior", "decay"):
            _probability(getattr(self, name), name)
        for ms in (*self.target_ms, self.draft_ms, self.row_cost):
            if isinstance(ms, str | tuple) or isinstance(ms, float | int) and not ms >= 0:
                raise ValueError(f"times must be numbers and not negative, got {ms!r}")

    def init(self, batch, depth):
        return jnp.full((batch, depth), self.prior, jnp.float32)

    def longest(self, own, batch, depth):
        target = self.target_ms or tuple(1 + self.row_cost * (2 ** i - 1) for i in range(depth.bit_length() + 1))
        return best_length(own, target, self.draft_ms, depth)

    def update(self, own, drafted, accepted, depth):
        level = jnp.arange(1, depth + 1)
        hit = level <= accepted[:, None]
        judged = level <= jnp.minimum(accepted + 1, drafted)[:, None]
        return jnp.where(judged, self.decay * own + (1 - self.decay) * hit, own)


def best_length(acceptance: Float[Array, "*lead D"], target_ms: tuple, draft_ms, longest: int) -> Int[Array, "*lead"]:
    """Draft length, 1 to `longest`, with the most expected tokens per time.

    Args:
      acceptance: of a token at depth 1, 2, ..., if the one in front of it was accepted.
      target_ms: a target forward of 1, 2, 4, 8, ... rows; between them linear, behind them as the last.
      draft_ms: one token of the draft.
      longest: at most D.
    """
    return 1 + jnp.argmax(tokens_per_ms(acceptance, target_ms, draft_ms, longest), -1).astype(jnp.int32)


def tokens_per_ms(acceptance: Float[Array, "*lead D"], target_ms: tuple, draft_ms,
                  longest: int) -> Float[Array, "*lead L"]:
    """Expected tokens per time of drafts of 1, 2, ..., `longest` tokens. Arguments as of `best_length`."""
    length = np.arange(1, longest + 1)
    tokens = 1 + jnp.cumsum(jnp.cumprod(acceptance[..., :longest], -1), -1)
    times = jnp.interp(length + 1.0, 2.0 ** np.arange(len(target_ms)), jnp.stack([jnp.asarray(t) for t in target_ms]))
    return tokens / (times + length * draft_ms)


def _probability(value, name: str) -> None:
    if isinstance(value, float | int) and not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {value}")


CONTROLLERS: dict[str, type[Controller]] = {
    "constant": Constant,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "dynamic_depth": DynamicDepth,
    "cost_model": CostModel,
}
