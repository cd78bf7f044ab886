"""Where copying pays: SmolLM2 on 20 editing and copying tasks, prompt lookup with short and long drafts.

    python -m parallax.bench --config editing --output bench/editing

Two CPU cores: prompt lookup 4.25 tokens per forward and 2.9 times plain decoding with drafts of 7 tokens (drafts of 15
have no figure yet), token recycling 2.15 and 1.3 times; equal tokens in all 20 with both.
`:smoke` is one prompt of 16 tokens.
"""

from parallax.benchmark import defaults


def get_config(variant: str = ""):
    config = defaults.get_config()
    config.methods = (
        {"name": "prompt_lookup", "label": "prompt_lookup"},
        {"name": "prompt_lookup", "options": {"draft_length": 15}, "label": "prompt_lookup, drafts of 15"},
        {"name": "token_recycling"},
    )
    config.prompts = ("benchmarks/prompts/editing.jsonl",)
    config.chat = True
    if variant == "smoke":
        config.count, config.repeats, config.max_new_tokens = 1, 1, 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
