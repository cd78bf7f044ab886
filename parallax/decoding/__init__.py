"""Parallel decoding: one loop, and methods that are small parts around it.

`METHODS` and `VERIFIERS` are the one place that names them, for the command line, the configs and the shared tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from parallax.decoding import spec
from parallax.decoding.base import Decoder, DecodeState, Draft, Drafter, Result, StepInfo, Verifier
from parallax.decoding.drafters import (
    AdaptiveNgram,
    Combined,
    Double,
    DraftModel,
    EarlyExit,
    Graft,
    InputGuided,
    MaskFill,
    NgramPool,
    Nothing,
    PromptLookup,
    Staged,
    SuffixMatch,
    TokenRecycling,
    Trigram,
)
from parallax.decoding.loop import decode, stream
from parallax.decoding.sampling import Greedy, Sample, Sampler, make_sampler
from parallax.decoding.speculative import Speculative
from parallax.decoding.tree import Shape
from parallax.decoding.verify import VERIFIERS, Follow, Rejection
from parallax.models.config import nearest
from parallax.models.transformer import Model

__all__ = ["AdaptiveNgram", "Combined", "DecodeState", "Decoder", "Double", "Draft", "DraftModel", "Drafter",
           "EarlyExit", "Follow", "Graft", "Greedy", "InputGuided", "METHODS", "MaskFill", "Method", "NgramPool",
           "Nothing", "PromptLookup", "Rejection", "Result", "Sample", "Shape", "Speculative", "Staged", "StepInfo",
           "SuffixMatch", "TokenRecycling", "Trigram", "VERIFIERS", "Verifier", "check_settings", "decode",
           "make_decoder", "make_sampler", "method", "options_of", "stream"]

@dataclasses.dataclass(frozen=True)
class Method:
    """A decoding method by name: its drafter (whose fields are the method's options), what it is, where it is from."""

    drafter: type
    summary: str
    source: str

    @property
    def parts(self) -> tuple[str, ...]:
        """What the drafter wants besides its options: `model`, a draft model; `sampler` and `kind`, to draw drafts."""
        return tuple(field.name for field in dataclasses.fields(self.drafter) if field.name in spec.PARTS)

    @property
    def needs_draft(self) -> bool:
        """Whether it takes a draft model."""
        return "model" in self.parts


METHODS: dict[str, Method] = {
    "autoregressive": Method(Nothing, "one token per forward, the reference", "-"),
    "prompt_lookup": Method(PromptLookup, "copies what followed the last tokens earlier in the text",
                            "Saxena 2023; arXiv:2304.04487"),
    "token_recycling": Method(TokenRecycling, "a tree of the target's own earlier top tokens", "arXiv:2408.08696"),
    "draft_model": Method(DraftModel, "a smaller language model writes ahead", "arXiv:2211.17192; arXiv:2302.01318"),
    "early_exit": Method(EarlyExit, "the target's own first layers write ahead", "arXiv:2404.16710"),
    "adaptive_ngram": Method(AdaptiveNgram, "the most frequent continuation of the longest context seen before",
                             "arXiv:2404.08698"),
    "input_guided": Method(InputGuided, "copies the prompt on from where the output is in it", "arXiv:2106.04970"),
    "suffix_match": Method(SuffixMatch, "copies from behind the longest match of any length, in the text or a corpus",
                           "arXiv:2411.10666"),
    "trigram": Method(Trigram, "the likeliest tree of what followed the last two tokens before", "arXiv:2407.12021"),
    "ngram_pool": Method(NgramPool, "the last few continuations of the current token, side by side",
                         "arXiv:2402.02057"),
    "staged": Method(Staged, "a smaller language model, itself sped up by a drafter, writes ahead",
                     "arXiv:2308.04623; arXiv:2505.22179"),
    "double": Method(Double, "a draft model that copies to write faster, and a copied branch beside its chain",
                     "arXiv:2601.05524"),
    "graft": Method(Graft, "a draft model's tree, its last nodes replaced by what the text has to say",
                    "Graft (prune, then graft)"),
    "mask_fill": Method(MaskFill, "a model that fills all masks behind the text at once", "arXiv:2408.05636"),
    "combined": Method(Combined, "copies where the match is long, else drafts as another method does",
                       "arXiv:2411.10666"),
}

def method(name: str) -> Method:
    """The method called `name`. Raises ValueError with the known names."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: expected one of {', '.join(METHODS)}{nearest(name, METHODS)}")
    return METHODS[name]


def options_of(name: str) -> dict[str, Any]:
    """The options of a method and their defaults."""
    return spec.fields(method(name).drafter)


def check_settings(name: str, options: Mapping[str, Any], *, verifier: str = "follow", draft: bool = False) -> None:
    """Raises ValueError if names, options and parts do not go together. Needs no model, so it can come first.

    Args:
      name, options, verifier: as for `make_decoder`.
      draft: whether there is a draft model.
    """
    chosen = method(name)
    spec.check(options, options_of(name), f"method {name!r}")
    chosen.drafter(**options, **({"model": None} if chosen.needs_draft else {}))            # checks their values
    rule, _ = spec.parse(verifier, VERIFIERS, "verifier")
    spec.build(verifier, VERIFIERS, "verifier", sampler=Greedy())                           # checks its options' values
    draws = "kind" in chosen.parts
    if not draws and "deterministic" not in rule.kinds:
        able = [other for other, entry in METHODS.items() if "kind" in entry.parts]
        raise ValueError(f"verifier {verifier!r} needs drafts with a known law, and those of {name!r} have none: "
                         f"expected method {' or '.join(able)}, or verifier follow")
    if chosen.needs_draft and not draft:
        raise ValueError(f"method {name!r} needs a draft model: give one with the target's tokenizer as draft "
                         "(--draft on the command line)")
    if draft and not chosen.needs_draft:
        able = [other for other, entry in METHODS.items() if entry.needs_draft]
        raise ValueError(f"method {name!r} uses no draft model, but one was given: expected method "
                         f"{' or '.join(able)}, or no draft")


def make_decoder(name: str, model: Model, *, sampler: Sampler = Greedy(), eos: tuple[int, ...] = (),
                 verifier: str = "follow", draft: Model | None = None, **options) -> Speculative:
    """A decoder by the name of its method.

    Args:
      name: a key of `METHODS`.
      model: the target.
      sampler: how the target's tokens are drawn, and the drafter's where it draws any.
      eos: tokens that end a sequence.
      verifier: a key of `VERIFIERS`, perhaps with options: `typical(epsilon=0.1)`. With `Greedy`, the rules that judge
        drawn drafts *are* sample-and-follow, which is then taken.
      draft: the draft model of a method that needs one; its parameters are params["draft"].
      **options: fields of the method's drafter.

    Raises:
      ValueError: unknown method, option or verifier, a value out of range, parts that do not fit each other, or a model
        that the method cannot drive.
    """
    check_settings(name, options, verifier=verifier, draft=draft is not None)
    rule, _ = spec.parse(verifier, VERIFIERS, "verifier")
    if isinstance(sampler, Greedy):
        verifier, kind = verifier if "deterministic" in rule.kinds else "follow", "deterministic"
    else:
        kind = next(kind for kind in ("coupled", "sampled", "deterministic") if kind in rule.kinds)
    parts = {"model": draft, "sampler": sampler, "kind": kind}
    drafter = method(name).drafter(**{part: parts[part] for part in method(name).parts}, **options)
    decoder = Speculative(model=model, drafter=drafter, verifier=spec.build(verifier, VERIFIERS, "verifier",
                                                                            sampler=sampler), eos=tuple(eos))
    decoder.check()
    return decoder
