"""Measures decoding methods against plain decoding: speed, tokens per forward, acceptance, equal tokens.

Usage: python -m parallax.bench [--model NAME] [--methods A,B:option=value] [--prompts FILE] [--output FOLDER]

Writes index.html, results.md, results.json; goes on where it was stopped. More: --config FILE, --config.KEY=VALUE.
"""

from __future__ import annotations

import pathlib
import sys

from absl import flags

from parallax import cli

_SETTINGS = {       # flags that are short for --config.NAME, and their types
    "model": (flags.DEFINE_string, "Zoo name, Hugging Face folder, .gguf file or Hub id."),
    "draft": (flags.DEFINE_string, "Draft model of the method draft_model, named as --model."),
    "methods": (flags.DEFINE_multi_string, "Methods with a comma between them, as NAME or NAME:option=value:..."),
    "prompts": (flags.DEFINE_multi_string, "A text or .jsonl file; may be given several times."),
    "count": (flags.DEFINE_integer, "Prompts per file, evenly spread over it."),
    "repeats": (flags.DEFINE_integer, "Times that everything is measured."),
    "costs": (flags.DEFINE_bool, "Measure the cost model: expected speedup, break-even."),
    "chat": (flags.DEFINE_bool, "Wrap prompts in the model's chat template."),
    "max_new_tokens": (flags.DEFINE_integer, "Tokens per prompt, at most."),
    "ignore_eos": (flags.DEFINE_bool, "Go on at end of text."),
    "batch_size": (flags.DEFINE_integer, "Prompts decoded together."),
    **cli.SAMPLING,
    "seed": (flags.DEFINE_integer, "Decides all noise; each repeat takes the next."),
}


def run(baselines=lambda flags: {}) -> None:
    """Parses the command line and measures; `baselines(flags)` may add engines, see `benchmark.command.bench`."""
    from ml_collections import config_flags
    config_flags.DEFINE_config_file("config", help_string="FILE[:VARIANT], or a name from configs/bench.")
    for name, (define, text) in _SETTINGS.items():
        define(name, None, text)
    flags.DEFINE_string("output", "bench", "Folder for the results.")
    flags.DEFINE_bool("overwrite", False, "Measure anew if the folder holds a benchmark.")
    default = pathlib.Path(__file__).parent / "benchmark" / "defaults.py"
    sys.argv = cli.with_config(sys.argv, "configs/bench", lambda _: str(default))
    cli.run(lambda argv: _main(argv, baselines))


def _main(argv: list[str], baselines) -> None:
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}: give prompt files with --prompts")
    given = {name: getattr(flags.FLAGS, name) for name in _SETTINGS if getattr(flags.FLAGS, name) is not None}
    from parallax.benchmark import command, settings  # late: they bring jax, and mistyped flags should answer at once
    if "methods" in given:
        given["methods"] = [name for text in given["methods"] for name in settings.names(text)]
    command.bench(flags.FLAGS.config.copy_and_resolve_references(), given, flags.FLAGS, baselines(flags.FLAGS))


if __name__ == "__main__":
    run()
