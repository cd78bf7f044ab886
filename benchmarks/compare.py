"""`python -m parallax.bench` with two further engines in the rotation, transformers and llama.cpp.

    python -m benchmarks.compare --config editing --transformers --gguf smollm2.f32.gguf --output bench-compare

Wants `pip install torch transformers accelerate llama-cpp-python`. Everything else is as there: the same prompts, token
ids, numbers and pages; the engines are greedy and take one prompt at a time.
"""

from __future__ import annotations

from absl import flags

from parallax import bench


def main() -> None:
    flags.DEFINE_bool("transformers", False, "Measure transformers on the same folder, float32.")
    flags.DEFINE_string("gguf", None, "Measure llama.cpp on this file.")
    bench.run(_baselines)


def _baselines(given):
    from benchmarks.engines import baselines  # late: it brings jax, and mistyped flags should answer at once
    return baselines(given)


if __name__ == "__main__":
    main()
