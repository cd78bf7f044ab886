"""A draft model's tree instead of a chain: more tokens per forward where the target verifies a block cheaply.

    python -m parallax.decode --config draft_tree --prompt "def read(path):" --compare
    python -m parallax.decode --config draft_tree --config.options.tree="levels(4, 2, 2)" --prompt "def read(path):"

`tree` is a policy and its options: chain, levels, paths, delayed, sequoia, confident, beam (EAGLE-2), stochastic_beam
(RSD-S). `controller` decides how deep each draft goes: constant, heuristic, confidence, dynamic_depth, cost_model.

Variants: `:sampled` draws siblings without replacement at temperature 1 and verifies them by rejection, `:confident`
adds siblings where the draft is unsure and stops behind unlikely tokens, `:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("draft_model")
    config.model = "tiny-python"
    config.options.tree = "beam(width=4, depth=4, nodes=15)"
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant == "sampled":
        config.temperature, config.verifier, config.options.tree = 1.0, "rejection", "levels(3, 2, 1)"
    elif variant == "confident":
        config.options.tree, config.options.controller = "confident(length=5)", "confidence(threshold=0.3)"
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke, sampled or confident")
    return config
