"""Speculative sampling: a smaller language model with the same tokenizer writes ahead, the target checks.

    python -m parallax.decode --config draft_model --prompt "def read(path):" --compare
    python -m parallax.decode --config draft_model --model BIG --draft SMALL --prompt "Why is the sky blue?"

At temperature 0 and with the verifier `follow` the text is that of plain decoding, greedy or with the same seed.
`rejection` accepts more at a temperature above 0, and promises the law of plain sampling instead of its tokens:
`--temperature 0.8 --verifier rejection`, or the variant `:rejection`. `:smoke` decodes 16 tokens.

The shipped pair (the default), benchmarks/prompts/python.jsonl, 128 tokens each: 2.37 tokens per forward at temperature
0; at temperature 1, 1.87 with `follow` and 2.16 with `rejection`. On a CPU no faster than plain decoding: this target
is so small that four drafts cost more than the forwards they save.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("draft_model")
    config.model = "tiny-python"
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant == "rejection":
        config.temperature, config.verifier = 0.8, "rejection"
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke or rejection")
    return config
