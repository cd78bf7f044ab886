"""Near-ties in bfloat16: where the tokens part from plain decoding, the logits of both must be next to the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from parallax.decoding import Greedy, Nothing, Sampler, loop
from parallax.decoding.sampling import Seen
from parallax.models import Block, Model
from parallax.proof.record import TARGET, TIE, Record
from parallax.proof.subjects import Subject, target
from parallax.proof.tokens import parting, sampler_of, subject_case
from parallax.testing.invariants import texts


def tiny_ties(subject: Subject, *, seeds: Sequence[int]) -> Record:
    """Greedy texts of the tiny target in bfloat16 against plain decoding by the same loop."""
    found, count, guarantee = [], 0, ""
    for seed in seeds:
        model = target(seed, "bfloat16")
        case = subject_case(subject, seed, "bfloat16")
        decoder = subject.greedy(model)
        guarantee, sampler = decoder.guarantee, sampler_of(decoder)
        plain = dataclasses.replace(decoder, drafter=Nothing())
        ours, theirs = (texts(loop.run(case.inputs(d), case.capacity)) for d in (decoder, plain))
        count += len(ours)
        found += divergences(zip(ours, theirs), lambda prefix, m=model, s=sampler: logits_behind(
            m.model, m.params["target"], prefix, s))
    return record(TARGET, subject.label, subject.verifier, guarantee, found, count)


def divergences(pairs, logits: Callable[[Sequence[int]], np.ndarray]) -> list[dict[str, float]]:
    """The first of every pair of texts: where it is, and how far below the best logit the lower of its two tokens lies.
    """
    found = []
    for text, (ours, theirs) in enumerate(pairs):
        at = parting(ours, theirs)
        if at is not None and at < min(len(ours), len(theirs)):
            here = logits(theirs[:at])
            gap = here.max() - min(here[ours[at]], here[theirs[at]])
            found.append({"text": text, "token": at, "gap": float(gap), "of": float(np.abs(here).max())})
        elif at is not None:                                     # one of the two stopped early, without any tie
            found.append({"text": text, "token": at, "gap": float("inf"), "of": 1.0})
    return found


def record(on: str, method: str, verifier: str, guarantee: str, found: list[dict[str, float]],
           count: int) -> Record:
    """Passes if every divergence sits at a gap below `TIE` of the largest logit there, or none was promised."""
    wide = [d for d in found if not d["gap"] <= TIE * d["of"]]
    passed = not wide or guarantee != "exact"
    note = "" if passed else (f"text {wide[0]['text']} parts at token {wide[0]['token']} where one of both logits is "
                              f"{wide[0]['gap']:.2g} below the best, more than {TIE * wide[0]['of']:.2g}")
    worst = max((d["gap"] for d in found), default=0.0)
    return Record(on, method, verifier, guarantee, "bfloat16", passed,
                  {"equal": count - len(found), "of": count, "widest_gap": worst, "divergences": found}, note)


def logits_behind(model: Model, params, tokens: Sequence[int], sampler: Sampler = Greedy()) -> np.ndarray:
    """The model's logits behind a text, after bias and penalties, by one forward without a cache. Texts share programs
    by length."""
    padded = np.zeros((1, max(16, 1 << (len(tokens) - 1).bit_length())), np.int32)
    padded[0, :len(tokens)] = tokens
    return np.asarray(_logits(model, params, sampler, padded, len(tokens) - 1), np.float32)


def _forward(model, params, sampler, tokens, last):
    size = tokens.shape[1]
    block = Block(tokens, jnp.arange(size)[None], jnp.tril(jnp.ones((size, size), bool)))
    hidden = model.forward(params, block, model.new_cache(1, 0)).hidden
    logits = model.unembed(params, jax.lax.dynamic_index_in_dim(hidden, last, 1))
    return sampler.penalise(logits, Seen.text(tokens, last[None] + 1))[0, 0]


_logits = jax.jit(_forward, static_argnums=0)
