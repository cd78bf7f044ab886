"""Retrieval on both sides: the draft model copies to write faster, and the target is shown a copied branch as well.

B sequences. Source: Double (arXiv:2601.05524), the part that needs one device: draft and target take turns
instead of running at the same time.
"""

from __future__ import annotations

from parallax.decoding.base import Drafter, Kind, policy, static
from parallax.decoding.drafters.staged import Staged, build
from parallax.decoding.merge import merge
from parallax.decoding.sampling import Greedy, Sampler
from parallax.models.transformer import Model


@policy
class Double(Drafter):
    """The chain of `Staged`, and in the same tree what `retrieval` finds behind the pending token.

    So where the draft model is wrong, the target may still accept several tokens; where both agree, their nodes are
    one. With a temperature the chain is drawn with the target's own noise.

    Attributes:
      model: the draft model; params["draft"] are its weights.
      sampler: best as the target's tokens are drawn.
      inner: the draft model's own drafter, as for `Staged`.
      retrieval: the drafter of the second branch, a method without a draft model and its options, or an object.
      draft_length: tokens that the draft model writes.
    """

    model: Model = static()
    sampler: Sampler = Greedy()
    inner: Drafter = "prompt_lookup(draft_length=3)"
    retrieval: Drafter = "prompt_lookup(draft_length=4)"
    draft_length: int = static(default=4)

    def __post_init__(self):
        object.__setattr__(self, "inner", self.staged.inner)
        object.__setattr__(self, "retrieval", build(self.retrieval))

    @property
    def staged(self) -> Staged:
        return Staged(model=self.model, sampler=self.sampler, inner=self.inner, draft_length=self.draft_length,
                      kind=self.kind)

    @property
    def kind(self) -> Kind:
        return "deterministic" if isinstance(self.sampler, Greedy) else "coupled"

    @property
    def depth(self) -> int:
        return max(self.draft_length, self.retrieval.depth)

    def check(self, target):
        self.staged.check(target)
        self.retrieval.check(target)
        if self.retrieval.kind == "sampled":
            raise ValueError("retrieval must be a drafter of deterministic drafts, got sampled ones of "
                             f"{type(self.retrieval).__name__}")

    def init(self, params, ctx, prompt, prompt_length):
        return tuple(part.init(params, ctx, prompt, prompt_length) for part in self._parts)

    def propose(self, params, own, ctx):
        drafts, own = zip(*(part.propose(params, state, ctx) for part, state in zip(self._parts, own)))
        return merge(*drafts), own

    def observe(self, params, own, advance, step, ctx):
        return tuple(part.observe(params, state, advance, step, ctx) for part, state in zip(self._parts, own))

    def rewind(self, params, own, ctx):
        return tuple(part.rewind(params, state, ctx) for part, state in zip(self._parts, own))

    @property
    def _parts(self) -> tuple[Drafter, Drafter]:
        return self.staged, self.retrieval
