"""Early exit: the target's own first layers write ahead, all of them check. Needs no other model.

    python -m parallax.decode --config early_exit --prompt "def read(path):" --compare
    python -m parallax.decode --config early_exit --config.options.exit_layer=8 --model BIG --prompt "Why?"

The text is that of plain decoding. `exit_layer` counts the layers (0: a third of them), `decay` below 1 takes fewer for
every further token. It pays with a large target that was trained to exit early, as those of LayerSkip were.

The shipped target (the default), which was not, 256 tokens behind the prompt above: 2.03 tokens per forward, and half
the speed of plain decoding. Variants: `:decayed` with decaying depth, `:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("early_exit")
    config.model = "tiny-python"
    config.options.exit_layer, config.options.draft_length = 3, 3
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant == "decayed":
        config.options.exit_layer, config.options.decay = 4, 0.8
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke or decayed")
    return config
