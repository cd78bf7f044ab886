"""Trains a model, or lets one write training text, as a config file says; run it again to go on where it stopped.

Usage: python -m parallax.train --config FILE[:VARIANT] [--workdir DIR] [--config.KEY=VALUE ...]

FILE is a path or a name from configs/train. DIR (default: runs/NAME) holds the resolved config, checkpoints, metrics
and in the end `export`, a Hugging Face folder that `python -m parallax.decode --model DIR/export` reads.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from parallax import cli


def define_flags() -> None:
    """Not at import: another program's flags may have the same names."""
    from ml_collections import config_flags
    config_flags.DEFINE_config_file("config", help_string="FILE[:VARIANT], or a name from configs/train.")
    flags.DEFINE_string("workdir", None, "Where everything of this run lies; default: runs/NAME of the config.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}: give the config with --config")
    from parallax.train import run, selfgen  # late, with all of jax, so that mistyped flags answer at once
    config = flags.FLAGS.config.copy_and_resolve_references()
    task = config.get("task", "train")
    if task not in ("train", "generate"):
        raise ValueError(f"unknown task {task!r}: expected train or generate")
    workdir = pathlib.Path(flags.FLAGS.workdir or pathlib.Path("runs") / _name(sys.argv))
    (selfgen if task == "generate" else run).main(config, workdir)


def _name(argv: list[str]) -> str:
    config = next(word for word in argv if word.startswith("--config=")).removeprefix("--config=")
    path, _, variant = config.partition(":")
    return "-".join(filter(None, (pathlib.Path(path).stem, variant)))


if __name__ == "__main__":
    define_flags()
    sys.argv = cli.with_config(sys.argv, "configs/train", lambda _: cli.fail(
        "--config is missing: expected a .py file or a name from configs/train, such as --config tiny_target"))
    cli.run(main)
