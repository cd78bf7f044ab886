"""Plain decoding written as plainly as possible: no cache, no loop of ours, one whole forward per token.

This is what `exact` is measured against, so it shares nothing with the decoders but the model and the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from parallax.decoding.sampling import Greedy, Sampler, Seen, row_keys
from parallax.models import Block, Model


def reference_decode(model: Model, params, prompt: Sequence[int], limit: int, *, sampler: Sampler = Greedy(),
                     seed: int = 0, row_id: int = 0, eos: tuple[int, ...] = ()) -> list[int]:
    """The prompt and its continuation up to `limit` tokens or an end-of-text token.

    Args:
      model, params: the target.
      prompt: token ids.
      limit: longest length, prompt included.
      sampler: greedy, or seeded sampling with noise keyed by (seed, row_id, position); with the settings of this one
        sequence (`sampling.of_rows` of those of a batch).
    """
    tokens = list(prompt)
    forward = _forward(model, limit)
    keys = row_keys(jax.random.key(seed), jnp.asarray([row_id]))
    while len(tokens) < limit and not (len(tokens) > len(prompt) and tokens[-1] in eos):
        padded = np.zeros((1, limit), np.int32)
        padded[0, :len(tokens)] = tokens
        logits = forward(params, padded)[:, len(tokens) - 1:len(tokens)]
        position = jnp.asarray([len(tokens)])
        tokens.append(int(_draw(sampler, logits, keys, position, jnp.asarray(padded))[0, 0]))
    return tokens


@jax.jit
def _draw(sampler: Sampler, logits, keys, position, tokens):
    return sampler.draw(logits, keys, position, jnp.zeros(1, jnp.int32), 0, Seen.text(tokens, position))


_CACHE: dict = {}


def _forward(model: Model, size: int):
    if (model, size) not in _CACHE:
        def forward(params, tokens):
            block = Block(tokens, jnp.arange(size)[None], jnp.tril(jnp.ones((size, size), bool)))
            return model.unembed(params, model.forward(params, block, model.new_cache(1, 0)).hidden)
        _CACHE[model, size] = jax.jit(forward)
    return _CACHE[model, size]
