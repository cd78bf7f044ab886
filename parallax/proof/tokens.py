"""Token equality with plain decoding: greedy, and sampled with the noise of the same seed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from parallax.decoding import loop
from parallax.decoding.base import Decoder
from parallax.decoding.sampling import Greedy, Sampler
from parallax.proof.record import TARGET, Record
from parallax.proof.subjects import Subject, target
from parallax.testing import Case, reference_decode
from parallax.testing.invariants import texts


def equal_tokens(subject: Subject, check: str, *, seeds: Sequence[int], alone: bool = True) -> Record:
    """`greedy` or `seeded`: the tokens of the cache-free reference, on tiny targets, in a batch and perhaps `alone`.

    Only the class `exact` promises them; of the others the share of equal tokens is told.
    """
    pairs, accepted, steps, decoder = [], 0, 0, None
    for seed in seeds:
        model = target(seed)
        decoder = subject.greedy(model) if check == "greedy" else subject.sampled(model)
        case = subject_case(subject, seed)
        expected = reference(seed, case.prompts, case.new_tokens, case.seed, sampler_of(decoder))
        for rows in (range(len(case.prompts)), *([[0]] if alone else [])):
            result = loop.run(case.inputs(decoder, rows), case.capacity)
            pairs += [(ours[len(case.prompts[row]):], expected[row][len(case.prompts[row]):])
                      for ours, row in zip(texts(result), rows)]
            accepted += int(np.asarray(result.info.accepted).sum())
            steps += int(np.asarray(result.info.target_forwards).sum())
    same = [ours == theirs for ours, theirs in pairs]
    numbers = {"equal": sum(same), "of": len(same), "equal_tokens": share(pairs), "accepted_per_step": accepted / steps}
    wrong = next((i for i, equal in enumerate(same) if not equal), None)
    note = "" if wrong is None else (f"text {wrong} differs from plain decoding at token {parting(*pairs[wrong])}")
    promised = decoder.guarantee == "exact"
    return Record(TARGET, subject.label, subject.verifier, decoder.guarantee, check, all(same) or not promised, numbers,
                  note if promised else "")


def subject_case(subject: Subject, seed: int = 0, dtype: str = "float32") -> Case:
    return dataclasses.replace(target(seed, dtype).case(subject), seed=seed + 3)


def sampler_of(decoder: Decoder) -> Sampler:
    """With its numbers as the loop sees them, so that the reference warps the same float32 values."""
    return jax.tree.map(_cast, getattr(decoder.verifier, "sampler", Greedy()))


def _cast(leaf) -> jax.Array:
    return jnp.asarray(leaf, jnp.float32 if np.asarray(leaf).dtype.kind == "f" else jnp.int32)


def share(pairs) -> float:
    """Of the positions of two texts, those that hold the same token."""
    places = [a == b for ours, theirs in pairs for a, b in zip(ours, theirs)]
    return float(np.mean(places)) if places else 1.0


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two texts part; None if they are equal."""
    if list(ours) == list(theirs):
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def reference(seed: int, prompts, new_tokens: int, noise: int, sampler: Sampler) -> list[list[int]]:
    """What plain decoding writes; kept, as all methods are compared with the same texts."""
    leaves, structure = jax.tree.flatten(sampler)
    return _reference(seed, prompts, new_tokens, noise, structure, tuple(np.asarray(leaf).tobytes() for leaf in leaves),
                      tuple((np.shape(leaf), np.asarray(leaf).dtype) for leaf in leaves))


@functools.cache
def _reference(seed, prompts, new_tokens, noise, structure, leaves, types):
    model = target(seed)
    sampler = jax.tree.unflatten(structure, [jnp.asarray(np.frombuffer(leaf, dtype).reshape(shape))
                                             for leaf, (shape, dtype) in zip(leaves, types)])
    # All to one length, which is one program.
    longest = max(map(len, prompts)) + new_tokens
    rows = [reference_decode(model.model, model.params["target"], prompt, longest, sampler=sampler, seed=noise,
                             row_id=i) for i, prompt in enumerate(prompts)]
    return [row[:len(prompt) + new_tokens] for row, prompt in zip(rows, prompts)]
