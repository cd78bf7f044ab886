"""Checkpoints on disk: Hugging Face folders, read and written, and .gguf files, read."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.tree_util
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from parallax.models import families, gguf, gguf_tokenizer, weights
from parallax.models.config import ModelConfig, nearest
from parallax.tokenizer import FileTokenizer, Tokenizer, read_json

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_INDEX = "model.safetensors.index.json"
_VOCABULARY = "draft_vocab.json"        # the ids of the rows of a head that has fewer than the vocabulary


class Checkpoint(NamedTuple):
    """A model with what belongs to it.

    config     the architecture
    params     the parameter tree of `Model`, numpy arrays
    tokenizer  or None
    eos_ids    the tokens that end a text
    """

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]


def load(source: str | Path, *, dtype: str | None = None, scan_layers: bool = False,
         tokenizer: bool = True, put: Callable[[np.ndarray], Any] = np.asarray) -> Checkpoint:
    """Reads a checkpoint, one tensor at a time.

    Args:
      source: a Hugging Face folder, a .gguf file, or a folder with one .gguf file.
      dtype: `float32` or `bfloat16`; by default what the checkpoint has, float32 for float16 and quantised ones.
      scan_layers: stacks the leaves of the layers, as scanned layers want them, instead of tuples of arrays.
      tokenizer: whether to read the tokenizer too.
      put: takes each leaf to where it shall live as soon as it is read (`jnp.asarray`: to the device).

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or asks for something that is not supported.
    """
    if dtype is not None:
        _check_dtype(dtype, ("float32", "bfloat16"))
    source = Path(source)
    if source.is_dir() and not (source / "config.json").exists():
        found = sorted(source.glob("*.gguf"))
        if len(found) > 1:
            raise ValueError(f"{source} holds {len(found)} .gguf files: pass one of them, such as {found[0]}")
        source = found[0] if found else source
    if source.suffix == ".gguf":
        result = _load_gguf(source, dtype, tokenizer, np.asarray if scan_layers else put)
    elif source.is_dir():
        result = _load_folder(source, dtype, tokenizer, np.asarray if scan_layers else put)
    elif not source.exists():
        raise FileNotFoundError(f"{source} not found: expected a Hugging Face folder or a .gguf file")
    else:
        _refuse_pickle([source], source.parent)
        raise ValueError(f"{source} is neither a Hugging Face folder nor a .gguf file")
    for i in result.eos_ids:
        if not 0 <= i < result.config.vocab_size:
            raise ValueError(f"{source} names the end token {i}, but the vocabulary has {result.config.vocab_size} "
                             "tokens")
    if scan_layers:
        def whole(leaf):
            return put(np.stack(leaf) if isinstance(leaf, tuple) else leaf)

        params = jax.tree_util.tree_map(whole, result.params, is_leaf=lambda leaf: isinstance(leaf, tuple))
        result = result._replace(config=result.config.replace(scan_layers=True), params=params)
    return result


def _load_gguf(path: Path, dtype: str | None, want_tokenizer: bool, put) -> Checkpoint:
    file = gguf.read(path)
    try:
        config = families.from_hf(gguf.config(file))
        tokenizer = gguf_tokenizer.build(file.metadata) if want_tokenizer else None
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    if tokenizer is not None:
        tokenizer = tokenizer.limited(config.vocab_size)
    config = config.replace(dtype=dtype or ("bfloat16" if gguf.is_bfloat16(file) else "float32"))
    params = weights.assemble(config, *gguf.tensors(file), DTYPES[config.dtype], put)
    eos = [file.metadata[name] for name in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
           if name in file.metadata]
    return Checkpoint(config, params, tokenizer, tuple(dict.fromkeys(eos)))


def _load_folder(folder: Path, dtype: str | None, want_tokenizer: bool, put) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'} not found: expected a Hugging Face folder with config.json, "
                                "*.safetensors and tokenizer.json, or a .gguf file")
    values = read_json(folder / "config.json")
    config = families.from_hf(values)
    names, get, stored = _open_tensors(folder, families.family_of(config) == "gpt2", "text_config" in values)
    config = config.replace(dtype=dtype or ("bfloat16" if stored == "BF16" else "float32"))
    tokenizer = None
    if want_tokenizer and (folder / "tokenizer.json").is_file():
        tokenizer = FileTokenizer.from_folder(folder).limited(config.vocab_size)
    params = weights.assemble(config, names, get, DTYPES[config.dtype], put)
    if config.draft_vocab:
        params["d2t"] = put(_draft_vocabulary(folder / _VOCABULARY, config))
    return Checkpoint(config, params, tokenizer, _eos_ids(folder, values, tokenizer))


def _draft_vocabulary(path: Path, config: ModelConfig) -> np.ndarray:
    ids = read_json(path).get("ids", [])
    flat = isinstance(ids, list) and all(isinstance(token, int) for token in ids)
    found = np.asarray(ids if flat else [])
    ascending = found.dtype.kind == "i" and np.array_equal(found, np.unique(found))
    if not ascending or len(found) != config.draft_vocab or not 0 <= found[0] <= found[-1] < config.vocab_size:
        raise ValueError(f"{path} must hold as 'ids' {config.draft_vocab} ascending tokens below {config.vocab_size}, "
                         f"as config.json says, got {str(ids)[:40]}")
    return found.astype(np.int32)


def _eos_ids(folder: Path, values: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    for place in (read_json(folder / "generation_config.json"), values, values.get("text_config", {})):
        eos = place.get("eos_token_id")
        if eos is not None:
            return tuple(eos) if isinstance(eos, list) else (eos,)
    return tokenizer.eos_ids if tokenizer is not None else ()


def _open_tensors(folder: Path, gpt2: bool, vision: bool) -> tuple[set[str], Callable[[str], np.ndarray], str]:
    """(names, get, stored type of the embedding) over all shards, under the names of `weights.table`."""
    index = read_json(folder / _INDEX).get("weight_map")
    if index is not None:
        files = [folder / Path(name).name for name in dict.fromkeys(index.values())]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            _refuse_pickle([path for pattern in _PICKLES for path in folder.glob(pattern)], folder)
            raise FileNotFoundError(f"{folder} has no *.safetensors: expected model.safetensors, or shards with "
                                    f"{_INDEX}")
        if len(files) > 1:
            raise ValueError(f"{folder} has {len(files)} *.safetensors but no {_INDEX} that says how they belong "
                             "together")
    where = {}
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path} not found, though {_INDEX} names it: fetch the missing shard")
        try:
            shard = safetensors.safe_open(path, "numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is damaged or incomplete ({' '.join(str(error).split())}): fetch it again"
                             ) from None
        for name in shard.keys():
            ours = _canonical(name, gpt2, vision)
            if ours is not None:
                where[ours] = shard, name, path
    embedding = where.get("transformer.wte.weight" if gpt2 else "model.embed_tokens.weight")
    stored = embedding[0].get_slice(embedding[1]).get_dtype() if embedding else "F32"

    def get(name: str) -> np.ndarray:
        shard, theirs, path = where[name]
        kind = shard.get_slice(theirs).get_dtype()
        if kind not in ("F32", "F16", "BF16"):
            raise ValueError(f"{path} stores {theirs!r} as {kind}, which is not supported (supported: F32, F16, BF16): "
                             "take a checkpoint that is not quantised")
        return shard.get_tensor(theirs)

    return set(where), get, stored


def _canonical(name: str, gpt2: bool, vision: bool) -> str | None:
    """The name as `weights.table` has it: base models lack the root, vision models wrap it and add towers."""
    if vision:
        name = name.replace("language_model.", "", 1)
        if name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
            return None
    root = "transformer." if gpt2 else "model."
    return name if name.startswith((root, "lm_head.")) else root + name


def _refuse_pickle(paths: list[Path], folder: Path) -> None:
    pickles = [path for path in paths if any(path.match(pattern) for pattern in _PICKLES)]
    if pickles:
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run any code when opened, so it is not read; convert it once where "
            f"you trust it: python -c \"from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\"")


def save(checkpoint: Checkpoint, folder: str | Path, *, dtype: str | None = None, max_shard_bytes: int = 5 * 2 ** 30,
         overwrite: bool = False) -> int:
    """Writes a Hugging Face folder that `transformers` loads too, all of it or nothing. Returns the bytes written.

    Args:
      checkpoint: what to write.
      folder: the destination.
      dtype: `float32`, `bfloat16` or `float16`, by default that of the config.
      max_shard_bytes: weights beyond this size are split over several files.
      overwrite: replaces a destination that is not empty.

    Raises:
      ValueError: the destination is not empty, or no Hugging Face family expresses this model.
      OSError: the disk is full or cannot be written.
    """
    folder = Path(folder).absolute()
    dtype = dtype or checkpoint.config.dtype
    _check_dtype(dtype, tuple(DTYPES))
    check_destination(folder, overwrite)
    config = families.to_hf(checkpoint.config) | {"torch_dtype": dtype}
    tokenizer, eos = checkpoint.tokenizer, list(checkpoint.eos_ids)
    ids = {"bos_token_id": tokenizer.bos_id if tokenizer is not None else None,
           "eos_token_id": eos[0] if len(eos) == 1 else eos or None}
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(folder, "new")
        temporary.mkdir()
        _write_json(temporary / "config.json", config | ids)
        _write_json(temporary / "generation_config.json", ids)
        if checkpoint.config.draft_vocab:
            _write_json(temporary / _VOCABULARY, {"ids": np.asarray(checkpoint.params["d2t"]).tolist()})
        _write_tensors(checkpoint, temporary, DTYPES[dtype], max_shard_bytes)
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.save(temporary)
        size = sum(path.stat().st_size for path in temporary.iterdir())
        _swap(temporary, folder)
    except (OSError, safetensors.SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise OSError(f"cannot write {folder}: {reason}; nothing was left behind") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return size


def check_destination(folder: Path, overwrite: bool) -> None:
    """Raises ValueError if `save` would refuse to write there, for those who work long before they save."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a new folder to write to")
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another destination, or allow overwriting it")


def _beside(folder: Path, what: str) -> Path:
    """An unused name on the same file system."""
    return folder.parent / f".{folder.name}-{what}-{os.getpid()}-{secrets.token_hex(4)}"


def _swap(temporary: Path, folder: Path) -> None:
    """Puts the finished folder in place; a folder that was there is kept until the new one stands."""
    if not folder.exists() or not any(folder.iterdir()):
        temporary.rename(folder)        # a rename replaces an empty folder
        return
    old = _beside(folder, "old")
    folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_tensors(checkpoint: Checkpoint, folder: Path, dtype: Any, max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    total, pending, size = 0, {}, 0

    def flush() -> None:
        shards.append(list(pending))
        safetensors.numpy.save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        pending.clear()

    for name, array in weights.disassemble(checkpoint.config, checkpoint.params):
        array = np.asarray(array, dtype)
        if pending and size + array.nbytes > max_shard_bytes:
            flush()
            size = 0
        pending[name] = array
        size, total = size + array.nbytes, total + array.nbytes
    flush()
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        _write_json(folder / _INDEX, {"metadata": {"total_size": total},
                                      "weight_map": {name: file for file, shard in zip(names, shards)
                                                     for name in shard}})
    for i, name in enumerate(names):
        (folder / f"shard-{i + 1}").rename(folder / name)
        # The library writes files for their owner only.
        (folder / name).chmod((folder / "config.json").stat().st_mode)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    kept = {name: value for name, value in values.items() if value is not None or name == "sliding_window"}
    path.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _check_dtype(dtype: str, known: tuple[str, ...]) -> None:
    if dtype not in known:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(known)}{nearest(dtype, known)}")
