"""Writes any checkpoint that parallax reads as a Hugging Face folder with safetensors.

Usage: python -m parallax.convert SRC DST [--dtype=float32|bfloat16|float16] [--max_shard_gib=5] [--overwrite]

SRC is a Hugging Face folder, a .gguf file, a Hub id org/name or a name of the zoo; DST is the folder to write.
"""

from __future__ import annotations

from absl import flags

from parallax import cli


def define_flags() -> None:
    """Not at import: another program's flags may have the same names."""
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16", "float16"], "Of the weights written; default: as read.")
    flags.DEFINE_float("max_shard_gib", 5.0, "Larger weights are split over several files.", lower_bound=1e-6)
    flags.DEFINE_bool("overwrite", False, "Replace DST if it is not empty.")


def main(argv: list[str]) -> None:
    if len(argv) != 3:
        raise ValueError(f"expected SRC and DST, got {len(argv) - 1} arguments: python -m parallax.convert SRC DST")
    # Only now, so that --help and a mistyped flag answer at once.
    from parallax import checkpoint, zoo
    from parallax.models import families, weights

    source, destination = argv[1:]
    dtype = flags.FLAGS.dtype
    loaded = zoo.load(source, dtype=dtype if dtype in ("float32", "bfloat16") else None)
    size = checkpoint.save(loaded, destination, dtype=dtype, max_shard_bytes=int(flags.FLAGS.max_shard_gib * 2 ** 30),
                           overwrite=flags.FLAGS.overwrite)
    count = sum(array.size for _, array in weights.disassemble(loaded.config, loaded.params))
    print(f"{source}: {families.family_of(loaded.config)}, {count:,} parameters, {size:,} bytes written to "
          f"{destination}")


if __name__ == "__main__":
    define_flags()
    cli.run(main)
