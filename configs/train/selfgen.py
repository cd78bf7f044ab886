"""Text that a target writes itself, to train its drafters on: parts of 256 texts in the workdir, with their provenance.

    python -m parallax.train --config selfgen                                          # of tiny-python
    python -m parallax.train --config selfgen --config.target=smollm2-135m --config.data.source=prompts.jsonl

Sampled at temperature 1, so that the text has the target's own law. `config.json` in the workdir says which weights
(sha256), settings and versions wrote it. Stopped, it goes on behind its last part with the very texts that it would
have written. Two CPU cores, 4096 texts of tiny-python: 4 minutes, 767,502 tokens, distinct 4-grams 0.98. `:smoke`
writes 16 short texts.
"""

from parallax.train import defaults


def get_config(variant: str = ""):
    config = defaults.get_generate_config()
    config.target = "tiny-python"
    config.data.held_out = 0.02
    config.count = 4096
    config.max_new_tokens = 192
    config.prompt_length = 32
    config.batch_size = 64
    if variant == "smoke":
        config.count, config.shard, config.batch_size = 16, 8, 8
        config.max_new_tokens, config.prompt_length = 24, 8
        config.data.limit = 20
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
