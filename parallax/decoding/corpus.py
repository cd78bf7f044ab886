"""Texts that a drafter may copy from besides its own. C tokens."""

from __future__ import annotations

import functools
import pathlib

import numpy as np
from jaxtyping import Int

from parallax import prompts
from parallax.tokenizer import Tokenizer

SEPARATOR = -1          # between documents: no token, so that neither a match nor a draft goes over it


def load_corpus(path: str, tokenizer: Tokenizer | None) -> Int[np.ndarray, "C"]:
    """The token ids of a file: of a .jsonl(.gz) file with one document per line, else of the whole text.

    Lines hold a document as prompt files hold a prompt, see `parallax.prompts`. Reading the same file again is free.

    Raises:
      ValueError: missing, empty or damaged file, or no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("a corpus file needs the model's tokenizer and this checkpoint has none: give token ids")
    file = pathlib.Path(path)
    return _read(path, file.stat().st_mtime_ns if file.exists() else 0, tokenizer)


@functools.lru_cache(maxsize=2)
def _read(path: str, changed: int, tokenizer: Tokenizer) -> Int[np.ndarray, "C"]:
    ids = []
    for text in prompts.read(path):
        ids += [*([SEPARATOR] if ids else []), *tokenizer.encode(text, special=False)]
    return np.asarray(ids, np.int32)
