"""What is measured: token ids in, new ids, counters and seconds out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from parallax.benchmark.settings import Contender, Settings
from parallax.generate import LanguageModel
from parallax.models import Block


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One run over prompts that were decoded together.

    Attributes:
      ids: the new tokens of each, end of text included.
      prefill, decode, compile: seconds. A run with any compile time also set up its buffers: it counts for nothing
        else and is repeated.
      guarantee: the class that the run's tokens come with; None where nobody gives one.
      forwards: target forwards of each prompt; None where they are not counted, as are the next five.
      rows, accepted, proposed, draft_forwards: summed over the prompts.
      accepted_at, proposed_at: steps that accepted a draft token, and that had one to offer, at depth 1, 2, ...
    """

    ids: list[list[int]]
    prefill: float
    decode: float
    compile: float = 0.0
    guarantee: str | None = None
    forwards: list[int] | None = None
    rows: int | None = None
    accepted: int | None = None
    proposed: int | None = None
    draft_forwards: int | None = None
    accepted_at: list[int] = dataclasses.field(default_factory=list)
    proposed_at: list[int] = dataclasses.field(default_factory=list)


class Engine(Protocol):
    """Anything that continues token ids. `label` names it in the tables."""

    label: str

    def run(self, prompts: Sequence[Sequence[int]], row_ids: Sequence[int], seed: int) -> Measurement:
        """Decodes the prompts together. `seed` and a prompt's row id decide its noise."""


class Parallax:
    """One method of ours."""

    def __init__(self, lm: LanguageModel, contender: Contender, decoding: dict[str, Any]):
        self.label, self._lm = contender.label, lm
        self._settings = {"method": contender.name, "options": contender.options, "verifier": contender.verifier,
                          **decoding}

    def run(self, prompts, row_ids, seed):
        run = self._lm.generate(prompts, row_ids=row_ids, seed=seed, batch_size=len(prompts), **self._settings)
        parts = run.completions
        return Measurement(
            ids=[list(part.ids) for part in parts], prefill=run.prefill, decode=run.decode, compile=run.compile,
            guarantee=run.guarantee, forwards=[part.target_forwards for part in parts],
            rows=sum(part.target_rows for part in parts),
            accepted=sum(part.accepted for part in parts), proposed=sum(part.proposed for part in parts),
            draft_forwards=sum(part.draft_forwards for part in parts),
            accepted_at=_add(part.accepted_at for part in parts), proposed_at=_add(part.proposed_at for part in parts))


def engines(lm: LanguageModel, settings: Settings) -> list[Engine]:
    """Ours, plain decoding first."""
    return [Parallax(lm, contender, settings.decoding) for contender in settings.contenders]


def logit_gap(lm: LanguageModel, prompt: Sequence[int], shared: Sequence[int], ours: int, theirs: int) -> float:
    """How far apart the logits of two tokens are behind prompt + shared: two engines that part there met a near-tie
    if it is about the rounding of their numbers."""
    tokens = np.asarray([[*prompt, *shared]], np.int32)
    size = tokens.shape[1]
    block = Block(tokens, np.arange(size)[None], np.tril(np.ones((size, size), bool)))
    hidden = lm.model.forward(lm.params["target"], block, lm.model.new_cache(1, 0)).hidden[0, -1]
    logits = np.asarray(lm.model.unembed(lm.params["target"], hidden), np.float32)
    return abs(float(logits[ours] - logits[theirs]))


def _add(levels) -> list[int]:
    return [sum(at) for at in zip(*levels)]
