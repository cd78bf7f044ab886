"""Suffix matching: copies from behind the longest match of any length, in the text or in a corpus.

For editing and code; with a corpus, a text or .jsonl file, also for answers that resemble known texts.

    python -m parallax.decode --config suffix_match --compare
    python -m parallax.decode --config suffix_match --config.options.corpus=README.md --compare

`:smoke` decodes 16 tokens.
"""

from parallax.decoding import defaults


def get_config(variant: str = ""):
    config = defaults.get_config("suffix_match")
    if variant == "smoke":
        config.max_new_tokens = 16
    elif variant:
        raise ValueError(f"unknown variant {variant!r}: expected smoke")
    return config
