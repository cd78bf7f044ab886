"""Prompt lookup: copies what followed the last tokens earlier in the text.

For editing, summarising, code and other work that repeats its input.

    python -m parallax.decode --config prompt_lookup --compare

Two CPU cores, SmolLM2-135M, benchmarks/prompts/editing.jsonl: 4.25 tokens per forward, 2.9 times plain decoding.
`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("prompt_lookup")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
