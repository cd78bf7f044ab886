"""Token recycling: a tree of the tokens that the target itself lately ranked behind each token.

For any text; needs neither training nor a repetitive prompt.

    python -m parallax.decode --config token_recycling --chat --prompt "Why is the sky blue?" --compare

Two CPU cores, SmolLM2-135M: 1.50 tokens per forward on chat prompts, 1.08 times plain decoding; 2.15 and 1.3
times plain decoding on benchmarks/prompts/editing.jsonl.
`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("token_recycling")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
