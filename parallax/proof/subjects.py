"""What there is to prove: a method with its options and its verifier, and how its decoders are made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from parallax.decoding import METHODS, VERIFIERS, Sampler, check_settings, loop, make_decoder, make_sampler
from parallax.decoding import method as method_of
from parallax.decoding.base import Decoder
from parallax.decoding.control import CONTROLLERS
from parallax.decoding.growth import TREES
from parallax.decoding.warpers import Penalties
from parallax.models import Model
from parallax.testing import Case, tiny_model

_BASIC = ("follow", "rejection")
TEMPERATURE = 0.8               # of the sampled checks, where no other is asked for


@dataclasses.dataclass(frozen=True)
class Subject:
    """A method as a user would set it.

    Attributes:
      method, options, verifier: as for `make_decoder`.
      sampling: settings of `make_sampler` for the sampled checks, with a temperature above 0.
    """

    method: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    verifier: str = "follow"
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"temperature": TEMPERATURE})

    @property
    def label(self) -> str:
        """The method with its options."""
        return " ".join([self.method, *(f"{key}={value}" for key, value in self.options.items())])

    def decoder(self, target: Target, sampler: Sampler) -> Decoder:
        """Raises ValueError if the parts do not fit together."""
        # A token that never comes as end of text: so decoders that do end share one program with it.
        return make_decoder(self.method, target.model, sampler=sampler, eos=(-1,), verifier=self.verifier,
                            draft=target.draft if method_of(self.method).needs_draft else None, **self.options)

    def greedy(self, target: Target) -> Decoder:
        """At temperature 0, where only bias and penalties change the law."""
        kept = [field.name for field in dataclasses.fields(Penalties)]
        return self.decoder(target, make_sampler(**{key: self.sampling[key] for key in kept if key in self.sampling}))

    def sampled(self, target: Target) -> Decoder:
        return self.decoder(target, make_sampler(**self.sampling))


@dataclasses.dataclass(frozen=True)
class Target:
    """A random tiny model with a draft model that often, not always, agrees with it."""

    model: Model
    draft: Model
    params: Mapping[str, Any]

    def case(self, subject: Subject, **changes) -> Case:
        """Three prompts of 12, 1 and 5 tokens, with the draft's parameters where the method uses them."""
        draw = np.random.default_rng(0).integers(0, self.model.config.vocab_size, 18).tolist()
        params = dict(self.params)
        if not method_of(subject.method).needs_draft:
            del params["draft"]
        return Case(self.model, params, (tuple(draw[:12]), tuple(draw[12:13]), tuple(draw[13:])), **changes)


@functools.cache
def target(seed: int = 0, dtype: str = "float32") -> Target:
    """A target of 16 tokens: so few that a guess is often right.

    Odd seeds have small weights, whose text soon repeats itself, and large logits, so that what is drawn does so as
    well: there drafts from the text are right.
    """
    model, params = tiny_model(seed, vocab_size=16)
    if seed % 2:
        params = jax.tree.map(lambda w: w / 3 if w.ndim > 1 else w, params)
        params = {**params, "final_norm": jax.tree.map(lambda w: 8 * w, params["final_norm"])}
    leaves, structure = jax.tree.flatten(params)
    random = np.random.default_rng(seed)
    noisy = [w + jnp.asarray(0.15 * np.std(w) * random.standard_normal(w.shape), w.dtype) for w in leaves]
    both = {"target": params, "draft": jax.tree.unflatten(structure, noisy)}
    if dtype != "float32":
        model = Model(dataclasses.replace(model.config, dtype=dtype))
        both = jax.tree.map(lambda w: w.astype(dtype), both)
    return Target(model, model, both)


def refusal(subject: Subject) -> str | None:
    """Why method and verifier cannot be used together, if so; some rules only see it in a whole draft."""
    try:
        check_settings(subject.method, subject.options, verifier=subject.verifier,
                       draft=method_of(subject.method).needs_draft)
        trace(subject.sampled(target()), target().case(subject))
    except ValueError as error:
        return " ".join(str(error).split())
    except Exception:                       # broken, which the checks are to say
        pass
    return None


def trace(decoder: Decoder, case: Case) -> None:
    """Goes through the whole program without compiling it. Raises what its parts raise."""
    jax.eval_shape(functools.partial(loop.run.__wrapped__, capacity=case.capacity), case.inputs(decoder))


def everything(sampling: Mapping[str, Any], quick: bool = False) -> list[Subject]:
    """All methods with all verifiers that promise something; all trees and controllers with a draft model, followed and
    by token-level rejection. Not all of these fit together: see `refusal`.

    What a lossy rule costs depends on the drafts; it is measured on those of a draft model alone. `quick` takes the
    other methods with sample-and-follow and token-level rejection only.
    """
    found = [Subject(method, {}, verifier, sampling) for method in METHODS for verifier, rule in VERIFIERS.items()
             # Plain decoding drafts nothing, so there is nothing to verify.
             if (method != "autoregressive" or verifier == "follow")
             and (method == "draft_model" or verifier in _BASIC or rule.guarantee != "lossy" and not quick)]
    found += [Subject("draft_model", {option: name}, verifier, sampling)
              for option, registry in (("tree", TREES), ("controller", CONTROLLERS)) for name in registry
              for verifier in _BASIC]
    return found
