"""Reduced draft vocabularies: what is kept, the trimmed head, its law under rejection, and the command."""

import gzip
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax import LanguageModel, checkpoint, zoo
from parallax.checkpoint import Checkpoint
from parallax.decoding import DraftModel, Rejection, Sample, Speculative
from parallax.models import Block, Model, ModelConfig
from parallax.testing import MarkovModel, markov_law, p_value, sample_many, tiny_config, tiny_model
from parallax.vocabulary import choose, count_tokens, read_texts, trim

COUNTS = np.array([5, 0, 40, 5, 30, 0, 20, 0])


def test_tokens_are_counted_over_all_texts():
    assert count_tokens([[1, 1, 3], [], np.array([3, 0])], 5).tolist() == [1, 2, 0, 2, 0]


@pytest.mark.parametrize("texts, message", [
    ([[0, 5]], "hold token 5, the vocabulary is 0 to 4"), ([[-1]], "hold token -1"), ([[], []], "hold no tokens")])
def test_texts_of_another_tokenizer_are_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        count_tokens(texts, 5)


@pytest.mark.parametrize("coverage, ids", [(0.4, [2]), (0.41, [2, 4]), (0.9, [2, 4, 6]), (0.91, [0, 2, 4, 6]),
                                           (1.0, [0, 2, 3, 4, 6])])
def test_the_smallest_vocabulary_of_a_coverage_is_that_of_the_most_frequent_tokens(coverage, ids):
    chosen = choose(COUNTS, coverage=coverage)
    assert chosen.tolist() == ids and chosen.dtype == np.int32
    assert COUNTS[chosen].sum() / COUNTS.sum() >= coverage


def test_tokens_that_end_a_text_are_always_kept():
    for coverage in (0.01, 0.9, 1.0):
        assert {7, 1} <= set(choose(COUNTS, coverage=coverage, keep=(7, 1)).tolist())
    assert choose(COUNTS, coverage=0.01, keep=(7, 1)).tolist() == [1, 2, 7]
    assert choose(COUNTS, coverage=0.4, keep=(7,)).tolist() == [2, 7]


def test_latency_moves_the_size_between_the_coverage_and_the_whole():
    counts = (1e6 / np.arange(1, 1001) ** 1.2).astype(int)
    flat = choose(counts, coverage=0.5, latency_ms=lambda size: 1.0)
    steep = choose(counts, coverage=0.5, latency_ms=lambda size: float(size))
    least = choose(counts, coverage=0.5)
    assert len(flat) == 1000 and len(least) <= len(steep) < 200

    def utility(size):
        return counts[:size].sum() / counts.sum() - (100 + size) / 1100

    chosen = choose(counts, coverage=0.5, latency_ms={0: 100.0, 1000: 1100.0})       # a table, interpolated
    tried = [len(least), *range(64, 1000, 64), 1000]
    assert len(chosen) == max((size for size in tried if size >= len(least)), key=utility)


@pytest.mark.parametrize("coverage, keep, message", [
    (0, (), "coverage must be in"), (1.1, (), "got 1.1"), (0.5, (8,), "token 8 is to be kept")])
def test_settings_out_of_range_are_refused(coverage, keep, message):
    with pytest.raises(ValueError, match=message):
        choose(COUNTS, coverage=coverage, keep=keep)


def logits(model, params, tokens):
    size = tokens.shape[1]
    block = Block(tokens, jnp.broadcast_to(jnp.arange(size), tokens.shape), jnp.tril(jnp.ones((size, size), bool)))
    return jax.jit(model.unembed)(params, model.forward(params, block, model.new_cache(len(tokens), 0)).hidden)


@pytest.mark.parametrize("changes", [dict(), dict(tie_embeddings=False, logit_softcap=3.0)])
def test_a_trimmed_model_says_the_same_of_its_tokens_and_rules_out_all_others(changes):
    model, params = tiny_model(**changes)
    ids = np.array([0, 3, 8, 41, 60])
    config, trimmed = trim(model.config, params, ids)
    assert (config.draft_vocab, config.vocab_size, config.tie_embeddings) == (5, 61, False)
    assert trimmed["d2t"].tolist() == ids.tolist() and trimmed["head"].shape == (5, 32)
    tokens = jnp.arange(12).reshape(2, 6) * 5                   # of which most were dropped: it reads them all the same
    whole, ours = logits(model, params, tokens), logits(Model(config), trimmed, tokens)
    assert ours.shape == whole.shape
    np.testing.assert_allclose(ours[..., ids], whole[..., ids], rtol=1e-5, atol=1e-5)
    others = np.setdiff1d(np.arange(61), ids)
    assert (ours[..., others] == -jnp.inf).all()
    t2d = np.full(61, -1)
    t2d[trimmed["d2t"]] = np.arange(5)
    assert t2d[ids].tolist() == [0, 1, 2, 3, 4] and (t2d[others] == -1).all()


def test_the_whole_vocabulary_leaves_the_model_as_it_is():
    model, params = tiny_model()
    config, same = trim(model.config, params, np.arange(61))
    assert config == model.config and same is params


def test_a_fresh_model_has_the_parameters_of_a_trimmed_one():
    model, params = tiny_model()
    config, trimmed = trim(model.config, params, np.arange(7))
    fresh = jax.eval_shape(Model(config).init, jax.random.key(0))
    assert jax.tree.map(lambda w: (w.shape, w.dtype), fresh) == jax.tree.map(lambda w: (w.shape, w.dtype), trimmed)


@pytest.mark.parametrize("ids, message", [([], "expected ascending tokens"), ([3, 1], "ascending"), ([1, 1], "ascend"),
                                          ([5, 61], "from 0 to 60")])
def test_ids_that_are_no_vocabulary_are_refused(ids, message):
    model, params = tiny_model()
    with pytest.raises(ValueError, match=message):
        trim(model.config, params, np.array(ids, int))


def test_a_model_is_not_trimmed_twice_nor_to_more_than_it_has():
    model, params = tiny_model()
    with pytest.raises(ValueError, match="trimmed already, to 7 tokens"):
        trim(*trim(model.config, params, np.arange(7)), np.arange(3))
    with pytest.raises(ValueError, match="draft_vocab must be below vocab_size=61.* got 61"):
        tiny_config(tie_embeddings=False, draft_vocab=61)
    with pytest.raises(ValueError, match="expected tie_embeddings=False"):
        tiny_config(draft_vocab=7)


def test_rejection_draws_the_dropped_tokens_from_the_residual():
    """Two of three tokens are drafted; the law of the output is the target's own."""
    table = np.random.default_rng(0).normal(size=(3, 3))
    target, params = MarkovModel.create(table)
    small, weights = tiny_model(vocab_size=3, num_layers=1)
    config, weights = trim(small.config, weights, np.array([0, 2]))
    decoder = Speculative(model=target, verifier=Rejection(sampler=Sample()), drafter=DraftModel(
        model=Model(config), sampler=Sample(), draft_length=2, kind="sampled"))
    samples = sample_many(decoder, {"target": params, "draft": weights}, [0, 1], 4, 10_000)
    law = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    assert p_value(samples, markov_law(law, 1, 4)) > 1e-3
    assert (samples == 1).any()


@pytest.fixture(scope="module")
def trimmed_folder(tiny_folder, tmp_path_factory):
    """What the command makes of the tiny folder, for texts that hold 11 of its 300 tokens."""
    folder = tmp_path_factory.mktemp("trim")
    (folder / "texts.jsonl").write_text('{"prompt": "zzz", "text": "the quick brown fox"}\n"the lazy dog"\n')
    command = [sys.executable, "-m", "parallax.trim", f"--draft={tiny_folder}", f"--target={tiny_folder}",
               f"--texts={folder / 'texts.jsonl'}", f"--out={folder / 'out'}", "--coverage=1.0"]
    return folder, subprocess.run(command, capture_output=True, text=True)


def test_the_command_writes_a_folder_that_drafts(trimmed_folder, tiny_folder):
    folder, result = trimmed_folder
    assert result.returncode == 0, result.stderr
    whole, trimmed = zoo.load(str(tiny_folder)), zoo.load(str(folder / "out"))
    texts = read_texts(str(folder / "texts.jsonl"))
    assert texts == ["the quick brown fox", "the lazy dog"]
    (folder / "texts.jsonl.gz").write_bytes(gzip.compress((folder / "texts.jsonl").read_bytes()))
    assert read_texts(str(folder / "texts.jsonl.gz")) == texts
    wanted = sorted({t for text in texts for t in whole.tokenizer.encode(text)} | set(whole.eos_ids))
    assert trimmed.params["d2t"].tolist() == wanted and trimmed.config.draft_vocab == len(wanted)
    np.testing.assert_array_equal(trimmed.params["head"], whole.params["head"][wanted])
    assert trimmed.eos_ids == whole.eos_ids
    assert f"{len(wanted)} of {whole.config.vocab_size} tokens kept, 100.00% of" in result.stdout
    lm = LanguageModel.load(str(tiny_folder), draft=str(folder / "out"))
    plain, ours = (lm.generate(["the cat sat"], method=method, max_new_tokens=16)
                   for method in ("autoregressive", "draft_model"))
    assert plain.completions[0].ids == ours.completions[0].ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trimmed_checkpoint_reads_back_as_it_was_written(dtype, tmp_path):
    config = ModelConfig(vocab_size=70_000, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
                         intermediate_size=8, max_positions=16)
    params = jax.tree.map(np.asarray, jax.jit(Model(config).init)(jax.random.key(0)))
    ids = np.array([0, 3, 69_999])                              # beyond what bfloat16 or int16 can hold
    config, params = trim(config, params, ids)
    checkpoint.save(Checkpoint(config, params, None, (3,)), tmp_path / "out", dtype=dtype)
    again = checkpoint.load(tmp_path / "out", scan_layers=True)
    assert again.config.draft_vocab == 3 and again.params["d2t"].tolist() == ids.tolist()
    assert again.params["d2t"].dtype == np.int32
    np.testing.assert_allclose(np.asarray(again.params["head"], np.float32), params["head"], rtol=1e-2)


@pytest.mark.parametrize("ids", [[0, 3], [3, 0, 1], [0, 3, 16], [0, 1.5, 3], [[0, 3], 5], "none"])
def test_a_folder_whose_ids_do_not_fit_its_config_is_refused(ids, tmp_path):
    config = ModelConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
                         intermediate_size=8, max_positions=16)
    params = jax.tree.map(np.asarray, jax.jit(Model(config).init)(jax.random.key(0)))
    checkpoint.save(Checkpoint(*trim(config, params, np.array([0, 3, 5])), None, (3,)), tmp_path / "out")
    (tmp_path / "out" / "draft_vocab.json").write_text(json.dumps({"ids": ids}))
    with pytest.raises(ValueError, match="must hold as 'ids' 3 ascending tokens below 16") as error:
        checkpoint.load(tmp_path / "out")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes, reason", [
    (dict(texts=""), "expected --texts: python -m parallax.trim"),
    (dict(coverage="1.5"), "coverage must be in (0, 1], got 1.5"),
    (dict(texts="nowhere.txt"), "there is no prompt file 'nowhere.txt'"),
    (dict(out="{folder}"), "is not empty"),
    (dict(target="tiny-python"), "must have the target's vocabulary"),
])
def test_mistakes_are_one_line_and_exit_status_2(changes, reason, tiny_folder, tmp_path):
    (tmp_path / "texts.txt").write_text("the quick brown fox")
    settings = {"draft": tiny_folder, "target": tiny_folder, "texts": tmp_path / "texts.txt", "out": tmp_path / "out",
                **{name: value.format(folder=tmp_path) for name, value in changes.items()}}
    result = subprocess.run([sys.executable, "-m", "parallax.trim", *(f"--{k}={v}" for k, v in settings.items())],
                            capture_output=True, text=True)
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert reason in result.stderr and not (tmp_path / "out").exists()


def test_the_head_can_be_timed_to_choose_a_size(tiny_folder):
    from parallax.vocabulary import latencies
    small = zoo.load(str(tiny_folder))
    table = latencies(small.config, small.params, repeats=1)
    size = small.config.vocab_size
    assert list(table) == [size >> i for i in range(len(table))] and min(table.values()) > 0
