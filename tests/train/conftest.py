"""A small corpus, and a config that trains on it in seconds."""

import pytest

from parallax.train import defaults

WORDS = "the cat sat on the mat while the dog ran in the park and it rained all day in the old town"


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of short texts."""
    folder = tmp_path_factory.mktemp("texts")
    words = WORDS.split()
    for i in range(12):
        (folder / f"{i:02d}.txt").write_text(" ".join(words[(i * 5 + j * (i + 1)) % len(words)] for j in range(60)))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Tokenised corpora go here."""
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def config(texts, cache):
    """Next-token training of a tiny target for 12 steps."""
    result = defaults.get_config()
    result.data.source = (str(texts),)
    result.data.held_out = 0.2
    result.model.update(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32,
                        max_positions=64)
    result.sequence_length, result.batch_size, result.steps = 32, 4, 12
    result.log_every, result.eval_every, result.checkpoint_every, result.eval_batches = 2, 6, 4, 2
    result.optimizer.warmup = 2
    return result
