"""N-gram pool: the last few continuations of the current token, side by side.

The pool of lookahead decoding, fed by prompt and output alone.

    python -m parallax.decode --config ngram_pool --compare

`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("ngram_pool")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
