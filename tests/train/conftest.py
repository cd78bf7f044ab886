"""A small corpus, and a config that trains on it in seconds."""

import pytest

from tests.train.command import small_config, train

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
    return small_config(texts)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, texts):
    """The workdir of a run of the command that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    ended = train(workdir, texts)
    assert ended.status == 0, ended.log
    return workdir
