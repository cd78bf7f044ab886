"""Writes text with a language model, several tokens per forward pass.

Usage: python -m parallax.decode [--model NAME] [--method NAME] [--prompt TEXT | --prompts FILE | < FILE] [--chat]

Without a prompt it lets SmolLM2-135M edit a built-in piece of code by prompt lookup. NAME of a model is a name of the
zoo, a Hugging Face folder, a .gguf file or a Hub id. All settings: --config FILE[:VARIANT] and --config.KEY=VALUE.
"""

import pathlib
import sys

from absl import flags

from parallax import cli

_SETTINGS = {       # flags that are short for --config.NAME, and their types
    "model": (flags.DEFINE_string, "Zoo name, Hugging Face folder, .gguf file or Hub id."),
    "method": (flags.DEFINE_string, "Decoding method; `--method help` lists them."),
    "draft": (flags.DEFINE_string, "Draft model of the method draft_model, named as --model."),
    "verifier": (flags.DEFINE_string, "Acceptance rule, perhaps with options: `typical(epsilon=0.1)`."),
    "kernels": (flags.DEFINE_string, "auto: Pallas kernels on TPU and GPU; xla: none; pallas: interpreted on a CPU."),
    "chat": (flags.DEFINE_bool, "Wrap prompts in the model's chat template."),
    "system": (flags.DEFINE_string, "System message of the chat."),
    "max_new_tokens": (flags.DEFINE_integer, "Tokens per prompt, at most."),
    "batch_size": (flags.DEFINE_integer, "Prompts decoded together."),
    **cli.SAMPLING,
    "seed": (flags.DEFINE_integer, "Decides all noise."),
    "stop": (flags.DEFINE_multi_string, "A string that ends a completion; may be given several times."),
}


def define_flags() -> None:
    """Not at import: another program's flags may have the same names."""
    from ml_collections import config_flags
    config_flags.DEFINE_config_file("config", help_string="FILE[:VARIANT], or a name from configs/decode.")
    for name, (define, text) in _SETTINGS.items():
        define(name, None, text)
    flags.DEFINE_string("prompt", None, "The prompt; without it and --prompts, what is piped in.")
    flags.DEFINE_string("prompts", None, "A text file (one prompt) or a .jsonl file (one per line).")
    flags.DEFINE_string("output", None, "Write completions to this .jsonl file.")
    flags.DEFINE_bool("overwrite", False, "Replace the output file if it exists.")
    flags.DEFINE_bool("compare", None, "Run plain decoding too; default: when the output is a terminal.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}: give the prompt with --prompt")
    config = flags.FLAGS.config.copy_and_resolve_references()
    given = {name: getattr(flags.FLAGS, name) for name in _SETTINGS if getattr(flags.FLAGS, name) is not None}
    from parallax import session  # late, with all of jax, so that mistyped flags answer at once
    session.decode(config, given, flags.FLAGS)


if __name__ == "__main__":
    define_flags()
    default = pathlib.Path(__file__).parent / "decoding" / "defaults.py"
    sys.argv = cli.with_config(sys.argv, "configs/decode", lambda method: f"{default}:{method or 'prompt_lookup'}")
    cli.run(main)
