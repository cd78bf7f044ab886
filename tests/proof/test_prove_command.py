"""The command `python -m parallax.prove`: what it takes, its errors, its exit status."""

import json
import pathlib
import runpy
import sys
import types

import pytest
from absl import app, flags

from parallax.proof import command, wanted

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def prove(monkeypatch, capsys):
    """Runs the command in this process: (code, out, err)."""
    monkeypatch.chdir(ROOT)
    app.define_help_flags()

    def run(*arguments):
        known = set(flags.FLAGS)
        monkeypatch.setattr(sys, "argv", ["prove", *map(str, arguments)])
        capsys.readouterr()
        sys.modules.pop("parallax.prove", None)
        try:
            with pytest.raises(SystemExit) as end:
                runpy.run_module("parallax.prove", run_name="__main__")
        finally:
            for name in set(flags.FLAGS) - known:
                delattr(flags.FLAGS, name)
            flags.FLAGS.unparse_flags()
        return types.SimpleNamespace(code=end.value.code or 0, **capsys.readouterr()._asdict())

    return run


@pytest.fixture
def asked(monkeypatch):
    """What the command would prove, in place of proving it."""
    calls = []
    monkeypatch.setattr(command, "prove", lambda **what: calls.append(what) or 0)
    return calls


@pytest.mark.parametrize("arguments, message", [
    (["--method=prompt_lokup"], "unknown method 'prompt_lokup': expected one of"),
    (["--method=prompt_lookup", "--verifier=folow"], "did you mean 'follow'?"),
    (["--method=prompt_lookup", "--options=draft_length=0"], "draft_length must be at least 1"),
    (["--method=prompt_lookup", "--options=length=3"], "has no option 'length'"),
    (["--method=prompt_lookup", "--verifier=rejection"], "needs drafts with a known law"),
    (["--options=draft_length=3"], "options without a method"),
    (["--config=prompt_lookup", "--method=prompt_lookup"], "give either it or them"),
    (["--config=nope"], "there is no config 'nope'"),
    (["--config=prompt_lookup:nope"], "cannot be read: ValueError: unknown variant 'nope'"),
    (["--temperature=0"], "temperature must be above 0"),
    (["--temperature=inf"], "temperature must be 0 (greedy) or from 1e-30 to 1e30, got inf"),
    (["--draft=tiny-python-draft"], "a draft model without a model"),
    (["--output=/nowhere/x.json", "--method=prompt_lookup"], "expected a file in an existing folder"),
    (["more"], "unexpected argument 'more'"),
    (["--metod=x"], "unknown flag --metod; did you mean 'method'?"),
])
def test_bad_input_is_one_line(prove, arguments, message):
    result = prove(*arguments)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and message in result.err


def test_without_a_choice_all_is_proven_with_the_controls(prove, asked):
    assert prove("--quick").code == 0
    assert asked[0]["subjects"] is None and asked[0]["controls"] and asked[0]["quick"]
    assert {"follow", "rejection"} <= set(asked[0]["rule_texts"])


def test_a_method_is_proven_with_its_options_and_the_rule_by_itself(prove, asked):
    prove("--method=draft_model", "--options=draft_length=2", "--verifier=rejection", "--temperature=1.5", "--controls")
    (subject,) = asked[0]["subjects"]
    assert (subject.method, subject.options, subject.verifier) == ("draft_model", {"draft_length": 2}, "rejection")
    assert subject.sampling == {"temperature": 1.5} and asked[0]["rule_texts"] == ["rejection"] and asked[0]["controls"]


def test_configs_say_what_they_decode_with(prove, asked):
    prove("--config=prompt_lookup", "--config=draft_model:rejection", "--all")
    assert asked[0]["subjects"] is None                                     # --all takes them all
    prove("--config=prompt_lookup", "--config=draft_model:rejection")
    first, second = asked[1]["subjects"]
    assert first.method == "prompt_lookup" and first.sampling == {"temperature": 0.8}
    assert second.verifier == "rejection" and asked[1]["rule_texts"] == ["follow", "rejection"]
    assert not asked[1]["controls"]


def test_settings_that_differ_between_sequences_are_refused(tmp_path):
    config = tmp_path / "lists.py"
    config.write_text("from parallax.decoding import defaults\ndef get_config():\n"
                      "    config = defaults.get_config('prompt_lookup').unlock()\n"
                      "    with config.ignore_type():\n"
                      "        config.temperature = (0.5, 1.0)\n    return config\n")
    with pytest.raises(ValueError, match="temperature"):
        wanted.from_config(str(config))


def test_a_true_claim_ends_with_status_0_and_a_file(prove, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = tmp_path / "proof.json"
    monkeypatch.setattr(command, "plan", lambda subjects, quick: list(_PLAN(subjects, True))[:2])
    result = prove("--method=autoregressive", "--quick", f"--output={output}")
    assert result.code == 0 and "proven" in result.out and "6 of 6" in result.out
    told = json.loads(output.read_text())
    assert told["passed"] and told["limits"]["tv"] == 1e-9 and {r["check"] for r in told["records"]} >= {"greedy"}
    again = prove("--method=autoregressive", f"--output={output}")
    assert again.code == 2 and "add --overwrite" in again.err


_PLAN = command.plan
