"""What the cost model says of the methods of a benchmark: see `parallax.costs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from parallax import costs
from parallax.benchmark.numbers import Numbers
from parallax.benchmark.settings import REFERENCE, Settings
from parallax.decoding import method
from parallax.generate import LanguageModel

Found = Mapping[str, Mapping[str, float]]


def measured(lm: LanguageModel, settings: Settings) -> dict[str, dict[str, float]]:
    """Of every method but plain decoding: `block` rows of a whole draft; milliseconds of a `plain` forward, of the
    `target` over a block, and of `drafting`."""
    law = {key: value for key, value in settings.decoding.items() if key != "max_new_tokens"}
    found = {}
    for contender in settings.contenders:
        if contender.name == REFERENCE:
            continue
        decoder = lm.decoder(contender.name, contender.options, verifier=contender.verifier, **law)
        params = lm.params if method(contender.name).needs_draft else {"target": lm.params["target"]}
        block = costs.block_rows(decoder, params, settings.batch_size)
        target = costs.measure(lm.model, params["target"], settings.batch_size, (block,))
        found[contender.label] = {"block": block, "plain": target.at(1), "target": target.at(block),
                                  "drafting": costs.draft_ms(decoder, params, settings.batch_size)}
    return found


def added(numbers: Numbers, found: Found) -> Numbers:
    """With what the cost model expects of the tokens per forward and the rows per forward that were counted."""
    cost = found.get(numbers.method)
    if cost is None or not numbers.forwards:
        return numbers
    block = int(cost["block"])
    target = costs.Costs((1, block), (cost["plain"], cost["target"])) if block > 1 else \
        costs.Costs((1,), (cost["plain"],))
    rows = numbers.rows / numbers.forwards
    spent = costs.mixed_ms(target, rows, block), cost["drafting"]
    return dataclasses.replace(
        numbers, expected_speedup=costs.expected_speedup(numbers.tokens_per_forward, *spent, target),
        break_even=costs.break_even(*spent, target),
        why=costs.explain(numbers.tokens_per_forward, rows, *spent, target))
