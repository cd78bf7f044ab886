"""Staged speculative decoding: the draft model is sped up by a drafter of its own, and writes the very same drafts.

    python -m parallax.decode --config staged --prompt "def read(path):" --compare
    python -m parallax.decode --config staged --model BIG --draft SMALL --config.options.draft_length=8

`--config.options.inner="token_recycling(nodes=7)"` or any other method that needs no draft model: with a tree the draft
model verifies the tree into a chain, and the target verifies the chain. Worth it where a forward of the draft model
costs more than finding a draft for it. `:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("staged")
    config.model = "tiny-python"
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
