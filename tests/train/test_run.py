"""The training command from its config on: what it writes, that it goes on where it stopped, and what it refuses."""

import json
import os

import jax
import numpy as np
import pytest

from parallax import checkpoint, zoo
from parallax.generate import LanguageModel
from parallax.train import corpus, defaults, run, selfgen
from tests.train.command import small_config


def train(config, workdir):
    run.main(config, workdir)
    return checkpoint.load(workdir / "export")


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """(workdir, checkpoint) of an uninterrupted run of the `config` fixture."""
    folder = tmp_path_factory.mktemp("trained")
    os.environ["PARALLAX_CACHE"], before = str(folder / "cache"), os.environ.get("PARALLAX_CACHE")
    try:
        yield folder / "run", train(small_config(texts), folder / "run")
    finally:
        os.environ.pop("PARALLAX_CACHE") if before is None else os.environ.update(PARALLAX_CACHE=before)


def _draft_config(texts, target, **changes):
    result = small_config(texts, objective="distill", target=str(target), steps=4, checkpoint_every=4, **changes)
    result.model.update(num_layers=1)
    return result


def equal(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))


def test_a_run_leaves_config_versions_corpus_hash_figures_and_a_model_that_decodes(trained):
    workdir, _ = trained
    record = json.loads((workdir / "config.json").read_text())
    assert record["config"]["optimizer"]["warmup"] == 2 and len(record["corpus"]) == 64 and "jax" in record["versions"]
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [2, 4, 6, 8, 10, 12]
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert list((workdir / "tensorboard").iterdir())
    run = LanguageModel.load(str(workdir / "export")).generate(["the cat"], method="autoregressive", max_new_tokens=4)
    assert len(run.completions[0].ids) == 4


def test_checkpoints_of_chosen_steps_stay_beside_the_latest(config, tmp_path):
    config.update(steps=6, checkpoint_every=2, keep=1, keep_every=4)
    run.main(config, tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["4", "6"]


def test_a_longer_run_goes_on_from_a_shorter_one(trained, texts, tmp_path, capsys):
    """With a constant rate, for a schedule stretches with the run."""
    config = small_config(texts, steps=6)
    config.optimizer.schedule = "constant"
    run.main(config, tmp_path / "run")
    config.steps = 10
    ours = train(config, tmp_path / "run")
    assert "going on behind step 6" in capsys.readouterr().err
    assert equal(ours.params, train(config, tmp_path / "whole").params)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_a_finished_run_only_exports_again(trained, texts, capsys):
    workdir, before = trained
    assert equal(train(small_config(texts), workdir).params, before.params)
    assert "going on behind step 12" in capsys.readouterr().err


def test_training_can_start_from_other_weights(trained, texts, tmp_path):
    workdir, before = trained
    config = small_config(texts, init=str(workdir / "export"), steps=1, checkpoint_every=1)
    config.optimizer.learning_rate = 1e-9
    ours = train(config, tmp_path / "run")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours.params, before.params)


def test_weights_to_start_from_bring_their_tokenizer(texts, tmp_path, cache):
    config = small_config(texts, init="tiny-python", steps=1, checkpoint_every=1)
    ours = train(config, tmp_path / "run")
    assert ours.tokenizer.encode("def main") == checkpoint.load(zoo.resolve("tiny-python")).tokenizer.encode("def main")
    config.tokenizer = "bytes"
    with pytest.raises(ValueError, match="tokenizer='bytes' has no use here: it is that of the checkpoint in `init`"):
        run.main(config, tmp_path / "other")


@pytest.mark.slow
def test_text_that_another_target_wrote_is_warned_of(trained, texts, tmp_path, cache, capsys):
    config = defaults.get_generate_config()
    config.target, config.data.source, config.data.held_out = str(trained[0] / "export"), (str(texts),), 0.2
    config.update(count=8, shard=8, batch_size=8, max_new_tokens=8, prompt_length=4)
    selfgen.main(config, tmp_path / "texts")
    own = _draft_config(tmp_path / "texts", trained[0] / "export", eval_prompts=0)
    run.main(own, tmp_path / "own")
    assert "another target" not in capsys.readouterr().err
    run.main(_draft_config(tmp_path / "texts", "tiny-python", eval_prompts=0), tmp_path / "foreign")
    assert "was written by another target" in capsys.readouterr().err


def test_a_run_killed_before_its_config_was_whole_can_begin_again(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.123").write_text("{")
    config.update(steps=1, checkpoint_every=1)
    run.main(config, tmp_path / "run")
    assert (tmp_path / "run" / "export" / "config.json").is_file()


def test_the_learning_rate_may_change_when_a_run_goes_on_and_the_first_is_remembered(config, tmp_path):
    config.update(steps=2, checkpoint_every=2)
    run.main(config, tmp_path / "run")
    config.steps, config.optimizer.learning_rate = 4, 1e-5
    run.main(config, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert record["config"]["optimizer"]["learning_rate"] == 1e-5
    assert [before["optimizer"]["learning_rate"] for before in record["config_before"]] == [1e-3]


def test_a_drafter_is_distilled_on_text_that_the_target_wrote(trained, texts, tmp_path):
    workdir, _ = trained
    config = defaults.get_generate_config()
    config.target, config.data.source, config.data.held_out = str(workdir / "export"), (str(texts),), 0.2
    config.update(count=12, shard=4, batch_size=3, max_new_tokens=12, prompt_length=5)
    selfgen.main(config, tmp_path / "texts")
    written = corpus.read(str(tmp_path / "texts"), None, vocab_size=258)
    assert written.prompts.tolist() == [5] * 12
    draft = _draft_config(tmp_path / "texts", workdir / "export", eval_new_tokens=6)
    ours = train(draft, tmp_path / "draft")
    assert ours.config.vocab_size == 258 and ours.config.num_layers == 1
    last = json.loads((tmp_path / "draft" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 1 <= last["eval/tokens_per_forward"] <= 5 and 0 < last["eval/acceptance"] < 1
    lm = LanguageModel.load(str(workdir / "export"), draft=str(tmp_path / "draft" / "export"))
    plain, drafted = (lm.generate(["the dog"], method=m, max_new_tokens=8) for m in ("autoregressive", "draft_model"))
    assert plain.completions[0].ids == drafted.completions[0].ids


def test_the_simulated_length_is_what_the_decoder_measures_on_the_same_prompts(trained, texts, tmp_path):
    """The figure that a run logs against `generate` with its export."""
    workdir, _ = trained
    draft = _draft_config(texts, workdir / "export")
    draft.optimizer.learning_rate = 0.02
    train(draft.unlock(), tmp_path / "draft")
    rows = [json.loads(line) for line in (tmp_path / "draft" / "metrics.jsonl").read_text().splitlines()]
    simulated = [row["eval/tokens_per_forward"] for row in rows if "eval/tokens_per_forward" in row][-1]
    lm = LanguageModel.load(str(workdir / "export"), draft=str(tmp_path / "draft" / "export"))
    held_out = corpus.split(corpus.read(str(texts), lm.tokenizer, vocab_size=258), 0.2)[1]
    from parallax.train import data
    prompts = data.prompts(held_out, 2, 4)
    measured = lm.generate(prompts, method="draft_model", options={"draft_length": 4}, max_new_tokens=8, batch_size=2)
    assert measured.tokens_per_forward == pytest.approx(simulated)


class TestGeneration:
    @pytest.fixture
    def config(self, trained, texts, cache):
        result = defaults.get_generate_config()
        result.target, result.data.source = str(trained[0] / "export"), (str(texts),)
        result.update(count=7, shard=3, batch_size=2, max_new_tokens=6, prompt_length=4)
        return result

    def test_parts_have_the_texts_and_the_folder_their_provenance(self, config, tmp_path):
        selfgen.main(config, tmp_path / "texts")
        parts = sorted(p.name for p in (tmp_path / "texts").glob("*.npz"))
        assert parts == ["part-00000.npz", "part-00001.npz", "part-00002.npz"]
        record = json.loads((tmp_path / "texts" / "config.json").read_text())
        assert len(record["target"]) == 64 and record["config"]["temperature"] == 1.0

    def test_a_stopped_run_writes_the_texts_that_it_would_have_written(self, config, tmp_path):
        selfgen.main(config, tmp_path / "whole")
        selfgen.main(config, tmp_path / "stopped")
        (tmp_path / "stopped" / "part-00001.npz").write_bytes(b"cut")
        (tmp_path / "stopped" / "part-00002.npz").unlink()
        kept = (tmp_path / "stopped" / "part-00000.npz").stat().st_mtime_ns
        config.batch_size = 3
        selfgen.main(config, tmp_path / "stopped")
        ours, theirs = (corpus.read(str(tmp_path / n), None, vocab_size=258).digest for n in ("stopped", "whole"))
        assert ours == theirs
        assert (tmp_path / "stopped" / "part-00000.npz").stat().st_mtime_ns == kept

    @pytest.mark.parametrize("change", [dict(seed=1), dict(temperature=0.0), dict(top_k=2), dict(top_p=0.3),
                                        dict(prompt_ids=(7,)), dict(prompt_length=3), dict(max_new_tokens=5)], ids=str)
    def test_every_setting_changes_the_texts(self, config, tmp_path, change):
        config.update(count=3)
        selfgen.main(config, tmp_path / "plain")
        config.update(change)
        selfgen.main(config, tmp_path / "changed")
        ours, theirs = (corpus.read(str(tmp_path / n), None, vocab_size=258).digest for n in ("plain", "changed"))
        assert ours != theirs

    @pytest.mark.parametrize("change, message", [
        (dict(target=""), "generation needs a target"),
        (dict(count=0), "count must be at least 1, got 0"),
        (dict(temperature=-1.0), "temperature must be 0"),
    ], ids=str)
    def test_bad_input_is_refused_before_anything_is_written(self, config, tmp_path, change, message):
        config.update(change)
        with pytest.raises(ValueError, match=message):
            selfgen.main(config, tmp_path / "texts")
        assert not (tmp_path / "texts").exists()

    def test_there_must_be_something_to_start_from(self, config, tmp_path):
        config.data.source = ()
        with pytest.raises(ValueError, match="nothing to start from: set data.source, or prompt_ids"):
            selfgen.main(config, tmp_path / "texts")


@pytest.mark.parametrize("change, message", [
    (dict(objective="next_tokn"), "unknown objective 'next_tokn': expected one of next_token, distill; did you mean"),
    (dict(objective="distill"), "objective distill needs a target"),
    (dict(target="smollm2-135m"), "objective next_token trains a target and has none"),
    (dict(tokenizer="bytez"), "unknown tokenizer 'bytez'"),
    (dict(batch_size=0), "batch_size=0 must be a positive multiple"),
    (dict(batch_size=6, accumulate=4), "batch_size=6 must be a positive multiple of accumulate=4"),
    (dict(sequence_length=1), "sequence_length must be at least 2"),
    (dict(sequence_length=100), "longer than the model's max_positions=64"),
    (dict(steps=0), "steps must be at least 1, got 0"),
    (dict(dtype="float64"), "unknown dtype 'float64'"),
    (dict(mesh=dict(data=3)), "a mesh of data=3, fsdp=1, tensor=1 needs 3 devices"),
    (dict(optimizer=dict(schedule="cos")), "unknown schedule 'cos'"),
    (dict(model=dict(vocab_size=100)), "model.vocab_size=100 is smaller than the tokenizer's 258"),
    (dict(model=dict(hiden_size=8)), "model.hiden_size is not known: .*did you mean 'hidden_size'"),
    (dict(data=dict(source=("/nowhere",))), "/nowhere"),
    (dict(data=dict(held_out=1.0)), "held_out"),
    (dict(data=dict(limit=-1)), "data.limit must be at least 0, got -1"),
    (dict(keep=0), "keep must be at least 1, got 0"),
    (dict(seed=-1), "seed must be from 0 to"),
], ids=str)
def test_bad_settings_are_refused_before_anything_is_written(config, tmp_path, change, message):
    with config.unlocked():
        config.update(change)
    with pytest.raises((ValueError, OSError), match=message):
        run.main(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bad_text_is_refused_before_anything_is_written(config, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("caf\xe9 olé".encode("latin-1"))
    for name, message in (("empty.txt", "empty"), ("latin.txt", "latin.txt is not UTF-8")):
        config.data.source = (str(tmp_path / name),)
        with pytest.raises(ValueError, match=message):
            run.main(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_draft_of_another_vocabulary_is_refused(trained, texts, tmp_path):
    draft = _draft_config(texts, trained[0] / "export")
    draft.model.vocab_size = 300
    with pytest.raises(ValueError, match="draft model's vocabulary has 300 tokens and the target's 258"):
        run.main(draft, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_workdir_of_another_run_is_refused_and_stays_as_it_is(trained, texts):
    workdir, _ = trained
    before = {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="holds another run: its seed is 0, here it is 1"):
        run.main(small_config(texts, seed=1), workdir)
    with pytest.raises(ValueError, match="holds another run: its model.hidden_size is 16, here it is 32"):
        other = small_config(texts)
        other.model.hidden_size = 32
        run.main(other, workdir)
    assert before == {p: p.read_bytes() for p in workdir.rglob("*") if p.is_file()}


def test_a_corpus_that_changed_since_the_run_began_is_refused(config, tmp_path, cache):
    source = tmp_path / "text.txt"
    source.write_text("one two three four five six seven eight nine ten " * 20)
    config.update(steps=1, checkpoint_every=1)
    config.data.source = (str(source),)
    run.main(config, tmp_path / "run")
    source.write_text("ten nine eight seven six five four three two one " * 20)
    with pytest.raises(ValueError, match="was begun with another corpus"):
        run.main(config, tmp_path / "run")
