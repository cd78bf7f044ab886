"""Combined: copies where the match is long, elsewhere drafts from what the target ranked high before.

For any text. Other pairs are named in one line of text:

    python -m parallax.decode --config combined --compare
    python -m parallax.decode --config combined --config.options.second="trigram(nodes=7)" --compare

`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("combined")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
