"""Adaptive n-grams: the most frequent continuation of the longest context that the text has seen.

For text that repeats itself with variations: code, editing, long answers.

    python -m parallax.decode --config adaptive_ngram --compare

`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("adaptive_ngram")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
