"""A model that fills masks drafts a whole chain in one forward.

    python -m parallax.decode --config mask_fill --model BIG --draft MASKED --config.options.mask_token=ID

MASKED is any model over the target's vocabulary that was trained to fill masks, with its row for a mask or with the row
in front of it. At temperature 0 and with `follow` the text is that of plain decoding; `--temperature 0.8 --verifier
rejection` promises the law of plain sampling. The default runs the shipped draft model, which never saw a mask, so it
shows the machinery and no speed. `:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("mask_fill")
    config.model = "tiny-python"
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
