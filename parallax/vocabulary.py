"""A reduced vocabulary for draft models: the head says only the tokens that texts are made of.

V vocabulary, Vd tokens kept, E hidden size.

The head is what a small draft model spends its time on, and most of its tokens hardly ever occur. A draft model whose
head has Vd rows gives all others the probability 0, and the rules that judge drawn drafts then draw them from what the
target has left over: any choice of tokens is exact, a bad one is slow. The embedding stays whole, so the draft model
reads every text. Sources: FR-Spec (arXiv:2502.14856) keeps the most frequent tokens of a corpus, VocabTrim
(arXiv:2506.22694) those of texts that the target wrote, which `count_tokens` is best given.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from parallax import checkpoint, prompts, zoo
from parallax.generate import check_vocabularies
from parallax.models import Block, Model, ModelConfig

STEP = 64                  # between the sizes that `choose` compares


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> Int[np.ndarray, "V"]:
    """How often every token occurs in `texts` of token ids.

    Raises:
      ValueError: there are no tokens, or one is not of the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        ids = np.asarray(text, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"the texts hold token {ids.max() if ids.min() >= 0 else ids.min()}, the vocabulary is 0 "
                             f"to {vocab_size - 1}: use the tokenizer of the draft model")
        counts += np.bincount(ids, minlength=vocab_size)
    if not counts.any():
        raise ValueError("the texts hold no tokens: give some that the target wrote, or that it is asked to continue")
    return counts


def choose(counts: Int[np.ndarray, "V"], *, coverage: float, keep: Sequence[int] = (),
           latency_ms: Callable[[int], float] | Mapping[int, float] | None = None) -> Int[np.ndarray, "Vd"]:
    """The tokens to keep, ascending: the most frequent ones, of equals the lower ids.

    Args:
      counts: of `count_tokens`.
      coverage: the share of all occurrences that must be kept, at least.
      keep: tokens that stay in any case: those that end a text.
      latency_ms: what a draft token costs with a head of so many rows, measured or modelled; of a table the sizes
        between two entries are interpolated. Without it the smallest vocabulary of the coverage is taken; with it the
        one, no smaller, with the greatest coverage minus latency, as a share of that with the whole vocabulary. The
        objective is that of Ben Shoham ("Balancing coverage and draft latency in vocabulary trimming", 2026); all sizes
        that are multiples of 64 are tried instead of sampled.

    Raises:
      ValueError: a coverage outside (0, 1], or a token outside the vocabulary.
    """
    size = len(counts)
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be in (0, 1], got {coverage}")
    for token in keep:
        if not 0 <= token < size:
            raise ValueError(f"token {token} is to be kept, but the vocabulary is 0 to {size - 1}")
    first = np.zeros(size, bool)
    first[list(keep)] = True
    order = np.lexsort((np.arange(size), -np.asarray(counts), ~first))                # kept ones, then by frequency
    covered = np.cumsum(counts[order]) / np.sum(counts)
    least = max(int(np.searchsorted(covered, coverage - 1e-12)) + 1, len(set(keep)))
    if latency_ms is None:
        return np.sort(order[:least]).astype(np.int32)
    if isinstance(latency_ms, Mapping):
        sizes = sorted(latency_ms)
        values = [latency_ms[at] for at in sizes]
        latency_ms = lambda at: float(np.interp(at, sizes, values))  # noqa: E731
    tried = sorted({least, *range(-(-least // STEP) * STEP, size, STEP), size})
    whole = latency_ms(size)
    best = max(tried, key=lambda at: covered[at - 1] - latency_ms(at) / whole)
    return np.sort(order[:best]).astype(np.int32)


def trim(config: ModelConfig, params: Any, ids: Int[np.ndarray, "Vd"]) -> tuple[ModelConfig, Any]:
    """(config, parameters) of the same model with a head for the tokens `ids` alone; all of them leave it as it is.

    Its logits stay [..., V], -inf for the tokens that were dropped, so it takes the place of the whole model anywhere.

    Raises:
      ValueError: ids that are no ascending tokens of the vocabulary, or a model that is trimmed already.
    """
    ids = np.asarray(ids)
    if config.draft_vocab:
        raise ValueError(f"the model is trimmed already, to {config.draft_vocab} tokens: trim the one it was made of")
    if not ids.size or not np.array_equal(ids, np.unique(ids)) or not 0 <= ids[0] <= ids[-1] < config.vocab_size:
        raise ValueError(f"expected ascending tokens from 0 to {config.vocab_size - 1}, got {str(ids)[:40]}")
    if len(ids) == config.vocab_size:
        return config, params
    head = params["embed"]["tokens"] if config.tie_embeddings else params["head"]
    xp = jnp if isinstance(head, jax.Array) else np
    return (config.replace(tie_embeddings=False, draft_vocab=len(ids)),
            {**params, "head": head[ids], "d2t": xp.asarray(ids, np.int32)})


def latencies(config: ModelConfig, params: Any, *, repeats: int = 20) -> dict[int, float]:
    """Milliseconds of one draft token on this machine, for heads of V, V / 2, V / 4, ... rows."""
    params, times, size = jax.tree.map(jnp.asarray, params), {}, config.vocab_size
    while size >= STEP or not times:
        trimmed, weights = trim(config, params, np.arange(size))
        model = Model(trimmed)

        def token(weights, model=model):
            one = jnp.zeros((1, 1), jnp.int32)
            out = model.forward(weights, Block(one, one, jnp.ones((1, 1), bool)), model.new_cache(1, STEP))
            return model.unembed(weights, out.hidden)

        run = jax.jit(token)
        run(weights).block_until_ready()
        spent = []
        for _ in range(repeats):
            began = time.perf_counter()
            run(weights).block_until_ready()
            spent.append(time.perf_counter() - began)
        times[size] = 1e3 * min(spent)
        size //= 2
    return times


def read_texts(path: str) -> list[str]:
    """The texts of a file: of a .jsonl(.gz) file what was written (`text`) if lines say so, else as `prompts.read`."""
    texts = prompts.read(path)
    if not path.removesuffix(".gz").endswith(".jsonl"):
        return texts
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    return [row["text"] if isinstance(row, dict) and isinstance(row.get("text"), str) else text
            for row, text in zip(rows, texts)]


def trim_checkpoint(draft: str, target: str, texts: str, out: str, *, coverage: float = 0.98, measure: bool = False,
                    overwrite: bool = False) -> str:
    """What `python -m parallax.trim` does: writes the trimmed draft model to `out` and says in a line what it kept.

    Raises:
      ValueError: settings or models that do not go together, before anything is written.
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be in (0, 1], got {coverage}")
    checkpoint.check_destination(Path(out).absolute(), overwrite)
    written = read_texts(texts)
    small, large = zoo.load(draft), zoo.load(target)
    check_vocabularies(large, small)
    tokenizer = large.tokenizer or small.tokenizer
    if tokenizer is None:
        raise ValueError(f"neither {target} nor {draft} has a tokenizer, which it takes to count the tokens of texts")
    size = small.config.vocab_size
    counts = count_tokens((tokenizer.encode(text) for text in written), size)
    keep = tuple(dict.fromkeys((*large.eos_ids, *small.eos_ids)))
    table = latencies(small.config, small.params) if measure else None
    ids = choose(counts, coverage=coverage, keep=keep, latency_ms=table)
    config, params = trim(small.config, small.params, ids)
    checkpoint.save(small._replace(config=config, params=params), out, overwrite=overwrite)
    head = f", {np.interp(len(ids), *zip(*sorted(table.items()))) / table[size]:.0%} of its time" if table else ""
    return (f"{draft}: {len(ids):,} of {size:,} tokens kept{head}, {counts[ids].sum() / counts.sum():.2%} of the "
            f"{counts.sum():,} in {texts}; written to {out}")
