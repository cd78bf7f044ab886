"""Two drafters: one copies where it has a long match, the other drafts elsewhere.

B sequences. Source: SAM-Decoding (arXiv:2411.10666), which puts a suffix automaton in front of token recycling or of
EAGLE-2.
"""

from __future__ import annotations

from typing import Any

from parallax.decoding import combine, spec
from parallax.decoding.base import Drafter, policy


@policy
class Combined(Drafter):
    """Takes the draft of `first` where it matched at least `threshold` tokens of the text, else that of `second`.

    Both see everything that is committed. Both draft in every step, and the block has the rows of the larger one.

    Attributes:
      first: a drafter that states how long its match is, such as `suffix_match(draft_length=7)`.
      second: any other that drafts deterministically. As text, one that needs no draft model; an object may be any, and
        then params["draft"] goes to both.
      threshold: shortest match for `first`.
    """

    first: Any = "suffix_match"
    second: Any = "token_recycling"
    threshold: int = 5

    def __post_init__(self):
        if isinstance(self.threshold, int) and self.threshold < 1:
            raise ValueError(f"threshold must be at least 1, got {self.threshold}")
        for name in ("first", "second"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, spec.build(getattr(self, name), spec.drafters(), "drafter"))
        if isinstance(self.first, Drafter) and not getattr(self.first, "matches", False):
            able = [name for name, drafter in spec.drafters().items() if getattr(drafter, "matches", False)]
            raise ValueError(f"first must be a drafter that states its match, one of {', '.join(able)}; got "
                             f"{type(self.first).__name__}")

    @property
    def depth(self) -> int:
        return max(self.first.depth, self.second.depth)

    def check(self, target):
        for drafter in (self.first, self.second):
            drafter.check(target)
            if drafter.kind != "deterministic":
                raise ValueError(f"combined takes drafters of deterministic drafts, got {type(drafter).__name__} with "
                                 f"{drafter.kind} ones")

    def init(self, params, ctx, prompt, prompt_length):
        return tuple(drafter.init(params, ctx, prompt, prompt_length) for drafter in (self.first, self.second))

    def propose(self, params, own, ctx):
        (first, left), (second, right) = (drafter.propose(params, part, ctx)
                                          for drafter, part in zip((self.first, self.second), own))
        return combine.choose(first.match >= self.threshold, first, second), (left, right)

    def observe(self, params, own, advance, step, ctx):
        return tuple(drafter.observe(params, part, advance, step, ctx)
                     for drafter, part in zip((self.first, self.second), own))

    def rewind(self, params, own, ctx):
        return tuple(drafter.rewind(params, part, ctx) for drafter, part in zip((self.first, self.second), own))
