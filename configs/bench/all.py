"""Every registered method against plain decoding, greedy, on the tiny pair that comes with the package.

    python -m parallax.bench --config all --output bench/all
    python -m parallax.bench --config all --model smollm2-135m --chat --prompts FILE --output bench/smollm2

A method that needs a draft model is left out where neither the zoo nor --draft has one. `:sampled` draws at temperature
0.8, with rejection sampling beside sample-and-follow where a method's drafts allow it; `:smoke` is one prompt of 16
tokens.

Two CPU cores, under a minute: 2.24 tokens per forward with prompt lookup, 2.27 with token recycling, 2.37 with the
draft model, at 1.08, 0.76 and 0.64 times the speed of plain decoding: a target that takes 0.13 ms a token is cheaper
than any drafting. It repeats itself when greedy, which all of them can copy: distinct 4-grams 0.41.
"""

from parallax.benchmark import defaults
from parallax.decoding import METHODS


def get_config(variant: str = ""):
    config = defaults.get_config()
    config.model = "tiny-python"
    config.methods = tuple(METHODS)
    config.prompts = ("benchmarks/prompts/python.jsonl",)
    if variant == "sampled":
        config.temperature = 0.8
        config.methods += tuple({"name": name, "verifier": "rejection"} for name, entry in METHODS.items()
                                if "kind" in entry.parts)
    elif variant == "smoke":
        config.count, config.repeats, config.max_new_tokens = 1, 1, 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected sampled or smoke")
    return config
