"""Input-guided decoding: copies the prompt on from the one place where the output stands in it.

For rewriting: corrections, renaming, small changes to a given text.

    python -m parallax.decode --config input_guided --compare

`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("input_guided")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
