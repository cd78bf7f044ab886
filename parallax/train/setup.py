"""From a training config to the parts of a run: tokenizer, target, objective, corpus.

All that can be wrong with them is found here, before anything is written.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax import sharding, zoo
from parallax.checkpoint import Checkpoint
from parallax.generate import check_vocabularies
from parallax.models import Model, ModelConfig
from parallax.models.config import nearest
from parallax.tokenizer import FileTokenizer, Tokenizer
from parallax.train import corpus, tokenize
from parallax.train.corpus import Corpus
from parallax.train.objectives import OBJECTIVES, Objective


class Parts(NamedTuple):
    """What a run is made of. `target` and `start` (parameters to begin from) may be None, and so may the tokenizer of a
    drafter whose target has none. `target_digest`: sha256 of the target's weights."""

    objective: Objective
    tokenizer: Tokenizer | None
    target: Checkpoint | None
    target_digest: str | None
    start: Any
    texts: Corpus


def parts(values: dict[str, Any], workdir: pathlib.Path) -> Parts:
    """The parts that a config's values name; the tokenizer is `workdir`'s, if that has one already.

    Raises:
      ValueError, OSError: something is unknown, unreadable, or does not fit the rest.
    """
    cls = _objective(values)
    target = zoo.load(values["target"], dtype=values["dtype"]) if cls.needs_target else None
    start = zoo.load(values["init"], dtype="float32") if values["init"] else None
    tokenizer = _tokenizer(values, workdir, target, start)
    config = _model(values, tokenizer, target, start).replace(dtype=values["dtype"])
    objective = cls.from_config(Model(config), target and Model(target.config), values)
    source = values["data"]
    texts = corpus.cached(zoo.cache() / "corpora", source["source"], tokenizer, vocab_size=config.vocab_size,
                          glob=source["glob"], limit=source["limit"])
    digest = target and weights_digest(target.params)
    if digest is not None:
        _check_author(source["source"], digest)
    return Parts(objective, tokenizer, target, digest, start and start.params, texts)


def weights_digest(params: Any) -> str:
    """sha256 of parameters, whatever type they are kept in."""
    return corpus.digest_of(jax.tree.map(lambda x: np.asarray(x, np.float32), params))


def build(cls: type, values: dict[str, Any], where: str) -> Any:
    """A dataclass from the config's values; an unknown field is named with the nearest known one."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise ValueError(f"{where}.{name} is not known: expected one of {', '.join(known)}{nearest(name, known)}")
    return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


def check_numbers(values: dict[str, Any], mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError for numbers out of range."""
    rows, micro = values["batch_size"], values["accumulate"]
    if rows < 1 or rows % micro:
        raise ValueError(f"batch_size={rows} must be a positive multiple of accumulate={micro}")
    sharding.check_batch(rows // micro, mesh)
    for name, least in (("sequence_length", 2), ("keep", 1), ("keep_every", 0), ("eval_batches", 0),
                        ("eval_prompts", 0), ("eval_prompt_length", 1), ("eval_new_tokens", 1)):
        if values[name] < least:
            raise ValueError(f"{name} must be at least {least}, got {values[name]}")
    if values["data"]["limit"] < 0:
        raise ValueError(f"data.limit must be at least 0, got {values['data']['limit']}")
    if not 0 <= values["seed"] < 2 ** 32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {values['seed']}")


def resolve_dtype(name: str) -> str:
    """The type to compute in: `auto` is float32 on CPU, where XLA's bfloat16 products are slower, else bfloat16."""
    if name == "auto":
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"unknown dtype {name!r}: expected auto, float32 or bfloat16{nearest(name, ('bfloat16',))}")
    return name


def _objective(values: dict[str, Any]) -> type:
    name = values["objective"]
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}: expected one of {', '.join(OBJECTIVES)}"
                         f"{nearest(name, OBJECTIVES)}")
    if OBJECTIVES[name].needs_target and not values["target"]:
        raise ValueError(f"objective {name} needs a target: set --config.target to a zoo name, a folder, a .gguf file "
                         "or a Hub id")
    if values["target"] and not OBJECTIVES[name].needs_target:
        raise ValueError(f"objective {name} trains a target and has none: leave `target` empty, or name the weights to "
                         "start from in `init`")
    return OBJECTIVES[name]


def _tokenizer(values, workdir: pathlib.Path, target: Checkpoint | None, start: Checkpoint | None) -> Tokenizer | None:
    owner = target or start
    if owner is not None:
        if values["tokenizer"]:
            raise ValueError(f"tokenizer={values['tokenizer']!r} has no use here: it is that of the "
                             f"{'target' if target else 'checkpoint in `init`'}, leave it empty")
        if target and start:
            check_vocabularies(target, start)
        return owner.tokenizer
    if (workdir / "tokenizer" / "tokenizer.json").is_file():
        return FileTokenizer.from_folder(workdir / "tokenizer")
    source = values["data"]
    return tokenize.build(values["tokenizer"] or "bytes",
                          corpus.texts(source["source"], glob=source["glob"], limit=source["limit"]))


def _model(values, tokenizer, target: Checkpoint | None, start: Checkpoint | None) -> ModelConfig:
    if start is not None:
        config = start.config
    else:
        size = target.config.vocab_size if target else tokenizer.vocab_size
        config = build(ModelConfig, {**values["model"], "vocab_size": values["model"]["vocab_size"] or size}, "model")
    if tokenizer is not None and config.vocab_size < tokenizer.vocab_size:
        raise ValueError(f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} "
                         "tokens: leave it at 0, which takes the tokenizer's")
    for whose, longest in (("model", config.max_positions), ("target", target and target.config.max_positions)):
        if longest and values["sequence_length"] > longest:
            raise ValueError(f"sequence_length={values['sequence_length']} is longer than the {whose}'s "
                             f"max_positions={longest}")
    evaluated = values["eval_prompt_length"] + values["eval_new_tokens"]
    if target and values["eval_prompts"] and evaluated > target.config.max_positions:
        raise ValueError(f"eval_prompt_length + eval_new_tokens = {evaluated} is longer than the target's "
                         f"max_positions={target.config.max_positions}")
    return config


def _check_author(sources: tuple[str, ...], digest: str) -> None:
    """Warns of text that another target wrote: a drafter learns less from it."""
    for source in sources:
        try:
            wrote = json.loads((pathlib.Path(source) / "config.json").read_text(encoding="utf-8"))["target"]
        except (OSError, ValueError, KeyError, TypeError):
            continue                                       # not written by a target, or not by us
        if wrote != digest:
            print(f"warning: the text in {source} was written by another target ({wrote[:12]}) than the one to draft "
                  f"for ({digest[:12]}): let that one write its own, see configs/train/selfgen.py", file=sys.stderr)
