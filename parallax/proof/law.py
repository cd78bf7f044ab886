"""The law of what is written: chi-square of many texts, each through the compiled loop, against the exact law.

B prompts, V vocabulary, L tokens that are written.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from parallax.decoding.sampling import Sampler, Seen
from parallax.models import Block, Model
from parallax.proof.record import CHANCE, TARGET, Record
from parallax.proof.subjects import Subject, target
from parallax.proof.tokens import sampler_of
from parallax.testing import run_many

PROMPT, LENGTH = (3, 5, 7, 3, 5, 7, 3, 5), 3      # repeats itself, so that drafts from the text exist
_FEWEST, _CELLS = 8, 256                          # texts that a cell is expected to hold, at least; cells, at most


def sampled_law(subject: Subject, *, draws: int) -> Record:
    """Texts of three tokens by the tiny target. `exact` and `distribution` promise the law of plain sampling; of a
    lossy decoder the distance to it is told, beside the distance that chance alone makes."""
    tiny = target(1)                              # repeats itself, so that what is drafted from the text is accepted
    decoder = subject.sampled(tiny)
    params = tiny.case(subject).params
    law = exact_law(tiny.model, params["target"], sampler_of(decoder), PROMPT, LENGTH)
    result = run_many(decoder, params, list(PROMPT), LENGTH, draws, seed=5)
    numbers = test(result.tokens[:, 0, len(PROMPT):], law)
    numbers["accepted_per_step"] = accepted_per_step(result.info)
    return verdict(TARGET, subject.label, subject.verifier, decoder.guarantee, numbers)


def verdict(on: str, method: str, verifier: str, guarantee: str, numbers: dict[str, float]) -> Record:
    promised = guarantee in ("exact", "distribution")
    passed = numbers["p"] >= CHANCE or not promised
    note = "" if passed else f"the texts do not have the law of plain sampling (chi-square p {numbers['p']:.1e})"
    return Record(on, method, verifier, guarantee, "law", passed, numbers, note)


def accepted_per_step(info) -> float:
    return float(np.sum(info.accepted) / np.sum(info.target_forwards))


def test(samples: Int[np.ndarray, "draws L"], law: Float[np.ndarray, "outcomes"]) -> dict[str, float]:
    """{p: chi-square p-value, tv: distance of the two, noise: the distance that chance alone makes}.

    Outcomes are pooled, those of one beginning together, into cells that are expected at least 8 times and at most some
    256 in number: rare ones say nothing alone, and many cells hide a small shift. The samples decide none of it.
    """
    from scipy.special import chdtrc

    draws, length = samples.shape
    size = round(len(law) ** (1 / length))
    seen = np.bincount(samples @ size ** np.arange(length)[::-1], minlength=len(law))
    if seen[law == 0].any():
        return {"p": 0.0, "tv": float(np.abs(seen / draws - law).sum() / 2), "noise": 0.0}
    cell = pooled(law, max(_FEWEST / draws, 1 / _CELLS))
    expected, counts = np.bincount(cell, law) * draws, np.bincount(cell, seen)
    chances = expected / expected.sum()
    random = np.random.default_rng(0).multinomial(draws, chances, 50)
    noise = np.abs(random - expected).sum(1).mean() / draws / 2
    return {"p": float(chdtrc(max(len(expected) - 1, 1), ((counts - expected) ** 2 / expected).sum())),
            "tv": float(np.abs(counts - expected).sum() / draws / 2), "noise": float(noise)}


def pooled(law: Float[np.ndarray, "outcomes"], least: float) -> Int[np.ndarray, "outcomes"]:
    """The cell of every outcome: neighbours share one until it has the probability `least`."""
    cells, cell, mass = np.zeros(len(law), int), 0, 0.0
    for outcome, chance in enumerate(law):
        cells[outcome] = cell
        mass += chance
        if mass >= least:
            cell, mass = cell + 1, 0.0
    # What is left behind the last full cell belongs to it.
    return np.minimum(cells, max(cell - 1, 0))


def exact_law(model: Model, params, sampler: Sampler, prompt, length: int) -> Float[np.ndarray, "outcomes"]:
    """Probability of every continuation of `length` tokens, in base-V order: by going through all their prefixes."""
    size = model.config.vocab_size
    law = np.ones(1)
    for written in range(length):
        ways = np.arange(size ** written)[:, None] // size ** np.arange(written)[::-1] % size     # [B, written]
        tokens = np.concatenate([np.tile(prompt, (len(ways), 1)), ways], 1).astype(np.int32)
        after = _next(model, params, sampler, jnp.asarray(tokens))
        law = (law[:, None] * np.asarray(after, float)).reshape(-1)
    return law / law.sum()


@functools.partial(jax.jit, static_argnums=0)
def _next(model, params, sampler, tokens: Int[Array, "B N"]) -> Float[Array, "B V"]:
    batch, size = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    block = Block(tokens, positions, jnp.tril(jnp.ones((size, size), bool)))
    logits = model.unembed(params, model.forward(params, block, model.new_cache(batch, 0)).hidden[:, -1:])
    seen = Seen.text(tokens, jnp.full((batch,), size, jnp.int32))
    return jax.nn.softmax(sampler.warp(logits, seen)[:, 0], -1)
