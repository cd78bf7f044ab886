"""The pair that comes with the package works, and is small."""

import jax
import numpy as np
import pytest

from parallax import zoo
from parallax.generate import LanguageModel
from parallax.train import simulate

PROMPTS = ["class Queue:\n", "import os\nimport sys\n\n\ndef ", "try:\n    import zlib\nexcept ImportError:\n    "]


@pytest.fixture(scope="module")
def pair():
    return LanguageModel.load("tiny-python", draft="tiny-python-draft")


def test_both_together_are_at_most_four_megabytes():
    folders = [zoo.resolve(name) for name in ("tiny-python", "tiny-python-draft")]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 4e6


def test_the_target_knows_python(pair):
    """It finds the next token of code far more often than chance (1 in 1024) would."""
    ids = pair.encode('    def __init__(self, name):\n        self.name = name\n\n    def __repr__(self):\n'
                      '        return "x"\n')
    guesses = jax.jit(simulate.guesses, static_argnums=0)(pair.model, pair.params["target"], np.asarray([ids]))
    assert np.mean(np.asarray(guesses)[0, :-1] == ids[1:]) > 0.4


def test_decoding_with_the_drafter_writes_the_same_in_half_the_forwards_as_simulated(pair):
    rows = [pair.encode(text) for text in PROMPTS]
    plain = pair.generate(rows, method="autoregressive", max_new_tokens=48, batch_size=3, ignore_eos=True)
    drafted = pair.generate(rows, method="draft_model", max_new_tokens=48, batch_size=3, ignore_eos=True)
    assert [c.ids for c in drafted.completions] == [c.ids for c in plain.completions]
    assert drafted.tokens_per_forward > 1.7
    texts = simulate.greedy_texts(pair.model, pair.params["target"], rows, 48)
    guesses = jax.jit(simulate.guesses, static_argnums=0)(pair.draft, pair.params["draft"], texts.tokens)
    emitted, forwards = simulate.walk(guesses, texts, 4)
    assert forwards.tolist() == [c.target_forwards for c in drafted.completions]
    assert emitted.tolist() == [48] * 3


@pytest.mark.slow
def test_sampling_with_rejection_accepts_more_than_following(pair):
    """Over one text of the model's own; both laws are proven elsewhere."""
    runs = {verifier: pair.generate([PROMPTS[0]], method="draft_model", verifier=verifier, temperature=1.0,
                                    max_new_tokens=200, ignore_eos=True) for verifier in ("follow", "rejection")}
    assert runs["follow"].guarantee == "exact" and runs["rejection"].guarantee == "distribution"
    assert runs["rejection"].tokens_per_forward > runs["follow"].tokens_per_forward > 1.3
