"""Prune and graft: the last nodes of a draft model's tree give way to branches copied from the text.

    python -m parallax.decode --config graft --prompt "def read(path):" --compare
    python -m parallax.decode --config graft --model BIG --draft SMALL --config.options.branches=4

`--config.options.tree="beam(width=10, depth=6, nodes=60)"` is the tree of EAGLE-2, for accelerators.

The draft has as many nodes as the tree alone, so verification costs the same. `:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("graft")
    config.model = "tiny-python"
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
