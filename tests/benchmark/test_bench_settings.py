"""Configs and flags of a benchmark."""

import json
import pathlib
import runpy

import pytest
from ml_collections import ConfigDict

from parallax import prompts
from parallax.benchmark import defaults
from parallax.benchmark.settings import Contender, Prompts, contender, names, resolve
from parallax.decoding import METHODS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "ten.jsonl").write_text("".join(json.dumps(f"prompt {i}") + "\n" for i in range(10)))
    (tmp_path / "one.txt").write_text("a text")
    (tmp_path / "empty.jsonl").write_text("")


def settings(config=(), **given):
    return resolve(ConfigDict(dict(config)), given)


def test_without_anything_all_methods_run_on_the_built_in_prompt(capsys):
    found = settings()
    assert [c.name for c in found.contenders] == [name for name in METHODS if not METHODS[name].needs_draft]
    assert found.prompts == (Prompts("built-in", "built-in", (prompts.EDITING,), (0,)),)
    assert capsys.readouterr().err == "".join(f"{name} is left out: it needs a draft model, give one with --draft\n"
                                              for name in METHODS if METHODS[name].needs_draft)


def test_flags_win_over_the_config_and_that_over_the_defaults():
    found = settings(dict(repeats=5, seed=2, methods=("prompt_lookup",)), seed=4, chat=True)
    assert (found.repeats, found.seed, found.batch_size, found.chat) == (5, 4, 1, True)
    assert found.labels == ("autoregressive", "prompt_lookup")


def test_a_draft_model_brings_in_the_methods_that_need_one():
    assert "draft_model" in settings(draft="small").labels


def test_the_zoo_may_have_a_draft_model_for_the_model(monkeypatch):
    monkeypatch.setattr("parallax.zoo.draft_of", {"tiny": "tinier"}.get)
    found = settings(model="tiny")
    assert found.draft == "tinier" and "draft_model" in found.labels
    assert settings(model="tiny", draft="small").draft == "small"
    assert settings(model="tiny", methods=["prompt_lookup"]).draft == ""


@pytest.mark.parametrize("count, index", [(1, (0,)), (3, (0, 3, 6)), (10, tuple(range(10))), (50, tuple(range(10)))])
def test_prompts_are_taken_evenly(count, index):
    found = settings(prompts=["ten.jsonl"], count=count).prompts[0]
    assert found.index == index and found.texts == tuple(f"prompt {i}" for i in index)


def test_files_have_short_names_unless_two_share_one():
    assert [p.label for p in settings(prompts=["ten.jsonl", "one.txt"]).prompts] == ["ten", "one"]
    assert [p.label for p in settings(prompts=["ten.jsonl", "other/ten.jsonl"]).prompts] == ["ten.jsonl",
                                                                                            "other/ten.jsonl"]


@pytest.mark.parametrize("entry, expected", [
    ("prompt_lookup", Contender("prompt_lookup", "prompt_lookup")),
    ("prompt_lookup:draft_length=3", Contender("prompt_lookup draft_length=3", "prompt_lookup", {"draft_length": 3})),
    ({"name": "prompt_lookup", "options": {"draft_length": 3}, "label": "short"},
     Contender("short", "prompt_lookup", {"draft_length": 3})),
    ("draft_model:verifier=rejection", Contender("draft_model verifier=rejection", "draft_model", {}, "rejection")),
    ({"name": "draft_model", "verifier": "rejection"},
     Contender("draft_model verifier=rejection", "draft_model", {}, "rejection")),
])
def test_methods_are_texts_or_dicts(entry, expected):
    assert contender(entry) == expected


def test_the_description_says_what_is_measured(tmp_path):
    def described(**changes):
        return settings(**{"prompts": ["ten.jsonl"], "methods": ["prompt_lookup"], **changes}).describe()
    base = described()
    assert base == json.loads(json.dumps(base))
    assert base["methods"]["prompt_lookup"]["options"]["draft_length"] > 0
    others = [described(count=3), described(methods=["prompt_lookup:draft_length=2"]), described(temperature=0.5),
              described(chat=True), described(repeats=9), described(kernels="xla")]
    (tmp_path / "ten.jsonl").write_text(json.dumps("changed") + "\n")
    others.append(described())
    assert all(other != base for other in others)


def test_settings_of_the_sampler_are_passed_on_where_they_change_something():
    common = {"max_new_tokens", "ignore_eos", "temperature"}
    assert set(settings(prompts=["ten.jsonl"]).decoding) == common
    changes = dict(temperature=0.7, top_k=5, typical_p=0.9, repetition_penalty=1.1, logit_bias='{"5": 1}')
    ours = settings(prompts=["ten.jsonl"], top_p=1.0, min_p=0.0, **changes)
    assert ours.decoding == {**{name: ours.decoding[name] for name in common}, **changes}


@pytest.mark.parametrize("given, message", [
    (dict(methods=["prompt_lokup"]), "unknown method 'prompt_lokup': expected one of .*; did you mean 'prompt_lookup'"),
    (dict(methods=["prompt_lookup:lenght=3"]), "method 'prompt_lookup' has no option 'lenght'"),
    (dict(methods=["prompt_lookup:draft_length=0"]), "draft_length"),
    (dict(methods=["prompt_lookup:draft_length"]), "'prompt_lookup:draft_length' is no method with options"),
    (dict(methods=["prompt_lookup", "prompt_lookup"]), "the method 'prompt_lookup' is there twice"),
    (dict(methods=["prompt_lookup:verifier=rejection"]), "verifier 'rejection' needs drafts with a known law"),
    (dict(kernels="triton"), "unknown kernels 'triton': expected one of auto, xla, pallas"),
    (dict(methods=["prompt_lookup:verifier=reject"]), "unknown verifier 'reject'.*did you mean 'rejection'"),
    (dict(methods=["draft_model"]), "method 'draft_model' needs a draft model"),
    (dict(methods=["prompt_lookup"], draft="small"), "none of the methods uses the draft model 'small'"),
    (dict(prompts=["nope.jsonl"]), "there is no prompt file 'nope.jsonl'"),
    (dict(prompts=["empty.jsonl"]), "empty.jsonl is empty"),
    (dict(prompts=["ten.jsonl", "ten.jsonl"]), "the prompt file 'ten.jsonl' is there twice"),
    (dict(prompts=["ten.jsonl"], system="Be brief."), "a system message needs a chat"),
    (dict(count=0), "count must be at least 1, got 0"),
    (dict(repeats=-1), "repeats must be at least 1, got -1"),
    (dict(batch_size=0), "batch_size must be at least 1, got 0"),
    (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
    (dict(temperature=-1.0), "temperature"),
    (dict(typical_p=0.5), "change nothing at temperature 0"),
    (dict(logit_bias="5"), "logit_bias must be {token id: number}"),
    (dict(seed=-1), "seed must be from 0 to"),
])
def test_bad_flags_are_refused_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        settings(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config, message", [
    (dict(repeat=3), "the config has no key 'repeat': expected one of .*; did you mean 'repeats'"),
    (dict(prompts="ten.jsonl"), "the config's prompts must be of type tuple, got 'ten.jsonl'"),
    (dict(count=2.5), "the config's count must be of type int, got 2.5"),
    (dict(methods=({"name": "prompt_lookup", "option": {}},)), "has no key 'option'.*did you mean 'options'"),
    (dict(methods=(3,)), "a method must be a name or a dict with name and options, got 3"),
])
def test_bad_configs_are_refused_in_one_line(config, message):
    with pytest.raises(ValueError, match=message):
        settings(config)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "configs" / "bench").glob("*.py")))
def test_configs_run_as_they_stand_and_have_a_smoke_variant(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    get_config = runpy.run_path(f"configs/bench/{name}.py")["get_config"]
    full, smoke = resolve(get_config(), {}), resolve(get_config("smoke"), {})
    assert full.labels == smoke.labels and len(full.labels) > 1
    assert sum(len(p.texts) for p in smoke.prompts) * smoke.repeats * smoke.decoding["max_new_tokens"] <= 64
    with pytest.raises(ValueError, match="unknown variant 'smok'"):
        get_config("smok")


def test_the_config_of_all_methods_has_all_and_samples_with_each_verifier():
    get_config = runpy.run_path(str(ROOT / "configs" / "bench" / "all.py"))["get_config"]
    given = {"draft": "small", "prompts": ["ten.jsonl"]}
    assert [c.name for c in resolve(get_config(), given).contenders] == list(METHODS)
    sampled = resolve(get_config("sampled"), given)
    assert sampled.decoding["temperature"] == 0.8
    assert "draft_model verifier=rejection" in sampled.labels and "draft_model" in sampled.labels


def test_the_default_config_is_locked():
    with pytest.raises(AttributeError):
        defaults.get_config().nonsense = 1


@pytest.mark.parametrize("methods, message", [
    (["prompt_lookup:draft_length=abc"], "'draft_length' of method 'prompt_lookup' must be of type int, got 'abc'"),
    (["prompt_lookup:draft_length=7.5"], "must be of type int, got 7.5"),
    (["prompt_lookup:verifier=1"], "a method's verifier must be a text, got 1"),
    (({"name": "prompt_lookup", "label": 5},), "a method's label must be a text, got 5"),
], ids=str)
def test_options_of_another_type_are_refused(methods, message):
    with pytest.raises(ValueError, match=message):
        resolve(defaults.get_config(), {"methods": methods})


def test_a_model_that_was_replaced_at_its_path_is_another_benchmark(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    given = {"model": str(tmp_path / "model")}
    first = resolve(defaults.get_config(), given).describe()
    assert first == resolve(defaults.get_config(), given).describe()
    (tmp_path / "model" / "config.json").write_text("{ }")
    assert first != resolve(defaults.get_config(), given).describe()


def test_commas_and_colons_in_brackets_belong_to_the_option():
    text = "prompt_lookup, draft_model:tree=levels(4, 2, replacement=True):verifier=typical(epsilon=0.1, delta=0.2)"
    assert names("a:tree=static((0, 0), (1,)),b") == ["a:tree=static((0, 0), (1,))", "b"]
    plain, tree = names(text)
    assert plain == "prompt_lookup"
    assert contender("draft_model:draft_length=3:verifier=rejection") == Contender(
        "draft_model draft_length=3 verifier=rejection", "draft_model", {"draft_length": 3}, "rejection")
    assert tree == "draft_model:tree=levels(4, 2, replacement=True):verifier=typical(epsilon=0.1, delta=0.2)"
    found = contender(tree)
    assert (found.options, found.verifier) == ({"tree": "levels(4, 2, replacement=True)"},
                                               "typical(epsilon=0.1, delta=0.2)")
