"""Drafters without training where copying pays: SmolLM2 on 20 editing and copying tasks.

    python -m parallax.bench --config editing --output bench/editing

Two CPU cores: prompt lookup 4.25 tokens per forward and 2.9 times plain decoding, token recycling 2.15 and 1.3 times.
`:smoke` is one prompt of 16 tokens.
"""

from parallax.benchmark import defaults

METHODS = ("prompt_lookup", "adaptive_ngram", "input_guided", "suffix_match", "trigram", "ngram_pool",
           "token_recycling", "combined")


def get_config(variant: str = ""):
    config = defaults.get_config()
    config.methods = METHODS
    config.prompts = ("benchmarks/prompts/editing.jsonl",)
    config.chat = True
    if variant == "smoke":
        config.count, config.repeats, config.max_new_tokens = 1, 1, 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
