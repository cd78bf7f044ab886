"""Gives a draft model a head for the frequent tokens alone: faster drafts, the same output.

Usage: python -m parallax.trim --draft NAME --target NAME --texts FILE --out DIR [--coverage=0.98] [--measure]
       [--overwrite]

FILE is text, or JSONL with one text a line, best written by the target itself (`parallax.decode --output`). DIR becomes
a folder for --draft of the other commands.
"""

from __future__ import annotations

from absl import flags

from parallax import cli


def define_flags() -> None:
    """Not at import: another program's flags may have the same names."""
    flags.DEFINE_string("draft", None, "The draft model: a folder, a .gguf file, a Hub id or a name of the zoo.")
    flags.DEFINE_string("target", None, "The target, whose end tokens stay.")
    flags.DEFINE_string("texts", None, "The texts whose tokens are counted: a text or .jsonl file.")
    flags.DEFINE_string("out", None, "The folder to write.")
    flags.DEFINE_float("coverage", 0.98, "The share of the texts' tokens that must be kept, at least.")
    flags.DEFINE_bool("measure", False, "Time the head on this machine, and take the size of the best coverage minus "
                                        "latency instead of the smallest.")
    flags.DEFINE_bool("overwrite", False, "Replace the folder if it is not empty.")


def main(argv: list[str]) -> None:
    values = {name: getattr(flags.FLAGS, name) for name in ("draft", "target", "texts", "out")}
    missing = [f"--{name}" for name, value in values.items() if not value]
    if missing or len(argv) > 1:
        raise ValueError(f"expected {' and '.join(missing) or 'no argument without a flag'}: python -m parallax.trim "
                         "--draft NAME --target NAME --texts FILE --out DIR")
    # Only now, so that --help and a mistyped flag answer at once.
    from parallax import vocabulary

    print(vocabulary.trim_checkpoint(**values, coverage=flags.FLAGS.coverage, measure=flags.FLAGS.measure,
                                     overwrite=flags.FLAGS.overwrite))


if __name__ == "__main__":
    define_flags()
    cli.run(main)
