"""The conversion command, run as its users run it."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from parallax import checkpoint
from parallax.models.config import ModelConfig
from parallax.models.transformer import Model


def convert(*arguments):
    command = [sys.executable, "-m", "parallax.convert", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    config = ModelConfig(vocab_size=16, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
                         intermediate_size=8, max_positions=16)
    params = jax.tree.map(np.asarray, jax.jit(Model(config).init)(jax.random.key(0)))
    folder = tmp_path_factory.mktemp("source") / "model"
    checkpoint.save(checkpoint.Checkpoint(config, params, None, (3,)), folder)
    return folder


def test_it_writes_a_folder_and_says_what_it_did(source, tmp_path):
    result = convert(source, tmp_path / "out", "--dtype=float16", "--max_shard_gib=1e-6")
    assert result.returncode == 0, result.stderr
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    count = sum(leaf.size for leaf in jax.tree.leaves(checkpoint.load(source).params))
    assert result.stdout == f"{source}: llama, {count:,} parameters, {size:,} bytes written to {tmp_path / 'out'}\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"
    assert checkpoint.load(tmp_path / "out").eos_ids == (3,)


def test_a_destination_that_is_not_empty_needs_overwrite(source, tmp_path):
    (tmp_path / "mine.txt").touch()
    result = convert(source, tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and "is not empty" in result.stderr and result.stderr.count("\n") == 1
    assert convert(source, tmp_path, "--overwrite").returncode == 0
    assert not (tmp_path / "mine.txt").exists()


@pytest.mark.parametrize("arguments, reason", [
    (["one"], "expected SRC and DST, got 1 arguments"),
    (["smollm2", "out"], "did you mean 'smollm2-135m'"),
    (["./none", "out"], "not found"),
    (["a", "b", "--dtpye=float32"], "unknown flag --dtpye; did you mean 'dtype'"),
    (["a", "b", "--dtype=int4"], "--dtype=int4: value should be one of"),
    (["a", "b", "--overwrite=maybe"], "--overwrite=maybe: Non-boolean"),
])
def test_mistakes_are_one_line_and_exit_status_2(arguments, reason):
    result = convert(*arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and reason in result.stderr and result.stderr.count("\n") == 1


def test_help_shows_the_usage_and_does_not_wait_for_jax():
    assert "parallax.convert SRC DST" in convert("--help").stdout
    code = "import sys; from parallax import cli, convert; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
