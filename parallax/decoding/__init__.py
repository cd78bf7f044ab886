"""Parallel decoding: one loop, and methods that are small parts around it.

`METHODS` is the one place that names them, for the command line, the configs and the shared tests.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from parallax.decoding.base import Decoder, DecodeState, Draft, Result, StepInfo
from parallax.decoding.drafters import Nothing, PromptLookup, TokenRecycling
from parallax.decoding.loop import decode, stream
from parallax.decoding.sampling import Greedy, Sample, Sampler, make_sampler
from parallax.decoding.speculative import Speculative
from parallax.decoding.tree import Shape
from parallax.decoding.verify import Follow
from parallax.models.config import nearest

__all__ = ["DecodeState", "Decoder", "Draft", "Follow", "Greedy", "METHODS", "Method", "Nothing", "PromptLookup",
           "Result", "Sample", "Shape", "Speculative", "StepInfo", "TokenRecycling", "decode",
           "make_decoder", "make_sampler", "options_of", "stream"]


@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method by name: its drafter (whose fields are the method's options), what it is, where it is from."""

    drafter: type
    summary: str
    source: str


METHODS: dict[str, Method] = {
    "autoregressive": Method(Nothing, "one token per forward, the reference", "-"),
    "prompt_lookup": Method(PromptLookup, "copies what followed the last tokens earlier in the text",
                            "Saxena 2023; arXiv:2304.04487"),
    "token_recycling": Method(TokenRecycling, "a tree of the target's own earlier top tokens", "arXiv:2408.08696"),
}


def method(name: str) -> Method:
    """The method called `name`. Raises ValueError with the known names."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: expected one of {', '.join(METHODS)}{nearest(name, METHODS)}")
    return METHODS[name]


def options_of(name: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    return {field.name: field.default for field in dataclasses.fields(method(name).drafter)}


def make_decoder(name: str, model, *, sampler: Sampler = Greedy(), eos: tuple[int, ...] = (), **options) -> Speculative:
    """A decoder by the name of its method.

    Args:
      name: a key of `METHODS`.
      model: the target.
      sampler: how the target's tokens are drawn.
      eos: tokens that end a sequence.
      **options: fields of the method's drafter.

    Raises:
      ValueError: unknown method or option, a value out of range, or a model that the method cannot drive.
    """
    known = options_of(name)
    for option in options:
        if option not in known:
            raise ValueError(f"method {name!r} has no option {option!r}: expected one of "
                             f"{', '.join(known) or '(none)'}{nearest(option, known)}")
    decoder = Speculative(model=model, drafter=method(name).drafter(**options), verifier=Follow(sampler=sampler),
                          eos=tuple(eos))
    decoder.check()
    return decoder
