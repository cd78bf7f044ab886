"""Seeded sampling with prompt lookup: the same text as plain decoding with the same seed, token for token.

    python -m parallax.decode --config sampling --compare

About as fast as plain sampling on free text, faster where the text repeats; TPF between 1 and the greedy one.
`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("prompt_lookup")
    config.temperature, config.top_k, config.top_p, config.min_p = 0.7, 50, 0.95, 0.02
    config.seed = 17
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
