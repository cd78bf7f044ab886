"""Checks what decoding methods claim: equal tokens, an equal law, a clean cache, no recompilation. Ends with status 1
if a claim falls.

Usage: python -m parallax.prove [--method NAME] [--verifier NAME] [--options KEY=VALUE,..] [--model NAME] [--quick]

Without --method, --verifier and --config it takes all methods with the verifiers that fit them, all acceptance rules by
themselves, and the negative controls: wrong rules, which it must tell from right ones. All that on random tiny models;
--model adds a real one. --config FILE[:VARIANT] (or a name from configs/decode) proves what that config decodes with.
"""

from absl import flags

from parallax import cli


def define_flags() -> None:
    """Not at import: another program's flags may have the same names."""
    flags.DEFINE_string("method", None, "Decoding method.")
    flags.DEFINE_string("verifier", None, "Acceptance rule, perhaps with options: \"typical(epsilon=0.1)\".")
    flags.DEFINE_string("options", None, "Options of the method: \"draft_length=3, kind='coupled'\".")
    flags.DEFINE_float("temperature", None, "Of the checks that sample; default 0.8, or the config's.")
    flags.DEFINE_multi_string("config", None, "Decode config, FILE[:VARIANT]; may be given several times.")
    flags.DEFINE_bool("all", False, "All methods, rules and controls, whatever else is given.")
    flags.DEFINE_bool("controls", False, "The negative controls too.")
    flags.DEFINE_bool("quick", False, "Fewer seeds and texts, and XLA without its optimisations.")
    flags.DEFINE_string("model", None, "Also on this model: zoo name, Hugging Face folder, .gguf file or Hub id.")
    flags.DEFINE_string("draft", None, "Its draft model, for the methods that need one.")
    flags.DEFINE_string("output", None, "Write all records to this .json file.")
    flags.DEFINE_bool("overwrite", False, "Replace the output file if it exists.")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}: name a method with --method or a config with --config")
    if not __debug__:
        raise ValueError("python -O leaves out the assertions that the checks are made of: run without -O")
    from parallax.proof import command, wanted  # late, with all of jax, so that mistyped flags answer at once
    chosen = wanted.resolve(flags.FLAGS)
    return command.prove(**chosen)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
