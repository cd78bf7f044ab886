"""The command `python -m parallax.decode`: its text, its table, its files and its errors."""

import contextlib
import gzip
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest
import safetensors.numpy
from absl import app, flags
from jax.experimental.compilation_cache import compilation_cache

from parallax import generate, prompts, report, zoo
from parallax.decoding import METHODS

ROOT = pathlib.Path(__file__).parents[1]
PROMPT = "the quick brown fox"
SHORT = ("--max_new_tokens=8",)
OWN = """
import ml_collections

def get_config():
    return ml_collections.ConfigDict({})
"""
DEFAULTS = """
from parallax.decoding import defaults

def get_config():
    config = defaults.get_config()
    {}
    return config
"""
pytestmark = pytest.mark.filterwarnings("ignore:the load_module")          # in ml_collections


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A place for compiled programs, which the command keeps between runs; JAX's own settings come back at the end."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], None)
    compilation_cache.reset_cache()             # JAX looks once per process whether there is one
    yield tmp_path_factory.mktemp("cache")
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def decode(tiny_folder, cache, capsys, monkeypatch):
    """Runs the command in this process, on the tiny model unless told otherwise: (code, out, err)."""
    monkeypatch.setenv("PARALLAX_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(ROOT)
    app.define_help_flags()                     # absl's own flags stay, the command's are taken back after each run

    def run(*arguments, model=tiny_folder, stdin=os.devnull):
        known = set(flags.FLAGS)
        arguments = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["decode", *([f"--model={model}"] if model else []), *arguments])
        capsys.readouterr()
        with open(stdin) as file, contextlib.ExitStack() as stack:
            monkeypatch.setattr(sys, "stdin", file)
            for name in ("parallax.decode", "config_config"):
                stack.callback(sys.modules.pop, name, None)
                sys.modules.pop(name, None)
            try:
                with pytest.raises(SystemExit) as end:
                    runpy.run_module("parallax.decode", run_name="__main__")
            finally:
                for name in set(flags.FLAGS) - known:
                    delattr(flags.FLAGS, name)
                flags.FLAGS.unparse_flags()
        out, err = capsys.readouterr()
        return types.SimpleNamespace(code=end.value.code or 0, out=out, err=err)

    return run


@pytest.fixture(scope="module")
def expected(tiny_lm):
    """What 8 greedy tokens of plain decoding are as text."""
    def text(prompt, **settings):
        return tiny_lm.generate([prompt], method="autoregressive", **{"max_new_tokens": 8, **settings}
                                ).completions[0].text
    return text


def cells(err):
    """The table as {row: [cells]}."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in err.splitlines() if line.startswith("│")]
    return {name: rest for name, *rest in lines}


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_text_goes_to_stdout_and_the_table_to_stderr(decode, expected):
    result = decode("--prompt", PROMPT, *SHORT)
    assert result.code == 0
    assert result.out == expected(PROMPT) + "\n"
    table = cells(result.err)
    assert table["guarantee"] == ["exact"] and table["tokens"] == ["8"] and "prompt_lookup" in result.err
    assert "speedup (decode)" not in table


def test_a_second_process_finds_the_programs_compiled(decode, cache):
    decode("--prompt", PROMPT, *SHORT)
    kept = sorted((cache / "compiled").iterdir())
    decode("--prompt", "a cat", *SHORT)
    assert kept and sorted((cache / "compiled").iterdir()) == kept


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.often("autoregressive|prompt_lookup|draft_model")
def test_compare_says_whether_the_tokens_are_those_of_plain_decoding(method, decode, tiny_folder):
    draft = [f"--draft={tiny_folder}"] if METHODS[method].needs_draft else []
    result = decode("--prompt", PROMPT, "--method", method, "--compare", *draft, *SHORT)
    table = cells(result.err)
    if method == "autoregressive":
        assert "tokens equal" not in table and table["tokens per forward"] == ["1.00"]
    else:
        assert table["tokens equal"] == ["yes", "-"] and table["tokens"] == ["8", "8"]
        assert table["speedup (decode)"][1] == "1.00x"
        assert re.search(r"\n\d\.\d\d tokens per forward, but a block of .* expected \d+\.\d\dx; .* loses", result.err)


def test_a_draft_model_writes_ahead_and_is_in_the_records(decode, expected, tiny_folder, tmp_path):
    rows = {}
    for verifier in ("follow", "rejection"):
        output = tmp_path / f"{verifier}.jsonl"
        result = decode("--config=draft_model:smoke", "--draft", tiny_folder, "--verifier", verifier, "--compare",
                        "--config.options.draft_length=3", "--temperature=0.9", "--prompt", PROMPT, "--output", output,
                        *SHORT)
        assert result.code == 0, result.err
        rows[verifier], = records(output)
        assert (rows[verifier]["draft"], rows[verifier]["verifier"]) == (str(tiny_folder), verifier)
        assert (rows[verifier]["target_forwards"], rows[verifier]["draft_forwards"]) == (2, 6)   # all drafts are right
    assert (rows["follow"]["guarantee"], rows["rejection"]["guarantee"]) == ("exact", "distribution")
    assert rows["follow"]["text"] == expected(PROMPT, temperature=0.9) != rows["rejection"]["text"]


def test_the_zoo_may_name_the_draft_model(decode, tiny_folder, tmp_path, monkeypatch):
    entry = zoo.Shipped(what="", licence="", size="", draft="tiny-draft")
    monkeypatch.setattr(zoo, "SHIPPED", tmp_path)
    for name in ("tiny", "tiny-draft"):
        monkeypatch.setitem(zoo.MODELS, name, entry)
        shutil.copytree(tiny_folder, tmp_path / name)
    for name, draft in (("draft_model", "tiny-draft"), ("autoregressive", None)):
        output = tmp_path / f"{name}.jsonl"
        result = decode("--method", name, "--prompt", PROMPT, "--output", output, *SHORT, model="tiny")
        assert result.code == 0, result.err
        assert records(output)[0]["draft"] == draft


@pytest.mark.parametrize("settings", [
    dict(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=5),
    dict(temperature=0.9, typical_p=0.9, epsilon_cutoff=0.001, eta_cutoff=0.001, seed=5),
    dict(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5, logit_bias='{"70": 3}'),
], ids=["truncation", "cutoffs", "penalties"])
def test_settings_reach_the_sampler(settings, decode, expected):
    result = decode("--prompt", PROMPT, *SHORT, *(f"--{name}={value}" for name, value in settings.items()))
    assert result.out == expected(PROMPT, **settings) + "\n" != expected(PROMPT) + "\n"


def test_a_lossy_rule_is_labelled_where_it_is_shown_and_kept(decode, tmp_path):
    result = decode("--prompt", PROMPT, "--verifier=typical(epsilon=0.1)", "--output", tmp_path / "out.jsonl", *SHORT)
    row, = records(tmp_path / "out.jsonl")
    assert cells(result.err)["guarantee"] == ["lossy"] and row["guarantee"] == "lossy"
    assert row["verifier"] == "typical(epsilon=0.1)"


def test_a_stop_string_ends_the_text(decode, expected):
    text = expected(PROMPT)
    result = decode("--prompt", PROMPT, "--stop", "never", "--stop", text[2:5], *SHORT)
    assert result.out == text[:2] + "\n"


def test_chat_wraps_the_prompt_with_its_system_message(decode, tmp_path):
    decode("--prompt", "hi", "--chat", "--system", "Be brief.", "--output", tmp_path / "out.jsonl", *SHORT)
    row, = records(tmp_path / "out.jsonl")
    assert row["prompt"] == "hi" and row["chat"] is True and row["system"] == "Be brief."
    text = zoo.load(row["model"]).tokenizer.decode(row["prompt_ids"])
    assert text == "[system] Be brief.\n[user] hi\n[assistant] "


LAYOUTS = {
    "own": {"prompt": PROMPT, "max_tokens": 3},
    "HumanEval": {"task_id": "HumanEval/0", "prompt": PROMPT, "entry_point": "f", "test": "assert f"},
    "GSM8K": {"question": PROMPT, "answer": "#### 4"},
    "MT-bench": {"question_id": 81, "category": "writing", "turns": [PROMPT, "Now shorter."]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_jsonl_files_of_the_known_layouts_give_one_completion_per_line(layout, decode, expected, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(LAYOUTS[layout]) + "\n\n" + json.dumps({"prompt": "a cat"}) + "\n")
    result = decode("--prompts", file, *SHORT)
    assert result.out == (f"--- prompt 1 of 2\n{expected(PROMPT)}\n--- prompt 2 of 2\n{expected('a cat')}\n")


@pytest.mark.slow
def test_prompts_decoded_together_follow_one_another(decode, expected, tmp_path):
    file = tmp_path / "in.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(json.dumps({"text": text}) for text in (PROMPT, "a cat")).encode()))
    result = decode("--prompts", file, "--batch_size=2", "--compare", *SHORT)
    assert result.out == (f"--- prompt 1 of 2\n{expected(PROMPT)}\n--- prompt 2 of 2\n{expected('a cat')}\n")
    assert cells(result.err)["tokens equal"] == ["all 2", "-"]


def test_a_text_file_is_one_prompt(decode, expected, tmp_path):
    (tmp_path / "in.txt").write_text(PROMPT)
    assert decode("--prompts", tmp_path / "in.txt", *SHORT).out == expected(PROMPT) + "\n"
    assert decode(*SHORT, stdin=tmp_path / "in.txt").out == expected(PROMPT) + "\n"


def test_a_prompt_can_be_piped_in(tiny_folder, cache, expected):
    result = process("--model", tiny_folder, *SHORT, cache=cache, stdin=PROMPT)
    assert result.returncode == 0 and result.stdout == expected(PROMPT) + "\n"
    assert "tokens per forward" in result.stderr


def test_without_a_prompt_it_edits_the_built_in_code(decode, monkeypatch):
    monkeypatch.setattr(prompts, "EDITING", "hi")
    seen = {}
    whole = generate.LanguageModel.generate

    def spy(self, texts, **settings):
        seen.update(settings, texts=texts)
        return whole(self, texts, **settings)

    monkeypatch.setattr(generate.LanguageModel, "generate", spy)
    assert decode(*SHORT).code == 0
    assert seen["texts"] == ["hi"] and seen["chat"] and seen["method"] == "prompt_lookup"


def test_the_output_file_has_all_that_a_completion_came_from(decode, expected, tiny_folder, tmp_path):
    output = tmp_path / "out.jsonl"
    result = decode("--prompt", PROMPT, "--output", output, "--seed=3", "--config.options.draft_length=4", *SHORT)
    row, = records(output)
    assert result.code == 0 and result.out == row["text"] + "\n" and os.listdir(tmp_path) == ["out.jsonl"]
    assert row["text"] == expected(PROMPT) and len(row["ids"]) == 8 and row["finish"] == "length"
    wanted = {"prompt": PROMPT, "model": str(tiny_folder), "method": "prompt_lookup", "guarantee": "exact", "seed": 3,
              "max_new_tokens": 8, "batch_size": 1, "temperature": 0.0, "top_p": 1.0, "stop": [], "chat": False,
              "options": {"draft_length": 4, "max_ngram": 4, "min_ngram": 2, "prefer": "last"}}
    assert {name: row[name] for name in wanted} == wanted
    assert row["target_forwards"] + row["accepted"] >= 8


def test_an_existing_output_is_refused_before_any_work_and_replaced_on_request(decode, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")
    result = decode("--prompt", PROMPT, "--output", output, model="/nowhere/to/be/found")
    assert result.code == 2 and result.err == f"error: {output} exists: give another --output or add --overwrite\n"
    assert output.read_text() == "mine\n"
    assert decode("--prompt", PROMPT, "--output", output, "--overwrite", *SHORT).code == 0
    assert records(output)[0]["prompt"] == PROMPT


def test_a_failed_run_leaves_the_old_output_alone(decode, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    output.write_text("mine\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.JsonLines, "write", full)
    result = decode("--prompt", PROMPT, "--output", output, "--overwrite", *SHORT)
    assert result.code == 2 and result.err == "error: [Errno 28] No space left on device\n"
    assert output.read_text() == "mine\n" and os.listdir(tmp_path) == ["out.jsonl"]


@pytest.mark.parametrize("name", ["prompt_lookup", "sampling", "token_recycling"])
@pytest.mark.parametrize("form", ["configs/decode/{}.py", "{}"])
def test_configs_run_by_path_and_by_bare_name(form, name, decode, tmp_path):
    output = tmp_path / "out.jsonl"
    result = decode("--config", form.format(name) + ":smoke", "--prompt", PROMPT, "--config.max_new_tokens=8",
                    "--output", output)
    row, = records(output)
    assert result.code == 0 and row["max_new_tokens"] == 8
    assert row["method"] == ("token_recycling" if name == "token_recycling" else "prompt_lookup")
    assert row["temperature"] == (0.7 if name == "sampling" else 0.0)


def test_flags_win_over_overrides_and_these_over_the_config(decode, tmp_path):
    output = tmp_path / "out.jsonl"
    decode("--config.seed=4", "--config.options.nodes=5", "--config=token_recycling:smoke", "--seed", "6",
           "--prompt", PROMPT, "--output", output, "--config.temperature", "0.5")
    row, = records(output)
    assert (row["seed"], row["temperature"], row["max_new_tokens"]) == (6, 0.5, 16)
    assert row["options"] == {"nodes": 5, "max_depth": 6, "ranks": 8, "learn_prompt": True}


def test_the_method_can_be_named_in_every_way(decode, tmp_path):
    for i, words in enumerate([["--method=token_recycling"], ["-method", "token_recycling"],
                               ["--config.method=token_recycling"],
                               ["--method=autoregressive", "--method=token_recycling"],
                               ["--prompt=say --method=none", "--method=token_recycling"]]):
        output = tmp_path / f"{i}.jsonl"
        result = decode("--prompt=hi", *words, "--output", output, "--config.options.nodes=12", *SHORT)
        assert result.code == 0, result.err
        assert records(output)[0]["method"] == "token_recycling"


def test_a_config_of_ones_own_needs_only_what_differs(decode, tmp_path):
    (tmp_path / "mine.py").write_text(OWN.format({"max_new_tokens": 8, "temperature": 1, "options": {"nodes": 5}}))
    result = decode("--config", tmp_path / "mine.py", "--method=token_recycling", "--prompt", PROMPT)
    assert result.code == 0 and cells(result.err)["tokens"] == ["8"]


def test_methods_are_listed_without_a_model(decode):
    result = decode("--method", "help", model=None)
    assert result.code == 0 and result.err == "" and all(name in result.out for name in METHODS)


def process(*arguments, cache, stdin="", code=None):
    command = [sys.executable, *(("-c", code) if code else ("-m", "parallax.decode")), *map(str, arguments)]
    environment = {**os.environ, "PARALLAX_CACHE": str(cache)}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_help_answers_at_once(cache):
    began = time.perf_counter()
    result = process("--help", cache=cache)
    assert time.perf_counter() - began < 1
    assert "Usage: python -m parallax.decode" in result.stdout and "--max_new_tokens" in result.stdout
    code = ("import runpy, sys\n"
            "try: runpy.run_module('parallax.decode', run_name='__main__', alter_sys=True)\n"
            "finally: print('heavy:', {'jax', 'rich', 'tokenizers'} & set(sys.modules))")
    result = process("--help", cache=cache, code=code)
    assert result.stdout.endswith("heavy: set()\n") and "--max_new_tokens" in result.stdout


def test_a_reader_that_goes_away_is_no_error(tiny_folder, cache):
    command = [sys.executable, "-m", "parallax.decode", "--model", str(tiny_folder), "--prompt", PROMPT, *SHORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                          env={**os.environ, "PARALLAX_CACHE": str(cache)}) as child:
        child.stdout.close()
        err = child.stderr.read()
    assert child.returncode == 1 and err == ""


def fails(result, *messages):
    """Exit status 2, one line on stderr with these messages, nothing on stdout."""
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and result.err.endswith("\n"), result.err
    for message in messages:
        assert message in result.err


@pytest.mark.parametrize("arguments, messages", [
    (["--method=prompt_lokup"], ["unknown method 'prompt_lokup': expected one of autoregressive,", "'prompt_lookup'?"]),
    (["--model=smollm2-135"], ["unknown model 'smollm2-135'", "did you mean 'smollm2-135m'?"]),
    (["--model=./nowhere"], ["./nowhere not found: expected an existing Hugging Face folder or .gguf file"]),
    (["--model=nowhere.gguf"], ["nowhere.gguf not found"]),
    (["--promt=x"], ["unknown flag --promt", "did you mean 'prompt'?"]),
    (["junk"], ["unexpected argument 'junk': give the prompt with --prompt"]),
    (["--seed=abc"], ["--seed=abc", "invalid literal for int()"]),
    (["--temperature=warm"], ["--temperature=warm"]),
    (["--chat=maybe"], ["--chat=maybe", "Non-boolean"]),
    (["--max_new_tokens"], ["Missing value for flag --max_new_tokens"]),
    (["--max_new_tokens=0"], ["max_new_tokens must be at least 1, got 0"]),
    (["--batch_size=0"], ["batch_size must be at least 1, got 0"]),
    (["--temperature=-1"], ["temperature must be 0 (greedy) or from 1e-30 to 1e30, got -1.0"]),
    (["--temperature=1", "--top_k=-1"], ["top_k must be a whole number of tokens, 0 for all, got -1"]),
    (["--temperature=1", "--top_p=2"], ["top_p must be in (0, 1], got 2.0"]),
    (["--temperature=1", "--min_p=2"], ["min_p must be in [0, 1], got 2.0"]),
    (["--temperature=1", "--typical_p=0"], ["typical_p must be in (0, 1], got 0.0"]),
    (["--typical_p=0.5"], ["change nothing at temperature 0 (greedy): set a temperature"]),
    (["--repetition_penalty=0"], ["repetition_penalty must be from 1e-6 to 1e6, 1 for none, got 0.0"]),
    (["--logit_bias=5"], ["logit_bias must be {token id: number}, as in {\"50256\": -100}, got 5"]),
    (["--verifier=typical(epsilon=2)"], ["epsilon must be in [0, 1], got 2"]),
    (["--seed=99999999999999999999"], ["seed must be a number of 32 bits"]),
    (["--method=draft_model"], ["method 'draft_model' needs a draft model", "(--draft on the command line)"]),
    (["--draft=x"], ["'prompt_lookup' uses no draft model, but one was given: expected method draft_model"]),
    (["--method=draft_model", "--draft=nowhere"], ["unknown model 'nowhere'"]),
    (["--kernels=palas"], ["unknown kernels 'palas': expected one of auto, xla, pallas; did you mean 'pallas'?"]),
    (["--verifier=follw"], ["unknown verifier 'follw': expected one of follow, rejection", "did you mean 'follow'?"]),
    (["--verifier=rejection"], ["those of 'prompt_lookup' have none: expected method draft_model", "follow"]),
    (["--config.options.model=x"], ["no key 'options.model'"]),
    (["--config=draft_model:fast"], ["unknown variant 'fast': expected smoke or rejection"]),
    (["--stop="], ["a stop string is empty"]),
    (["--prompt="], ["the prompt is empty"]),
    (["--prompts=x.txt"], ["both --prompt and --prompts were given"]),
    (["--max_new_tokens=256"], ["together more than the model's 256 positions"]),
    (["--output=/nowhere/out.jsonl"], ["/nowhere/out.jsonl cannot be written: expected a file in an existing folder"]),
    (["--config"], ["--config needs a file"]),
    (["--config=promptlookup"], ["there is no config 'promptlookup'", "prompt_lookup, sampling", "'prompt_lookup'?"]),
    (["--config=sampling:smok"], ["unknown variant 'smok': expected smoke"]),
    (["--config=sampling", "--method=token_recycling"],
     ["--method token_recycling contradicts the config, which is for prompt_lookup: give only one"]),
    (["--config.sed=3"], ["the config has no key 'sed': expected one of batch_size,", "did you mean 'seed'?"]),
    (["--config.options.draft_lenght=3"], ["no key 'options.draft_lenght'", "did you mean 'options.draft_length'?"]),
    (["--config.seed.x=3"], ["the config has no key 'seed.x'", "did you mean 'seed'?"]),
    (["--config.seed=abc"], ["--config.seed=abc"]),
    (["--config.options.draft_length=0"], ["draft_length must be at least 1, got 0"]),
    (["--config.options.prefer=middle"], ["prefer must be 'last' or 'first', got 'middle'"]),
])
def test_mistakes_on_the_command_line_are_one_line(arguments, messages, decode):
    fails(decode("--prompt", PROMPT, *arguments), *messages)


@pytest.mark.parametrize("name, content, messages", [
    ("in.txt", b"", ["in.txt is empty: it must hold at least one prompt"]),
    ("in.jsonl", b"\n \n", ["in.jsonl is empty"]),
    ("in.txt", b"caf\xe9", ["in.txt is not UTF-8 text (byte 3): convert it first"]),
    ("in.jsonl", b'{"prompt": "a"}\n{"promt": "b"}\n', ["in.jsonl:2 has no prompt", "did you mean 'prompt'?"]),
    ("in.jsonl", b'{"prompt": "a"}\nhello\n', ["in.jsonl:2 is not JSON"]),
    ("in.jsonl", b'{"prompt": ""}\n', ["in.jsonl:1 has an empty prompt in field 'prompt'"]),
    ("in.jsonl.gz", b"not zipped", ["in.jsonl.gz is not a whole gzip file"]),
    ("in.txt", b"the cat sat " * 200, ["prompt 0 has", "together more than the model's 256 positions: shorten"]),
])
def test_bad_prompt_files_are_one_line(name, content, messages, decode, tmp_path):
    (tmp_path / name).write_bytes(content)
    fails(decode("--prompts", tmp_path / name, "--output", tmp_path / "out.jsonl", *SHORT), *messages)
    assert os.listdir(tmp_path) == [name]


def test_a_missing_prompt_file_is_one_line(decode, tmp_path):
    fails(decode("--prompts", tmp_path / "none.txt"), "there is no prompt file", "none.txt")


@pytest.mark.parametrize("content, message", [(b"", "standard input is empty"), (b" \n", "standard input is empty"),
                                              (b"caf\xe9", "standard input is not UTF-8 text (byte 3)")])
def test_bad_standard_input_is_one_line(content, message, decode, tmp_path):
    (tmp_path / "in").write_bytes(content)
    fails(decode(stdin=tmp_path / "in"), message)


@pytest.mark.parametrize("text, messages", [
    (DEFAULTS.format("config.sed = 3"), ["bad.py: the config has no key 'sed'; did you mean 'seed'?"]),
    (DEFAULTS.format("config.seed = 'three'"), ["the config cannot be read: TypeError: ", "'seed'"]),
    (DEFAULTS.format("1 / 0"), ["bad.py cannot be read: ZeroDivisionError"]),
    (OWN.format({"sed": 3}), ["the config has no key 'sed': expected one of", "did you mean 'seed'?"]),
    (OWN.format({"method": "lookup_prompt"}), ["unknown method 'lookup_prompt': expected one of autoregressive"]),
    (OWN.format({"options": {"max_ngrams": 3}}), ["no key 'options.max_ngrams'", "did you mean 'options.max_ngram'?"]),
    (OWN.format({"options": {"max_ngram": "3"}}), ["the config's options.max_ngram must be of type int, got '3'"]),
    (OWN.format({"options": 3}), ["the config's options must be a ConfigDict, got 3"]),
    (OWN.format({"max_new_tokens": "8"}), ["the config's max_new_tokens must be of type int, got '8'"]),
    (OWN.format({"chat": 1}), ["the config's chat must be of type bool, got 1"]),
    (OWN.format({"stop": "END"}), ["the config's stop must be of type tuple, got 'END'"]),
    ("def get_config():\n    return {}\n", ["bad.py: get_config() must return a ConfigDict, got {}"]),
    ("import ml_collections\n", ["bad.py cannot be read: AttributeError", "no attribute 'get_config'"]),
    ("import nowhere_to_be_found\n", ["bad.py cannot be read: ModuleNotFoundError"]),
    ("def get_config(:\n", ["bad.py cannot be read: SyntaxError"]),
])
def test_bad_config_files_are_one_line(text, messages, decode, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    fails(decode("--config", tmp_path / "bad.py", "--prompt", PROMPT), *messages)


@pytest.fixture
def damaged(tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("name, message", [("config.json", "config.json not found"),
                                           ("model.safetensors", "has no *.safetensors"),
                                           ("tokenizer.json", "this checkpoint has no tokenizer")])
def test_a_checkpoint_with_a_missing_file_is_one_line(name, message, decode, damaged):
    (damaged / name).unlink()
    fails(decode("--prompt", PROMPT, model=damaged), message)


@pytest.mark.parametrize("name, message", [("config.json", "the file is damaged or incomplete"),
                                           ("model.safetensors", "is damaged or incomplete"),
                                           ("tokenizer.json", "cannot read")])
def test_a_truncated_checkpoint_is_one_line(name, message, decode, damaged):
    data = (damaged / name).read_bytes()
    (damaged / name).write_bytes(data[:len(data) // 2])
    fails(decode("--prompt", PROMPT, model=damaged), message, name)


def test_a_model_that_computes_no_numbers_is_one_line_and_writes_nothing(decode, damaged, tmp_path):
    weights = safetensors.numpy.load_file(damaged / "model.safetensors")
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    safetensors.numpy.save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    output = tmp_path / "out.jsonl"
    fails(decode("--prompt", PROMPT, "--output", output, *SHORT, model=damaged), "logits that are not finite numbers")
    assert not output.exists()


def test_a_chat_needs_a_template(decode, damaged):
    settings = json.loads((damaged / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (damaged / "tokenizer_config.json").write_text(json.dumps(settings))
    fails(decode("--prompt", PROMPT, "--chat", model=damaged), "no chat template: pass the prompt as plain text")
