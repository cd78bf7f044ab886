"""Every number of a benchmark, defined once (`DEFINITIONS` says them in words).

A record is what was measured of one unit: prompts decoded together, once, by all methods in turn. Ratios pair only
what one record holds, so both sides come from the same process, seconds apart.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from parallax.benchmark.settings import REFERENCE

Record = dict[str, Any]

DEFINITIONS = {
    "tokens": "emitted tokens up to and including end of text, of all prompts and repeats; never padding.",
    "forwards": "calls of the target in the decoding loop, prefill apart, per sequence.",
    "TPF": "tokens per target forward. It is not speed: a step with drafts costs more than a plain one.",
    "speedup": "time per token of plain decoding over that of the method, on the same prompts in the same process, "
               "both warm, in alternation; prefill and compile time apart. With equal tokens it is the ratio of the "
               "times. The total weighs prompts by their tokens, the median is over the ratios of single runs.",
    "10-90 %": "the 10th and the 90th percentile over prompts and repeats.",
    "step cost": "time per step of the method over that of plain decoding. One prompt at a time, speedup is TPF over "
                 "step cost, so this is also the TPF at which the method breaks even.",
    "expected speedup": "what the cost model says: tokens per forward over the plain steps that a step takes, which "
                        "are the target's forward over the block's rows and the drafting, both measured apart.",
    "break-even": "accepted draft tokens per forward from which on a method gains, by the same model.",
    "acceptance": "accepted over proposed draft tokens, those that a limit or end of text then cut included; by depth: "
                  "of the steps that had a token to offer there.",
    "accepted per forward": "draft tokens accepted by one target forward, the target's own token not counted.",
    "rows per forward": "block rows that one target forward computed: the compute that was paid.",
    "distinct 4-grams": "different over all 4-grams of an output, mean over outputs: a text that loops accepts "
                        "everything.",
    "tokens equal": "prompts whose tokens are those of plain decoding in every repeat. Methods of class `distribution` "
                    "keep the law of plain sampling, not its tokens: they show `law`.",
    "time": "per token: prefill; what as many plain one-row steps of the target take; the rest: drafting, wider "
            "blocks, verifying.",
    "guarantee": "exact: the tokens of plain decoding, greedy or seeded. distribution: the law of plain sampling. "
                 "stepwise: the tokens of a named stepwise reference. lossy: neither. In bfloat16 a near-tie of two "
                 "tokens may fall to either side.",
}


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Equality:
    """`same` of `of` prompts have the tokens of plain decoding. `expected`: False for a class that keeps only the law.

    The first difference: `file`, `prompt` (its place in the file), `token`, and `gap`, how far apart the logits of the
    two tokens are there (None when sampling).
    """

    expected: bool
    same: int
    of: int
    file: str | None = None
    prompt: int | None = None
    token: int | None = None
    gap: float | None = None


@dataclasses.dataclass(frozen=True)
class Shares:
    """Milliseconds per token: prefill, as many plain one-row steps, and what came on top of them (may be negative)."""

    prefill: float
    plain: float
    rest: float


@dataclasses.dataclass(frozen=True)
class Numbers:
    """One method on one prompt file, or on all (`prompts` None). What a method does not have or count is None."""

    prompts: str | None
    method: str
    guarantee: str | None
    prompt_count: int
    runs: int
    tokens: int
    forwards: int | None
    rows: int | None
    draft_forwards: int | None
    tokens_per_forward: float | None
    speedup: float
    speedup_by_run: Spread
    step_cost: float | None
    ms_per_token: Spread
    tokens_per_second: float
    prefill_ms: Spread
    compile_seconds: float
    shares: Shares | None
    acceptance: float | None
    acceptance_at: tuple[float | None, ...]
    accepted_per_forward: float | None
    accepted_steps: tuple[int, ...]             # steps that accepted exactly 0, 1, 2, ... draft tokens
    distinct_4grams: float | None
    equal: Equality | None
    expected_speedup: float | None = None       # by the cost model, with the accepted tokens from which a step gains
    break_even: float | None = None
    why: str | None = None                      # in words


def results(records: Sequence[Record], labels: Sequence[str]) -> list[Numbers]:
    """Numbers of every method: per prompt file in order of appearance, then over all files if there are several."""
    files = list(dict.fromkeys(record["prompts"] for record in records))
    groups = [(file, [r for r in records if r["prompts"] == file]) for file in files]
    groups += [(None, list(records))] if len(files) > 1 else []
    return [numbers(group, label, file) for file, group in groups for label in labels]


def numbers(records: Sequence[Record], label: str, file: str | None) -> Numbers:
    """Of one method over the records of one prompt file."""
    runs = [record["runs"][label] for record in records]
    plain = [record["runs"][REFERENCE] for record in records]
    tokens, decode = sum(map(_tokens, runs)), sum(run["decode"] for run in runs)
    counted = all(run["forwards"] is not None for run in runs)
    forwards = sum(sum(run["forwards"]) for run in runs) if counted else None
    rows, accepted, proposed, draft_forwards = (
        _total(run[key] for run in runs) for key in ("rows", "accepted", "proposed", "draft_forwards"))
    accepted_at, proposed_at = (_levels(run[key] for run in runs) for key in ("accepted_at", "proposed_at"))
    ratios = [_per_token(theirs) / _per_token(ours) for ours, theirs in zip(runs, plain)]
    outputs = [grams for run in runs for ids in run["ids"] if (grams := distinct_4grams(ids)) is not None]
    plain_step = sum(run["decode"] for run in plain) / sum(map(_steps, plain))
    # Prompts decoded together share their steps; what one plain step of the same prompts takes is known per record.
    as_plain = sum(_steps(ours) * theirs["decode"] / _steps(theirs) for ours, theirs in zip(runs, plain)) \
        if counted else None
    prefill = sum(run["prefill"] for run in runs)
    return Numbers(
        prompts=file, method=label, guarantee=runs[0]["guarantee"],
        prompt_count=len({(r["prompts"], i) for r in records for i in r["index"]}), runs=len(runs), tokens=tokens,
        forwards=forwards, rows=rows, draft_forwards=draft_forwards,
        tokens_per_forward=tokens / forwards if counted else None,
        speedup=sum(run["decode"] for run in plain) / sum(map(_tokens, plain)) * tokens / decode,
        speedup_by_run=spread(ratios),
        step_cost=decode / sum(map(_steps, runs)) / plain_step if counted else None,
        ms_per_token=spread([1e3 * _per_token(run) for run in runs]), tokens_per_second=tokens / decode,
        prefill_ms=spread([1e3 * run["prefill"] for run in runs]),
        compile_seconds=sum(run["compile"] for run in runs),
        shares=Shares(*(1e3 * part / tokens for part in (prefill, as_plain, decode - as_plain))) if counted else None,
        acceptance=accepted / proposed if proposed else None,
        acceptance_at=tuple(a / p if p else None for a, p in zip(accepted_at, proposed_at)),
        accepted_per_forward=accepted / forwards if counted and proposed else None,
        accepted_steps=histogram(forwards, accepted_at) if counted and proposed else (),
        distinct_4grams=statistics.mean(outputs) if outputs else None,
        equal=None if label == REFERENCE else equality(records, label))


def by_prompt(records: Sequence[Record], labels: Sequence[str]) -> list[dict[str, Any]]:
    """Tokens per forward and median speedup of each method on each prompt (or prompts decoded together)."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault((record["prompts"], tuple(record["index"])), []).append(record)
    rows = []
    for (file, index), group in groups.items():
        for label in labels:
            one = numbers(group, label, file)
            rows.append({"prompts": file, "index": list(index), "method": label,
                         "tokens_per_forward": one.tokens_per_forward, "speedup": one.speedup_by_run.median})
    return rows


def equality(records: Sequence[Record], label: str) -> Equality:
    """Compares the tokens of a method with those of plain decoding."""
    prompts, different = set(), {}
    for record in records:
        ours, theirs = record["runs"][label]["ids"], record["runs"][REFERENCE]["ids"]
        gaps = record["gaps"].get(label, [None] * len(ours))
        for place, a, b, gap in zip(record["index"], ours, theirs, gaps):
            prompt = (record["prompts"], place)
            prompts.add(prompt)
            at = parting(a, b)
            if at is not None:
                different.setdefault(prompt, (*prompt, at, gap))
    expected = records[0]["runs"][label]["guarantee"] != "distribution"
    return Equality(expected, len(prompts) - len(different), len(prompts), *next(iter(different.values()), ()))


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Where two outputs part; None if they are equal."""
    if list(ours) == list(theirs):
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def histogram(forwards: int, accepted_at: Sequence[int]) -> tuple[int, ...]:
    """Steps that accepted exactly 0, 1, ... draft tokens; `accepted_at[d - 1]` steps accepted at least d."""
    at_least = [forwards, *accepted_at, 0]
    return tuple(a - b for a, b in zip(at_least, at_least[1:]))


def distinct_4grams(ids: Sequence[int]) -> float | None:
    """Different over all 4-grams; None for an output that has none."""
    grams = list(zip(*(ids[i:] for i in range(4))))
    return len(set(grams)) / len(grams) if grams else None


def spread(values: Iterable[float]) -> Spread:
    low, median, high = np.percentile(list(values), [10, 50, 90])
    return Spread(float(median), float(low), float(high))


def _tokens(run) -> int:
    return sum(map(len, run["ids"]))


def _per_token(run) -> float:
    return run["decode"] / _tokens(run)


def _steps(run) -> int:
    """Steps of the loop, which goes on until the last of its prompts is done."""
    return max(run["forwards"])


def _total(values: Iterable[int | None]) -> int | None:
    values = list(values)
    return None if None in values else sum(values)


def _levels(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(at) for at in zip(*rows)]
