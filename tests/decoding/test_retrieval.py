"""Drafters without training on a text whose every next token they can know: plain decoding's tokens, in few steps."""

import numpy as np
import pytest

from parallax.decoding import loop, make_decoder
from parallax.testing import MarkovModel

CYCLE, PROMPTS, NEW = [0, 3, 1, 4, 2], [[0, 3, 1, 4, 2], [1, 4, 2, 0, 3, 1], [2, 0, 3, 1, 4]], 60


@pytest.mark.parametrize("name, options, steps", [
    # Steps without a draft until the text repeats itself, then depth + 1 tokens each.
    ("prompt_lookup", {}, 12), ("adaptive_ngram", {}, 10), ("suffix_match", {}, 12), ("input_guided", {}, 13),
    ("ngram_pool", {}, 16), ("trigram", {}, 9), ("combined", dict(second="ngram_pool"), 12),
])
def test_a_text_that_repeats_itself_is_written_in_few_steps(name, options, steps):
    table = np.zeros((5, 5), np.float32)
    for token, following in zip(CYCLE, CYCLE[1:] + CYCLE[:1]):
        table[token, following] = 9
    model, target = MarkovModel.create(table)
    prompt = np.zeros((3, 6), np.int32)
    for row, text in zip(prompt, PROMPTS):
        row[:len(text)] = text
    lengths = np.asarray([len(text) for text in PROMPTS])
    decoder = make_decoder(name, model, **options)
    result = loop.decode(decoder, {"target": target}, prompt, lengths, None, 0, lengths + NEW, capacity=6 + NEW)
    for row, text in zip(np.asarray(result.tokens), PROMPTS):
        start = CYCLE.index(text[0])
        assert row[:len(text) + NEW].tolist() == [CYCLE[(start + i) % 5] for i in range(len(text) + NEW)]
    assert np.asarray(result.info.emitted).tolist() == [NEW] * 3
    assert (np.asarray(result.info.target_forwards) <= steps).all(), np.asarray(result.info.target_forwards)
