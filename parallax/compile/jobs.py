"""What is compiled: a model's decode step at one block size, on one target."""

from __future__ import annotations

import dataclasses

from parallax.compile.targets import Target
from parallax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A step of `batch` sequences that each have `context` committed tokens.

    Attributes:
      config: of the model, `kernels` and `dtype` as they shall be compiled.
      rows: T, of a block, the pending token included.
      depth: of the draft, at most: rows behind it are further chains from the root.
      context: length of the live cache, C.
      capacity: slots of the cache per sequence, S.
    """

    config: ModelConfig
    target: Target
    rows: int
    batch: int
    context: int
    capacity: int
    depth: int

    def __post_init__(self):
        for name in ("rows", "batch", "context", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.capacity < self.context + self.levels + 1:
            raise ValueError(f"capacity={self.capacity} is too small for a context of {self.context} and a step of up "
                             f"to {self.levels + 1} tokens")
        parts, config = self.target.tensor, self.config
        for what, size in (("key/value heads", config.num_kv_heads), ("columns of the MLP", config.intermediate_size),
                           ("tokens of the vocabulary", config.vocab_size)):
            if size % parts:
                raise ValueError(f"--tensor {parts} does not divide the model's {size} {what}")

    @property
    def levels(self) -> int:
        """Depth of the draft, D."""
        return min(self.depth, self.rows - 1)

    @property
    def kv_heads(self) -> int:
        """Key/value heads on one device."""
        return self.config.num_kv_heads // self.target.tensor

    @property
    def parents(self) -> tuple[int, ...]:
        """The draft: chains of D tokens side by side."""
        return (0, *(0 if i % self.levels == 0 else i for i in range(self.rows - 1)))
