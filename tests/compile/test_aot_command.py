"""`python -m parallax.aot`: what it refuses, and what it prints and writes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from parallax.compile import command, kernels, page, programs, schedule, targets

ROOT = pathlib.Path(__file__).parent.parent.parent
SETTINGS = dict(model="qwen3-0.6b", target=["v5e"], kernel=[], rows=[1, 8], tensor=1, batch=1, context=64,
                capacity=None, depth=8, dtype="bfloat16", kernel_choice="pallas", output=None, overwrite=False)
STEP = programs.Step("v5e", 1, None, arguments=10**9, temporary=10**6, least_bytes=10**9, accessed=1.1e9, flops=1e9,
                     least=1e-3, by="HBM", predicted=2e-3, kernels={"attention": 28})
REPORT = kernels.Report("attention", "v5e", 8, None, memory=2048, grid=4, bundles=100, used={"MXU": 0.5}, spills=3,
                        nbytes=10**6, flops=10**7, least=1e-6, by="HBM", scheduled=5e-7)


@pytest.fixture
def compilers_that_answer(monkeypatch):
    """Nothing is compiled; the tasks are kept."""
    tasks = []

    def compiled(given):
        tasks.extend(given)
        steps = [STEP._replace(target=task[-1].target.name, rows=task[-1].rows, predicted=2e-3 + task[-1].rows * 1e-4)
                 for task in given if task[0] is programs.compiled]
        return [REPORT._replace(kernel=task[1], target=task[-1].target.name, rows=task[-1].rows) for task in given
                if task[0] is kernels.compiled], steps

    monkeypatch.setattr(command, "_compiled", compiled)
    monkeypatch.setattr(targets, "check_installed", lambda target: None)
    return tasks


@pytest.mark.parametrize("changes, message", [
    (dict(target=["v5f"]), "unknown target 'v5f'"),
    (dict(model="qwen"), "unknown model 'qwen'"),
    (dict(rows=[0, 8]), "^--rows must be block sizes from 1 up, got 0,8$"),
    (dict(rows=[]), "^--rows must be block sizes from 1 up, got none$"),
    (dict(tensor=3), "^--tensor 3 does not divide the model's 8 key/value heads$"),
    (dict(kernel=["atention"]), r"unknown kernel 'atention': expected one of attention, .*did you mean 'attention'\?$"),
    (dict(kernel=["commit"], kernel_choice="xla"), "^--kernel compiles a Pallas kernel: leave --kernels xla out$"),
    (dict(target=["sm_90"], kernel_choice="xla"), "^for sm_90 only Pallas kernels are compiled"),
    (dict(output="/no/such/folder/x.json"), "cannot be written: expected a file in an existing folder$"),
    (dict(output=__file__), "exists: give another --json or add --overwrite$"),
])
def test_settings_that_do_not_fit_are_refused_before_anything_is_compiled(compilers_that_answer, changes, message):
    with pytest.raises(ValueError, match=message):
        command.aot(**SETTINGS | changes)
    assert not compilers_that_answer


@pytest.mark.parametrize("arguments, message", [
    (["--target=v5q"], "error: unknown target 'v5q'"),
    (["--rows=1,x"], "error: --rows must be block sizes from 1 up, got 'x'"),
    (["--taget=v5e"], "error: unknown flag --taget; did you mean 'target'?"),
])
def test_mistakes_end_in_one_line_and_status_2(arguments, message):
    ended = subprocess.run([sys.executable, "-m", "parallax.aot", *arguments], cwd=ROOT, capture_output=True, text=True,
                           env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith(message) and ended.stderr.count("\n") == 1


def test_a_tpu_gets_whole_steps_and_a_gpu_the_kernels_of_one(compilers_that_answer):
    assert command.aot(**SETTINGS | dict(target=["v5e", "sm_80"], rows=[8])) == 0
    found = [(task[0].__module__.rpartition(".")[2], task[-1].target.name, task[-1].rows, *task[1:-1])
             for task in compilers_that_answer]
    assert found == [("kernels", "sm_80", rows, name) for rows in (1, 8) for name in ("attention", "commit", "verify")
                     ] + [("programs", "v5e", rows) for rows in (1, 8)]


def test_kernels_alone_are_compiled_for_the_given_rows_only(compilers_that_answer):
    command.aot(**SETTINGS | dict(kernel=["commit", "draw", "commit"], rows=[8]))
    assert [task[1:-1] + (task[-1].rows,) for task in compilers_that_answer] == [("commit", 8), ("draw", 8)]


def test_settings_reach_the_jobs(compilers_that_answer):
    command.aot(**SETTINGS | dict(rows=[32], tensor=4, batch=3, context=100, depth=2, dtype="float32"))
    job = compilers_that_answer[-1][-1]
    assert (job.rows, job.batch, job.context, job.capacity, job.levels) == (32, 3, 100, 200, 2)
    assert (job.config.dtype, job.config.kernels, job.target.tensor) == ("float32", "pallas", 4)
    command.aot(**SETTINGS | dict(capacity=96, kernel_choice="xla"))
    job = compilers_that_answer[-1][-1]
    assert (job.capacity, job.config.kernels) == (96, "xla")


def test_all_figures_are_written_and_shown(compilers_that_answer, tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text("old")
    assert command.aot(**SETTINGS | dict(target=["v5e"], output=str(path), overwrite=True)) == 0
    found = json.loads(path.read_text())
    assert found["model"] == "qwen3-0.6b" and found["config"]["head_dim"] == 128 and found["chips"][0]["name"] == "v5e"
    assert [step["rows"] for step in found["programs"]] == [1, 8] and found["programs"][0]["accessed"] == 1.1e9
    shown = capsys.readouterr().out
    assert "Decode step on v5e" in shown and "1.100" in shown and "1.33" in shown      # 2.8 ms over 2.1 ms


def test_what_does_not_compile_ends_with_status_1_and_its_reason(monkeypatch, capsys):
    monkeypatch.setattr(targets, "check_installed", lambda target: None)
    failed = programs.Step("v5e", 8, "Ran out of memory in memory space hbm. Used 20G of 16G.")
    monkeypatch.setattr(command, "_compiled", lambda tasks: ([REPORT._replace(reason="no such op")], [STEP, failed]))
    assert command.aot(**SETTINGS) == 1
    shown = capsys.readouterr().out
    assert "v5e, T=8: Ran out of memory" in shown and "v5e, attention, T=8: no such op" in shown


def test_copies_of_the_cache_and_gathers_of_weights_are_told():
    lines = page.notes([targets.resolve("v5e")], [], [STEP._replace(cache_copies=["copy.1", "copy.2"],
                                                                    weight_gathers=["all-gather.1"])])
    assert lines[:2] == ["v5e, T=1: copies of the whole cache in each step: copy.1, copy.2",
                         "v5e, T=1: gathers of a weight that devices share in each step: all-gather.1"]


def test_kernels_have_the_shapes_of_one_device_and_what_they_move():
    job = command.Job(config=command.shapes.resolve("llama-3-8b").replace(dtype="bfloat16"),
                      target=targets.resolve("v5e", 4), rows=16, batch=2, context=1000, capacity=2000, depth=8)
    attention = kernels.CASES["attention"](job)
    assert [leaf.shape for leaf in attention.operands[:4]] == [(2, 2, 4, 16, 128), (2, 2, 16, 128), (2, 2, 16, 128),
                                                               (32, 2, 2, 2000, 128)]
    heads = 2 * 2 * 128 * 2                                                  # sequences, heads, dimensions, bytes
    assert attention.nbytes == heads * (2 * 1000 + 2 * 16 + 2 * 4 * 16)
    assert attention.flops == 2 * 2 * 2 * (2 * 4 * 16) * 1016 * 128
    assert attention.axis(((1, 2, 64, 128), (1, 1, 2, 512, 128))) == 2
    assert kernels.CASES["commit"](job).nbytes == 2 * 2 * 32 * heads * 9     # read and written, keys and values
    assert kernels.CASES["verify"](job).nbytes == 2 * 16 * 128256 * 4


def test_a_reports_time_is_that_of_its_schedule_shared_by_the_cores():
    plan = schedule.Schedule((2, None), ((1, 1, 2, 512, 128),), 1000, 100, (), 1750, True, {}, 0)
    job = command.Job(config=command.shapes.resolve("llama-3-8b").replace(dtype="bfloat16"),
                      target=targets.resolve("v5p"), rows=16, batch=1, context=2048, capacity=4096, depth=8)
    found = kernels.report("attention", job, 4096, plan)
    assert (found.grid, found.bundles, found.memory) == (8, 1750, 4096)
    assert found.scheduled == pytest.approx(4 * 1750 / 1.75e9)
    assert kernels.report("attention", job, 4096, None).scheduled is None
