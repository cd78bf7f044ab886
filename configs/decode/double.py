"""Retrieval on both sides: a draft model that copies to write faster, and a copied branch beside its chain.

    python -m parallax.decode --config double --prompt "def read(path):" --compare
    python -m parallax.decode --config double --model BIG --draft SMALL --config.options.draft_length=8

Where the draft model is wrong, the target may still accept several copied tokens. `:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("double")
    config.model = "tiny-python"
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
