"""Every registered method against plain decoding, greedy.

    python -m parallax.bench --config all --output bench-all

A method that needs a draft model is left out unless --draft names one. `:sampled` draws at temperature 0.7, with
rejection sampling beside sample-and-follow where a method's drafts allow it; `:smoke` is one prompt of 16 tokens.

Two CPU cores, SmolLM2-135M, a quarter of an hour: prompt lookup 4.25 tokens per forward and 2.9 times plain decoding,
token recycling 2.15 and 1.3 times.
"""

from parallax.benchmark import defaults
from parallax.decoding import METHODS


def get_config(variant: str = ""):
    config = defaults.get_config()
    config.methods = tuple(METHODS)
    config.prompts = ("benchmarks/prompts/editing.jsonl",)
    config.chat = True
    if variant == "sampled":
        config.temperature = 0.7
        config.methods += tuple({"name": name, "verifier": "rejection"} for name, entry in METHODS.items()
                                if "kind" in entry.parts)
    elif variant == "smoke":
        config.count, config.repeats, config.max_new_tokens = 1, 1, 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected sampled or smoke")
    return config
