"""The command `python -m parallax.bench`: its files, its table, going on after a stop, its errors."""

import contextlib
import json
import os
import pathlib
import runpy
import sys
import types

import pytest
from absl import app, flags

from parallax.benchmark import engine

ROOT = pathlib.Path(__file__).parents[2]
FILES = {"config.json", "runs.jsonl", "results.json", "results.md", "index.html"}
pytestmark = pytest.mark.filterwarnings("ignore:the load_module")          # in ml_collections


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "animals.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the quick brown fox", "a cat", "dogs")))
    return path


@pytest.fixture
def bench(tiny_folder, prompts, tmp_path, capsys, monkeypatch):
    """Runs the command in this process: (code, out, err)."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(ROOT)
    app.define_help_flags()

    def run(*arguments, model=tiny_folder, module="parallax.bench", output=tmp_path / "bench"):
        known = set(flags.FLAGS)
        monkeypatch.setattr(sys, "argv", ["bench", f"--model={model}", f"--prompts={prompts}", f"--output={output}",
                                          "--max_new_tokens=8", "--costs=false", *map(str, arguments)])
        capsys.readouterr()
        with contextlib.ExitStack() as stack:
            for name in ("parallax.bench", module, "config_config"):
                stack.callback(sys.modules.pop, name, None)
                sys.modules.pop(name, None)
            try:
                with pytest.raises(SystemExit) as end:
                    runpy.run_module(module, run_name="__main__")
            finally:
                for name in set(flags.FLAGS) - known:
                    delattr(flags.FLAGS, name)
                flags.FLAGS.unparse_flags()
        out, err = capsys.readouterr()
        return types.SimpleNamespace(code=end.value.code or 0, out=out, err=err)

    return run


def records(folder):
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_a_benchmark_from_end_to_end(bench, tmp_path, tiny_folder, prompts):
    result = bench("--methods=prompt_lookup,token_recycling", "--count=2", "--repeats=1")
    folder = tmp_path / "bench"
    assert result.code == 0 and {path.name for path in folder.iterdir()} == FILES
    assert "animals (2 prompts, 2 runs)" in result.out and "2 of 2" in result.out and "index.html" in result.out
    results = json.loads((folder / "results.json").read_text())
    assert [row["method"] for row in results["results"]] == ["autoregressive", "prompt_lookup", "token_recycling"]
    assert all(row["tokens"] == 16 and row["guarantee"] == "exact" for row in results["results"])
    assert results["results"][0]["tokens_per_forward"] == results["results"][0]["speedup"] == 1.0
    assert all(row["equal"]["same"] == 2 for row in results["results"][1:])
    assert len(results["by_prompt"]) == 6 and results["by_prompt"][-1]["index"] == [1]
    process = results["processes"][0]
    assert process["backend"] == "cpu" and process["config"]["num_layers"] == 2 and process["devices"] >= 1
    assert [len(results["settings"]["prompts"][str(prompts)]["sha256"])] == [64]
    page = (folder / "index.html").read_text()
    paths = page.replace(str(tiny_folder), "").replace(str(prompts), "")
    assert str(tiny_folder) in page and str(tmp_path) not in paths and str(ROOT) not in paths


def test_a_stopped_benchmark_goes_on_and_a_finished_one_only_writes_its_pages(bench, tmp_path, monkeypatch):
    arguments, folder = ("--methods=prompt_lookup", "--repeats=1"), tmp_path / "bench"
    measured, run = [], engine.Parallax.run

    def counted(self, prompts, row_ids, seed):
        result = run(self, prompts, row_ids, seed)
        measured.append((self.label, row_ids[0]))
        if stop and row_ids[0] == 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(engine.Parallax, "run", counted)
    stop = True
    result = bench(*arguments)
    assert result.code == 130 and "1 of 3 measurements are in" in result.err and "goes on there" in result.err
    assert not (folder / "index.html").exists()
    with (folder / "runs.jsonl").open("a") as file:
        file.write('{"unit": [0, 0, 1], "runs": {"autore')              # as a kill may leave it
    stop = False
    measured.clear()
    assert bench(*arguments).code == 0
    assert {row for _, row in measured} == {1, 2}
    rows = records(folder)
    assert [row["unit"] for row in rows if "unit" in row] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    assert len({row["process"] for row in rows if "unit" in row}) == 2
    assert "in 2 processes" in (folder / "results.md").read_text()
    pages = {name: (folder / name).read_bytes() for name in FILES}
    (folder / "index.html").unlink()
    measured.clear()
    result = bench(*arguments)
    assert result.code == 0 and measured == [] and "--overwrite measures anew" in result.err
    assert {name: (folder / name).read_bytes() for name in FILES} == pages
    refused = bench(*arguments, "--seed=5")
    assert refused.code == 2 and refused.err.count("\n") == 1 and "seed is 0 there and 5 here" in refused.err
    assert {name: (folder / name).read_bytes() for name in FILES} == pages
    assert bench(*arguments, "--seed=5", "--count=1", "--overwrite").code == 0
    assert [row["unit"] for row in records(folder) if "unit" in row] == [[0, 0, 0]]


def test_sampling_with_a_draft_model_keeps_the_law_or_the_tokens(bench, tmp_path, tiny_folder):
    result = bench(f"--draft={tiny_folder}", "--methods=draft_model", "--methods=draft_model:verifier=rejection",
                   "--temperature=0.9", "--batch_size=2", "--count=2", "--repeats=1", "--ignore_eos")
    assert result.code == 0, result.err
    follow, rejection = json.loads((tmp_path / "bench" / "results.json").read_text())["results"][1:]
    assert follow["guarantee"] == "exact" and follow["equal"]["same"] == 2 and follow["draft_forwards"] > 0
    assert rejection["guarantee"] == "distribution" and not rejection["equal"]["expected"]
    assert "law" in result.out


@pytest.mark.parametrize("arguments, message", [
    (["--methods=nothing"], "unknown method 'nothing'"),
    (["--method=prompt_lookup"], "unknown flag --method; did you mean 'methods'?"),
    (["--prompts=nope.jsonl"], "there is no prompt file 'nope.jsonl'"),
    (["--repeats=0"], "repeats must be at least 1"),
    (["--output=setup.cfg"], "setup.cfg is not a folder"),
    (["--config=nope"], "there is no config 'nope': expected a .py file or one of all, editing"),
    (["--config.repeat=3"], "the config has no key 'repeat'"),
    (["more.jsonl"], "unexpected argument 'more.jsonl'"),
    (["--model=nope"], "nope"),
    (["--max_new_tokens=999"], "animals.jsonl: prompt 0 has"),
])
def test_bad_input_ends_in_one_line_and_writes_nothing(bench, tmp_path, arguments, message):
    result = bench(*arguments)
    assert result.code == 2 and message in result.err.splitlines()[-1] and result.err.count("error: ") == 1
    assert not (tmp_path / "bench").exists() and result.out == ""


def test_help_lists_the_flags(bench):
    result = bench("--help")
    assert result.code == 0 and "--methods" in result.out + result.err


def test_further_engines_take_part(bench, tmp_path, monkeypatch):
    from benchmarks import engines
    monkeypatch.setattr(engines, "_installed", lambda name, *packages: f"{name} 1.0")
    monkeypatch.setattr(engines, "_llama_cpp", lambda gguf, lm, settings: lambda ids, count: [3] * count)
    gguf = tmp_path / "m.gguf"
    gguf.write_text("")
    result = bench(f"--gguf={gguf}", "--methods=autoregressive", "--count=1", "--repeats=1",
                   module="benchmarks.compare")
    assert result.code == 0, result.err
    other = json.loads((tmp_path / "bench" / "results.json").read_text())["results"][1]
    assert other["method"] == "llama.cpp 1.0" and other["guarantee"] is None and other["equal"]["same"] == 0
    assert other["equal"]["gap"] > 0 and os.path.exists(tmp_path / "bench" / "index.html")


def test_the_cost_model_is_measured_once_and_told(bench, tmp_path, monkeypatch):
    from parallax import costs
    calls = []
    monkeypatch.setattr(costs, "measure", lambda model, params, batch, rows: calls.append(rows) or costs.Costs(
        (1, *rows), (10.0, 15.0), batch))
    monkeypatch.setattr(costs, "draft_ms", lambda decoder, params, batch: 1.0)
    arguments = ("--methods=prompt_lookup", "--count=1", "--repeats=1", "--costs")
    result = bench(*arguments)
    assert result.code == 0 and calls == [(8,)]
    assert "prompt_lookup: " in result.out and "tokens per forward, but a block of" in result.out
    row = json.loads((tmp_path / "bench" / "results.json").read_text())["results"][1]
    assert row["expected_speedup"] > 0 and row["break_even"] >= 0
    assert all(row["why"] in (tmp_path / "bench" / name).read_text() for name in ("results.md", "index.html"))
    assert bench(*arguments).code == 0 and len(calls) == 1
