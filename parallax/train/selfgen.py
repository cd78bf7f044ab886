"""Training text that a target writes itself, in batches, resumable.

A drafter is best trained on what its target writes: the text has the target's own law, and no other corpus needs to be
licensed. Parts of a fixed number of texts are written one by one, each as a whole or not at all; the noise of a text
depends on its number alone, so a run that was stopped goes on behind its last part with the very texts that it would
have written.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from parallax import zoo
from parallax.benchmark.numbers import distinct_4grams
from parallax.decoding.sampling import make_sampler
from parallax.generate import LanguageModel
from parallax.settings import complete
from parallax.train import corpus, data, defaults
from parallax.train.corpus import Corpus
from parallax.train.setup import weights_digest
from parallax.train.workdir import Workdir

_FREE = ("count", "batch_size")         # more texts may be asked for later; the batch changes no text


def main(config: Any, workdir: pathlib.Path) -> None:
    """Writes `count` texts to workdir/part-*.npz, which `data.source` of a training config reads.

    Raises:
      ValueError: bad input, before anything is written.
      OSError: a part cannot be written.
    """
    values = complete(config.to_dict(), defaults.get_generate_config().to_dict())
    make_sampler(values["temperature"], values["top_k"], values["top_p"])
    for name in ("count", "max_new_tokens", "batch_size", "shard"):
        if values[name] < 1:
            raise ValueError(f"{name} must be at least 1, got {values[name]}")
    if not 0 <= values["seed"] < 2 ** 32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {values['seed']}")
    if not values["target"]:
        raise ValueError("generation needs a target: set --config.target to a zoo name, a folder, a .gguf file or a "
                         "Hub id")
    folder = Workdir(workdir, values, _FREE)
    zoo.use_compile_cache()
    lm = LanguageModel.load(values["target"])
    prompts = _prompts(values, lm)
    given, longest = max(map(len, prompts)), lm.model.config.max_positions
    if given + values["max_new_tokens"] > longest:
        raise ValueError(f"prompts of up to {given} tokens and max_new_tokens={values['max_new_tokens']} are together "
                         f"more than the target's {longest} positions: shorten one of them")
    folder.claim(target=weights_digest(lm.params["target"]), corpus=corpus.digest_of(prompts[:values["shard"]]))
    parts = -(-values["count"] // values["shard"])
    bar = tqdm(total=values["count"], unit="text", disable=not sys.stderr.isatty())
    with bar:
        for part in range(parts):
            path = workdir / f"part-{part:05d}.npz"
            rows = range(part * values["shard"], min((part + 1) * values["shard"], values["count"]))
            if _texts(path) >= len(rows):
                bar.update(len(rows))
            else:
                corpus.save(path, _write(lm, values, prompts, rows, bar))
    Console(stderr=True).print(_summary(workdir, parts))


def _texts(path: pathlib.Path) -> int:
    """How many texts a part holds; a part that is not there or damaged holds none."""
    try:
        return len(corpus.load(path).prompts)
    except (FileNotFoundError, ValueError):
        return 0


def _prompts(values: dict[str, Any], lm: LanguageModel) -> list[list[int]]:
    head, part, size = list(values["prompt_ids"]), values["data"], lm.model.config.vocab_size
    for i in head:
        if not isinstance(i, int) or not 0 <= i < size:
            raise ValueError(f"prompt_ids holds {i!r}: expected token ids from 0 to {size - 1}")
    if not part["source"]:
        if not head:
            raise ValueError("there is nothing to start from: set data.source, or prompt_ids such as the BOS token")
        return [head] * values["count"]
    texts = corpus.cached(zoo.cache() / "corpora", part["source"], lm.tokenizer, vocab_size=size, glob=part["glob"],
                          limit=part["limit"])
    train, _ = corpus.split(texts, part["held_out"])
    return [head + ids for ids in data.prompts(train, values["count"], values["prompt_length"], seed=values["seed"])]


def _write(lm: LanguageModel, values: dict[str, Any], prompts: list[list[int]], rows: range, bar: tqdm) -> Corpus:
    run = lm.generate([prompts[i] for i in rows], method="autoregressive", max_new_tokens=values["max_new_tokens"],
                      temperature=values["temperature"], top_k=values["top_k"] or None, top_p=values["top_p"],
                      seed=values["seed"], batch_size=values["batch_size"], row_ids=list(rows),
                      on_completion=lambda *_: bar.update())
    return corpus.from_documents([(list(c.prompt_ids) + list(c.ids), len(c.prompt_ids)) for c in run.completions])


def _summary(workdir: pathlib.Path, parts: int) -> Table:
    loaded = [corpus.load(workdir / f"part-{i:05d}.npz") for i in range(parts)]
    written = sum(len(c.tokens) - int(c.prompts.sum()) for c in loaded)
    grams = [distinct_4grams(c.tokens[c.starts[i] + c.prompts[i]:c.starts[i + 1]].tolist())
             for c in loaded for i in range(len(c.prompts))]
    grams = [share for share in grams if share is not None]
    table = Table("texts", "tokens written", "distinct 4-grams", "in")
    table.add_row(f"{sum(len(c.prompts) for c in loaded):,}", f"{written:,}",
                  f"{np.mean(grams):.2f}" if grams else "-", str(workdir))
    return table
