"""A run's folder belongs to one config."""

import json

import pytest

from parallax.train.workdir import Workdir

CONFIG = {"steps": 10, "mesh": {"data": 1}, "optimizer": {"learning_rate": 0.1}, "source": ("a", "b")}
FREE = ("steps", "mesh.")


def begun(path, config=CONFIG, **facts):
    Workdir(path, config, FREE).claim(**(facts or {"corpus": "abc"}))
    return path


def test_a_new_folder_gets_the_config_the_versions_and_the_facts(tmp_path):
    record = json.loads((begun(tmp_path / "run") / "config.json").read_text())
    assert record["config"] == {**CONFIG, "source": ["a", "b"]}
    assert record["corpus"] == "abc"
    assert {"parallax", "python", "jax", "grain"} <= set(record["versions"])


def test_nothing_is_written_before_the_claim(tmp_path):
    folder = Workdir(tmp_path / "run", CONFIG, FREE)
    assert not folder.resumes and not (tmp_path / "run").exists()


def test_the_same_config_goes_on_and_free_keys_may_change(tmp_path):
    path = begun(tmp_path / "run")
    longer = {**CONFIG, "steps": 20, "mesh": {"data": 8}}
    assert Workdir(path, longer, FREE).resumes
    begun(path, longer)
    assert json.loads((path / "config.json").read_text())["config"]["steps"] == 20


def test_another_config_is_refused_and_nothing_overwritten(tmp_path):
    path = begun(tmp_path / "run")
    before = (path / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"holds another run: its optimizer.learning_rate is 0.1, here it is 0.2"):
        Workdir(path, {**CONFIG, "optimizer": {"learning_rate": 0.2}}, FREE)
    with pytest.raises(ValueError, match="another corpus .abc there, abd now."):
        begun(path, corpus="abd")
    assert (path / "config.json").read_bytes() == before


def test_a_folder_or_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        Workdir(tmp_path, CONFIG, FREE)
    with pytest.raises(ValueError, match="is a file"):
        Workdir(tmp_path / "notes.txt", CONFIG, FREE)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is not the config of a run"):
        Workdir(tmp_path, CONFIG, FREE)


def test_a_run_that_goes_on_with_other_versions_remembers_the_first(tmp_path):
    path = begun(tmp_path / "run")
    record = json.loads((path / "config.json").read_text())
    record["versions"]["jax"] = "0.0.1"
    (path / "config.json").write_text(json.dumps(record))
    begun(path)
    record = json.loads((path / "config.json").read_text())
    assert [v["jax"] for v in record["versions_before"]] == ["0.0.1"] and record["versions"]["jax"] != "0.0.1"
