"""`python -m parallax.train` on a small corpus, in a process of its own that can be killed."""

import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from parallax.train import defaults
from parallax.train.checkpoints import read_params

_ROOT = pathlib.Path(__file__).parent.parent.parent
STEPS = 24


def small_config(texts: pathlib.Path, **changes):
    """Next-token training of a tiny target on a folder of texts, for 12 steps."""
    config = defaults.get_config()
    config.data.source, config.data.held_out = (str(texts),), 0.2
    config.model.update(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32,
                        max_positions=64)
    config.update(sequence_length=32, batch_size=4, steps=12, log_every=2, eval_every=6, checkpoint_every=4,
                  eval_batches=2, eval_prompts=2, eval_prompt_length=4, eval_new_tokens=8)
    config.optimizer.warmup = 2
    config.update(changes)
    return config


class Ended(NamedTuple):
    status: int
    log: str


def train(workdir: pathlib.Path, texts: pathlib.Path, *more: str, devices: int = 1,
          watch: Callable[[subprocess.Popen, str], object] | None = None) -> Ended:
    """Runs to the end; `watch(process, log so far)` is called every two milliseconds and may kill it.

    All runs share what they compile, as a user's would who sets the same variables.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    shared = {"JAX_COMPILATION_CACHE_DIR": str(texts.parent / "compiled"), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
              "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PARALLAX_CACHE": str(texts.parent / "cache")}
    options = dict(data__source=texts, steps=STEPS, log_every=1, eval_every=12, checkpoint_every=4,
                   model__hidden_size=16, model__intermediate_size=32, sequence_length=32, accumulate=2,
                   optimizer__ema=0.9)
    command = [sys.executable, "-m", "parallax.train", "--config", "tiny_target:smoke", "--workdir", str(workdir),
               *(f"--config.{name.replace('__', '.')}={value}" for name, value in options.items()), *more]
    log = workdir.with_name(workdir.name + ".log")
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **shared}, stdout=file, stderr=file)
        while process.poll() is None:
            if watch is not None:
                watch(process, log.read_text())
            time.sleep(0.002)
    return Ended(process.returncode, log.read_text())


def figures(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, without what differs between two runs of the same program."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if "per_second" not in name} for line in lines]


def outcome(workdir: pathlib.Path) -> dict[str, object]:
    """All that a run leaves and that another run of the same config must leave to the bit."""
    digest = lambda data: hashlib.sha256(data).hexdigest()                                          # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(read_params(workdir))
    return {"params": {jax.tree_util.keystr(path): digest(np.asarray(leaf).tobytes()) for path, leaf in leaves},
            "export": digest((workdir / "export" / "model.safetensors").read_bytes()),
            "figures": figures(workdir),
            "checkpoints": sorted(item.name for item in (workdir / "checkpoints").iterdir())}
