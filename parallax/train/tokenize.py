"""Tokenizers for training, made or found, and the ids of many documents at once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from parallax import zoo
from parallax.models import gguf, gguf_tokenizer
from parallax.models.config import nearest
from parallax.tokenizer import FileTokenizer, Tokenizer

BOS, EOS = "<s>", "</s>"
TRAINING_BYTES = 2_000_000      # more text changes the merges of a small vocabulary hardly at all

# Encoding takes some hundred bytes of memory per token, so a long text is cut, where a line ends in a letter or digit:
# no pre-tokenizer of byte-level BPE joins anything there, so the tokens stay the same.
PART = 2 ** 17              # characters; eight times as many are encoded together
_CUT = re.compile(r"(?<=[^\W_])(?=\n)")


def build(spec: str, texts: Iterable[str]) -> FileTokenizer:
    """The tokenizer that `spec` names; it is saved with a checkpoint and loads in transformers.

    `<s>` and `</s>` written in a text stay text for the first two kinds, until the tokenizer is saved and loaded.

    Args:
      spec: `bytes` (ids 0 to 255, then BOS and EOS: the ids of `ByteTokenizer`), `bpe:N` (a byte-level BPE of N
        tokens), or a model of the zoo, a folder, a .gguf file or a Hub id, whose tokenizer is taken.
      texts: what a BPE is trained on; only the first `TRAINING_BYTES` are read.

    Raises:
      FileNotFoundError: no such path, or nothing in it.
      ValueError: an unknown name, a vocabulary without room for all bytes, or too little text for its size.
    """
    if spec == "bytes":
        return _ours(_byte_level(models.BPE({char: byte for byte, char in enumerate(_alphabet())}, []), regex=False))
    if spec.startswith("bpe:"):
        return _ours(_trained(spec, texts))
    if spec not in zoo.MODELS and os.sep not in spec and not Path(spec).exists():
        known = ("bytes", "bpe:N", *zoo.MODELS)
        raise ValueError(f"unknown tokenizer {spec!r}: expected {', '.join(known)}, an existing folder or .gguf file, "
                         f"or a Hub id org/name{nearest(spec, known)}")
    path = zoo.resolve(spec)
    if not path.suffix == ".gguf":
        return FileTokenizer.from_folder(path)
    result = gguf_tokenizer.build(gguf.read(path).metadata)
    if result is None:
        raise ValueError(f"{path} holds no tokenizer: take another file")
    return result


def encode(documents: Iterable[tuple[str | None, str]], tokenizer: Tokenizer, *, literal: bool
           ) -> Iterator[tuple[np.ndarray, int]]:
    """(ids, how many of them are the prompt) of documents (prompt or None, text), each with the end token behind it.

    Prompt and text are encoded apart, as they are when the model is used. `literal`: a special token that is written
    out in the text is text.
    """
    end = np.asarray(tokenizer.eos_ids[:1], np.int32)
    pieces, prompt = [], 0
    for batch in _batches(part for document in documents for part in _parts(*document)):
        encoded = {first: iter(_encode([part.text for part in batch if part.first is first], tokenizer, first, literal))
                   for first in (True, False)}
        for part in batch:
            pieces.append(np.asarray(next(encoded[part.first]), np.int32))
            if part.prompt:
                prompt = len(pieces[0])
            if part.last:
                if not np.array_equal(pieces[-1][-1:], end):        # a chat format may have written it
                    pieces.append(end)
                yield np.concatenate(pieces), prompt
                pieces, prompt = [], 0


class _Part(NamedTuple):
    text: str
    first: bool
    last: bool
    prompt: bool


def _parts(prompt: str | None, text: str) -> Iterator[_Part]:
    begin, texts = 0, [] if prompt is None else [prompt]
    while (cut := _CUT.search(text, begin + PART)) is not None:
        texts.append(text[begin:cut.start()])
        begin = cut.start()
    texts.append(text[begin:])
    for i, part in enumerate(texts):
        yield _Part(part, i == 0, i == len(texts) - 1, i == 0 and prompt is not None)


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part.text)
        if size >= 8 * PART:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(texts: list[str], tokenizer: Tokenizer, special: bool, literal: bool) -> list[list[int]]:
    if not isinstance(tokenizer, FileTokenizer):
        return [tokenizer.encode(text, special=special) for text in texts]
    backend = tokenizer.backend
    before, backend.encode_special_tokens = backend.encode_special_tokens, literal
    try:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]        # JSON may hold lone surrogates
        return [encoding.ids for encoding in backend.encode_batch_fast(clean, add_special_tokens=special)]
    finally:
        backend.encode_special_tokens = before


def _alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE, as GPT-2 chose them: no blanks, no control codes."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _byte_level(model: models.Model, *, regex: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)
    backend.decoder = decoders.ByteLevel()
    return backend


def _trained(spec: str, texts: Iterable[str]) -> tokenizers.Tokenizer:
    try:
        size = int(spec.removeprefix("bpe:"))
    except ValueError:
        raise ValueError(f"expected bpe:N with a number of tokens, such as bpe:1024, got {spec!r}") from None
    if size < 258:
        raise ValueError(f"{spec} has no room for the 256 bytes, {BOS} and {EOS}: expected bpe:258 or more")
    backend = _byte_level(models.BPE(), regex=True)
    backend.train_from_iterator(_head(texts), trainers.BpeTrainer(
        vocab_size=size, special_tokens=[BOS, EOS], initial_alphabet=_alphabet(), show_progress=False))
    if backend.get_vocab_size() < size:
        raise ValueError(f"the text gives only {backend.get_vocab_size()} of the {size} tokens of {spec}: ask for "
                         f"bpe:{backend.get_vocab_size()}, or train on more text")
    return backend


def _head(texts: Iterable[str]) -> Iterator[str]:
    """The first `TRAINING_BYTES` of the texts."""
    left = TRAINING_BYTES
    for text in texts:
        raw = text[:left].encode("utf-8", "replace")[:left]
        yield raw.decode("utf-8", "ignore")
        left -= len(raw)
        if not left:
            return


def _ours(backend: tokenizers.Tokenizer) -> FileTokenizer:
    backend.add_special_tokens([BOS, EOS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))])
    backend.encode_special_tokens = True
    return FileTokenizer(backend, bos=BOS, eos=(EOS,))
