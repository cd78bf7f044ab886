"""Text and token files as one flat array of ids with documents.

N tokens of all documents, D documents.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from parallax.tokenizer import FileTokenizer, Tokenizer
from parallax.train import documents, tokenize

_CHUNK = 2 ** 20


class Corpus(NamedTuple):
    """Token ids of documents, one behind the other.

    Attributes:
      tokens: uint16 or 32 bits; memory mapped if it comes from one file.
      starts: document d is tokens[starts[d]:starts[d + 1]].
      prompts: the leading tokens of each document that are given, not learned; 0 for plain text.
      digest: sha256 of the three.
    """

    tokens: Int[np.ndarray, "N"]
    starts: Int[np.ndarray, "D+1"]
    prompts: Int[np.ndarray, "D"]
    digest: str


class _Block(NamedTuple):
    """Some documents, as in `Corpus`, with their lengths."""

    tokens: np.ndarray
    lengths: Sequence[int]
    prompts: Sequence[int]


def read(source: str | Sequence[str], tokenizer: Tokenizer | None, *, vocab_size: int, glob: str | None = None,
         limit: int | None = None) -> Corpus:
    """Reads sources one behind the other.

    Every text is a document: what the tokenizer makes of it, and the end token. Special tokens that are written out in
    a text file are text; in JSONL they are tokens, as chat formats write them. A prompt and its completion are
    tokenized apart, as they will be when the model is used.

    Args:
      source: one or several of: `stdlib`, the source of Python's standard library; a folder of text files, or of
        token files alone; a text file; .jsonl with `text`, or `prompt` and `completion` (both also as .gz); .npy with
        ids, [N] for one document or [D, N]; .npz as `save` writes it.
      tokenizer: None suffices for token files.
      vocab_size: of the model.
      glob: which files of a folder, such as `*.py`; by default all that look like text.
      limit: at most this many documents.

    Raises:
      FileNotFoundError: no such path.
      ValueError: nothing to read, a file that is damaged or of no known kind, or ids outside the vocabulary.
    """
    if limit and limit < 0:
        raise ValueError(f"limit is a number of documents, or 0 for all: got {limit}")
    paths = documents.files(source, glob)
    blocks: list[_Block] = []
    left = limit or None
    with tqdm(unit=" tokens", unit_scale=True, desc="reading", disable=None) as bar:    # shown on a terminal only
        for block in _blocks(paths, tokenizer, vocab_size):
            blocks.append(_first(block, left))
            bar.update(len(block.tokens))
            left = left and left - len(blocks[-1].lengths)
            if left == 0:
                break
    if not blocks:
        raise ValueError(f"{', '.join(map(str, paths[:3]))} {'is' if len(paths) == 1 else 'are'} empty: expected text")
    tokens = blocks[0].tokens if len(blocks) == 1 else np.concatenate([block.tokens for block in blocks])
    return _corpus(tokens, np.concatenate([block.lengths for block in blocks]),
                   np.concatenate([block.prompts for block in blocks]))


def cached(folder: str | Path, source: str | Sequence[str], tokenizer: Tokenizer | None, *, vocab_size: int,
           glob: str | None = None, limit: int | None = None) -> Corpus:
    """As `read`, but text is tokenized once and then lies in `folder`, until a file or the tokenizer changes."""
    paths = documents.files(source, glob)
    if all(path.suffix in documents.TOKENS for path in paths):
        return read(source, tokenizer, vocab_size=vocab_size, glob=glob, limit=limit)
    ids = tokenizer.backend.to_str() if isinstance(tokenizer, FileTokenizer) else type(tokenizer).__name__
    request = _key([[str(path.resolve()) for path in paths], ids, tokenizer and tokenizer.eos_ids, vocab_size, limit])
    state = _key([(path.stat().st_size, path.stat().st_mtime_ns) for path in paths])
    path = Path(folder) / f"corpus-{request}-{state}.npz"
    try:
        return load(path)
    except (FileNotFoundError, ValueError):     # a damaged file is as good as none
        pass
    save(path, read(source, tokenizer, vocab_size=vocab_size, glob=glob, limit=limit))
    for other in path.parent.glob(f"corpus-{request}-*.npz"):
        if other != path:
            other.unlink(missing_ok=True)
    return load(path)


def texts(source: str | Sequence[str], *, glob: str | None = None, limit: int | None = None) -> Iterator[str]:
    """The texts of a source, to train a tokenizer on: files in a fixed random order, so that the first are a sample.

    Raises as `read`; also ValueError if the source holds token ids.
    """
    paths = documents.files(source, glob)[:limit or None]
    for i in np.random.default_rng(0).permutation(len(paths)):
        if paths[i].suffix in documents.TOKENS:
            raise ValueError(f"{paths[i]} holds token ids, not text: name the tokenizer that they were made with")
        for prompt, text in itertools.islice(documents.read(paths[i]), limit or None):
            yield (prompt or "") + text


def split(corpus: Corpus, held_out: float) -> tuple[Corpus, Corpus]:
    """(what is trained on, what is not), by a hash of each document, so that neither order nor other files matter.

    Equal documents stay together. Of a single document the end is held out. `held_out=0` holds out nothing.

    Raises:
      ValueError: `held_out` is no fraction, or would leave nothing on one side.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out is the fraction of the documents kept apart: expected 0 <= held_out < 1, got "
                         f"{held_out}")
    lengths, size = np.diff(corpus.starts), len(corpus.tokens)
    if not held_out:
        return corpus, _corpus(corpus.tokens[:0], lengths[:0], corpus.prompts[:0])
    if len(lengths) == 1:
        cut = size - round(size * held_out)
        if min(cut, size - cut) < 2:
            raise ValueError(f"a single document of {size} tokens is too short to hold out {held_out:g} of it: give "
                             "more text")
        prompt = int(corpus.prompts[0])
        return (_corpus(corpus.tokens[:cut], [cut], [min(prompt, cut)]),
                _corpus(corpus.tokens[cut:], [size - cut], [max(prompt - cut, 0)]))
    pairs = itertools.pairwise(corpus.starts.tolist())
    hashes = np.asarray([_hash(corpus.tokens[begin:end]) for begin, end in pairs], np.uint64)
    apart = hashes < np.uint64(held_out * 2 ** 64)
    apart &= hashes != hashes.max()         # a few documents may all fall on one side: each side keeps one
    apart |= hashes == hashes.min()
    if apart.all():
        raise ValueError(f"all {len(lengths)} documents are the same: none can be held out, set held_out to 0")
    train, rest = (_corpus(corpus.tokens[np.repeat(side, lengths)], lengths[side], corpus.prompts[side])
                   for side in (~apart, apart))
    return train, rest


def from_documents(rows: Iterable[tuple[Sequence[int], int]]) -> Corpus:
    """A corpus of (ids, how many of them are the prompt)."""
    rows = list(rows)
    tokens = np.fromiter(itertools.chain.from_iterable(ids for ids, _ in rows), np.int32)
    return _corpus(_compact(tokens, int(tokens.max(initial=0)) + 1), [len(ids) for ids, _ in rows],
                   [prompt for _, prompt in rows])


def save(path: str | Path, corpus: Corpus) -> None:
    """Writes a .npz file, all of it or nothing. Raises OSError if it cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            # What a reader can do without comes first: damage that hides it hides the rest too.
            np.savez(file, **dict(reversed(corpus._asdict().items())))
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}; nothing was left behind") from None
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | Path) -> Corpus:
    """Reads a .npz file: `tokens` and `starts`, and unless all is to be learned `prompts`.

    Raises:
      OSError: there is no such file, or it cannot be read.
      ValueError: it is damaged, or holds something else.
    """
    with open(path, "rb") as raw:
        try:
            arrays = _arrays(raw)
        except Exception as error:      # the libraries trust the bytes: what they raise depends on which are damaged
            raise ValueError(f"{path} is damaged or no .npz file of tokens ({' '.join(str(error).split())}): make it "
                             "again") from None
    tokens, starts = arrays["tokens"], arrays["starts"]
    prompts = arrays.get("prompts", np.zeros(max(starts.size - 1, 0), np.int32))
    for name, array in (("tokens", tokens), ("starts", starts), ("prompts", prompts)):
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{path} has {name} of shape {array.shape} and type {array.dtype}: expected integers [N]")
    lengths = np.diff(starts.astype(np.int64))
    if not (len(starts) and starts[0] == 0 and starts[-1] == len(tokens) and (lengths >= 0).all()):
        raise ValueError(f"{path} has starts that do not divide its {len(tokens)} tokens: expected 0 .. {len(tokens)}")
    if len(prompts) != len(lengths) or not ((0 <= prompts) & (prompts <= lengths)).all():
        raise ValueError(f"{path} has prompts that do not fit its {len(lengths)} documents")
    result = _corpus(tokens, lengths, prompts)
    if str(arrays.get("digest", result.digest)) != result.digest:
        raise ValueError(f"{path} is damaged (its sha256 is another): make it again")
    return result


def digest_of(tree: Any) -> str:
    """sha256 of nested containers of numbers, strings and arrays, such as a model's parameters."""
    import jax
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape};".encode())
        result.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return result.hexdigest()


def _corpus(tokens: np.ndarray, lengths: Sequence[int], prompts: Sequence[int]) -> Corpus:
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    prompts = np.asarray(prompts, np.int32)
    digest = hashlib.sha256()
    for begin in range(0, len(tokens), _CHUNK):      # in parts, for the copy in the type that all kinds share
        digest.update(_bytes(tokens[begin:begin + _CHUNK], "<u4"))
    digest.update(_bytes(starts, "<i8"))
    digest.update(_bytes(prompts, "<i4"))
    return Corpus(tokens, starts, prompts, digest.hexdigest())


def _hash(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(_bytes(tokens, "<u4"), digest_size=8).digest())


def _key(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _bytes(array: np.ndarray, dtype: str) -> memoryview:
    return np.ascontiguousarray(array, dtype).data


def _compact(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    return tokens.astype(np.uint16 if vocab_size <= 2 ** 16 else np.int32, copy=False)


def _arrays(raw: BinaryIO) -> dict[str, np.ndarray]:
    """The arrays of a .npz file; the tokens memory mapped, which numpy itself offers for .npy files only."""
    with zipfile.ZipFile(raw) as archive:
        def array(name: str, mapped: bool = False) -> np.ndarray:
            info = archive.getinfo(f"{name}.npy")
            with archive.open(info) as member:
                np.lib.format.read_magic(member)
                shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                if not mapped or info.compress_type != zipfile.ZIP_STORED or dtype.kind not in "iu" or 0 in shape:
                    member.seek(0)
                    return np.lib.format.read_array(member, allow_pickle=False)
                raw.seek(info.header_offset + 26)       # a local header: 30 bytes, then a name and an extra field
                offset = info.header_offset + 30 + sum(np.frombuffer(raw.read(4), "<u2").tolist()) + member.tell()
                return np.memmap(raw, dtype, "r", offset, shape)

        names = {name.removesuffix(".npy") for name in archive.namelist()} & {"starts", "prompts", "digest"}
        return {"tokens": array("tokens", mapped=True), "starts": array("starts"), **{n: array(n) for n in names}}


def _blocks(paths: Sequence[Path], tokenizer: Tokenizer | None, vocab_size: int) -> Iterator[_Block]:
    for kind, group in itertools.groupby(paths, documents.kind):
        if kind in documents.TOKENS:
            yield from (_token_file(path, vocab_size) for path in group)
        elif tokenizer is None:
            raise ValueError(f"{next(group)} is text, but the model has no tokenizer: give token files")
        else:
            texts = itertools.chain.from_iterable(map(documents.read, group))
            for ids, prompt in tokenize.encode(texts, tokenizer, literal=kind not in documents.ROWS):
                top = ids.max(initial=0)
                if top >= vocab_size:
                    raise ValueError(f"the tokenizer gave the id {top}, but the vocabulary has {vocab_size} tokens: "
                                     "they do not belong together")
                yield _Block(_compact(ids, vocab_size), [len(ids)], [prompt])


def _token_file(path: Path, vocab_size: int) -> _Block:
    if path.suffix == ".npz":
        tokens, starts, prompts, _ = load(path)
        block = _Block(tokens, np.diff(starts), prompts)
    else:
        try:
            ids = np.load(path, "r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is damaged or holds no plain array ({' '.join(str(error).split())})") from None
        if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
            raise ValueError(f"{path} has an array of shape {ids.shape} and type {ids.dtype}: expected integers [N] or "
                             "[D, N]")
        rows, length = (1, *ids.shape)[-2:]
        block = _Block(ids.reshape(-1), np.full(rows, length), np.zeros(rows, np.int32))
    if not len(block.tokens):
        raise ValueError(f"{path} is empty: expected token ids")
    for i in (block.tokens.min(), block.tokens.max()):
        if not 0 <= i < vocab_size:
            raise ValueError(f"{path} holds the id {i}, but the vocabulary has {vocab_size} tokens: it was made with "
                             "another tokenizer")
    return block._replace(tokens=_compact(block.tokens, vocab_size))


def _first(block: _Block, limit: int | None) -> _Block:
    """The first documents."""
    lengths = block.lengths[:limit]
    return block if len(lengths) == len(block.lengths) else _Block(
        block.tokens[:int(np.sum(lengths))], lengths, block.prompts[:limit])
