"""Compiles a model's decode step, or single kernels, for TPUs and GPUs that are not there, and predicts their time.

Usage: python -m parallax.aot [--model NAME] [--target v5e,sm_90] [--rows 1,8,16] [--tensor N] [--kernel attention]

Weights are not needed. TPUs want the extra [tpu-aot], GPUs [gpu-aot]. Ends with status 1 if something does not compile.
"""

from absl import flags

from parallax import cli


def define_flags() -> None:
    """Not at import: another program's flags may have the same names."""
    flags.DEFINE_string("model", "llama-3.2-1b", "llama-3.2-1b, qwen3-0.6b, llama-3-8b, smollm2-135m, a model that "
                        "comes with the package, or a Hugging Face folder.")
    flags.DEFINE_list("target", ["v5e"], "v4, v5e, v5p, v6e or tpu7x, perhaps as v5e:2x4; sm_80, sm_90.")
    flags.DEFINE_list("kernel", [], "Only these: attention, commit, verify, draw, residual, unmask.")
    flags.DEFINE_list("rows", ["1", "8", "16", "32", "64"], "Rows T of a block, the pending token included.")
    flags.DEFINE_integer("tensor", 1, "Devices that share the model (tensor parallel); TPUs only.")
    flags.DEFINE_integer("batch", 1, "Sequences.")
    flags.DEFINE_integer("context", 2048, "Committed tokens of each sequence.")
    flags.DEFINE_integer("capacity", None, "Slots of the cache; default twice the context.")
    flags.DEFINE_integer("depth", 8, "Of the draft; rows behind that are further chains.")
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of weights, activations and cache.")
    flags.DEFINE_enum("kernels", "pallas", ["pallas", "xla"], "What the step runs on: kernels, or XLA's own code.")
    flags.DEFINE_string("json", None, "Write all figures to this file.")
    flags.DEFINE_bool("overwrite", False, "Replace that file if it exists.")


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}: name hardware with --target, a model with --model")
    given = flags.FLAGS
    wrong = [word for word in given.rows if not word.strip().isdecimal()]
    if wrong:
        raise ValueError(f"--rows must be block sizes from 1 up, got {wrong[0]!r}")
    from parallax.compile import command  # late, with all of jax, so that mistyped flags answer at once
    return command.aot(
        model=given.model, target=given.target, kernel=given.kernel, rows=[int(word) for word in given.rows],
        tensor=given.tensor, batch=given.batch, context=given.context, capacity=given.capacity, depth=given.depth,
        dtype=given.dtype, kernel_choice=given.kernels, output=given.json, overwrite=given.overwrite)


if __name__ == "__main__":
    define_flags()
    cli.run(main)
