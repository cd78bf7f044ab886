"""Tri-grams: the likeliest tree of what followed the last two tokens before.

For any text of some length; needs neither training nor logits.

    python -m parallax.decode --config trigram --compare

`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("trigram")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
