"""Builders that the benchmark's tests share."""

import dataclasses

import pytest

from parallax.benchmark.engine import Measurement
from parallax.benchmark.settings import Contender, Prompts, Settings


@pytest.fixture
def run():
    """A measurement as a record holds it, of one prompt unless `ids` has more rows."""
    def make(*ids, decode, prefill=0.1, forwards=None, **counts):
        forwards = [len(row) for row in ids] if forwards is None else forwards
        counts = {"guarantee": "exact", "accepted": 0, "proposed": 0, "draft_forwards": 0, **counts}
        return dataclasses.asdict(Measurement([list(row) for row in ids], prefill, decode, forwards=forwards, **counts))
    return make


@pytest.fixture
def record():
    def make(plain, index=(0,), repeat=0, file="code", gaps=None, **others):
        return {"unit": [repeat, 0, index[0]], "prompts": file, "index": list(index), "prompt_tokens": [9] * len(index),
                "gaps": gaps or {}, "process": "1", "runs": {"autoregressive": plain, **others}}
    return make


@pytest.fixture
def settings():
    """Of a benchmark with two files of two prompts and one method besides plain decoding."""
    def make(**changes):
        files = tuple(Prompts(f"{name}.jsonl", name, ("a", "b"), (0, 5)) for name in ("code", "chat"))
        decoding = dict(max_new_tokens=8, ignore_eos=False, temperature=0.0, top_k=None, top_p=1.0, min_p=None)
        contenders = (Contender("autoregressive", "autoregressive"), Contender("lookup", "prompt_lookup"))
        base = Settings("tiny", "", contenders, files, False, "", 1, 2, 7, decoding)
        return dataclasses.replace(base, **changes)
    return make
