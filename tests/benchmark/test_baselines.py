"""Other engines in the same rotation."""

import types

import pytest

from benchmarks.engines import Greedy, baselines


def test_a_greedy_engine_warms_up_and_leaves_the_prefill_out():
    calls = []

    def generate(ids, count):
        calls.append((list(ids), count))
        return list(range(count))

    engine = Greedy("other", generate, 6)
    assert len(calls) == 1
    run = engine.run([[4, 5]], (0,), 0)
    assert calls[1:] == [([4, 5], 1), ([4, 5], 6)]
    assert run.ids == [[0, 1, 2, 3, 4, 5]] and run.prefill >= 0 and run.compile == 0
    assert run.guarantee is None and run.forwards is None


def test_one_new_token_is_all_decoding():
    run = Greedy("other", lambda ids, count: [7], 6).run([[4, 5]], (0,), 0)
    assert run.ids == [[7]] and run.decode > 0


def test_none_asked_for_is_none():
    assert baselines(types.SimpleNamespace(transformers=False, gguf=None)) == {}


def test_what_is_missing_is_said_before_the_model_loads(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="there is no file 'nope.gguf'"):
        baselines(types.SimpleNamespace(transformers=False, gguf="nope.gguf"))
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(ValueError, match="transformers is not installed: pip install torch transformers"):
        baselines(types.SimpleNamespace(transformers=True, gguf=None))


@pytest.mark.parametrize("changes", [dict(batch_size=2), dict(decoding={"temperature": 0.5, "max_new_tokens": 8})])
def test_a_benchmark_that_they_cannot_take_part_in_is_refused(changes, settings, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.engines._installed", lambda name, *packages: name)
    monkeypatch.setattr("benchmarks.engines._llama_cpp", lambda *_: pytest.fail("loaded"))
    (tmp_path / "m.gguf").write_text("")
    make = baselines(types.SimpleNamespace(transformers=False, gguf=str(tmp_path / "m.gguf")))["llama.cpp"]
    with pytest.raises(ValueError, match="greedy and one prompt at a time"):
        make(None, settings(**changes))
