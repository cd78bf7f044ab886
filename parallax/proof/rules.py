"""Acceptance rules by themselves: exact enumeration over toy tables, and the negative controls.

V = 3 tokens, drafts of depth 2, the tree shapes 2x1, 1x2, 2x2 and the chain, siblings drawn with and without
replacement wherever the rule takes such drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from parallax.decoding import VERIFIERS, Sample, Speculative, spec
from parallax.decoding.base import Draft, Verifier
from parallax.decoding.verify import Dropout
from parallax.proof import law
from parallax.proof.record import CAUGHT, CONTROL, LAW, RULE, Record, Task
from parallax.testing import MarkovModel, markov_law, run_many
from parallax.testing.enumerate import Source, enumerate_law, levels, random_tables
from parallax.testing.oracle import SampledDrafter

_PROMPT = [0, 1, 2, 0]

REPLACEMENT = " with replacement"
QUICK = ("chain", "2x1", "2x2")
SHAPES = {"chain": (1, 1), "2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2)}
TABLES, QUICK_TABLES = 24, 6


def plan(texts: Sequence[str], quick: bool) -> Iterator[Task]:
    """The enumerations of every verifier that `texts` name, in all forms of draft that it takes."""
    for text in texts:
        rule, largest = spec.build(text, VERIFIERS, "verifier", sampler=Sample()), None
        for name in QUICK if quick else SHAPES:
            widths = SHAPES[name]
            # Rules without `judge` are asked for all tokens that could be drawn at every node by itself, which are many
            # for a 2x2. They do not ask how siblings were drawn.
            judges = hasattr(rule, "judge")
            if quick and not judges and name == "2x2":
                continue
            count = QUICK_TABLES if quick else TABLES
            for replacement in (False, True) if max(widths) > 1 and judges else (False,):
                source = Source(levels(*widths), replacement)
                if takes(rule, source):
                    check = f"enumerated {name}" + REPLACEMENT * replacement
                    largest = source
                    if not isinstance(rule, Dropout):         # it looks at the model, which tables have not
                        yield Task(f"{text}: {check}", functools.partial(enumerated, text, rule, source, check, count),
                                   functools.partial(Record, RULE, "", text, rule.guarantee, check, False, {}))
        yield Task(f"{text}: law", functools.partial(law_in_the_loop, text, rule, largest, 4000 if quick else 20000),
                   functools.partial(Record, RULE, "", text, rule.guarantee, "law", False, {}))


def takes(rule: Verifier, source: Source) -> bool:
    """Whether the rule verifies such drafts; some only see it when they judge."""
    kind = "sampled" if "sampled" in rule.kinds else rule.kinds[0]
    size, inner = len(source.shape.parents), 1 + max(source.shape.parents)
    draft = Draft(jnp.zeros((1, size), jnp.int32), source.shape.parents, jnp.ones((1, size), bool),
                  depth=source.shape.depth, kind=kind, replacement=source.replacement,
                  logq=jnp.zeros((1, inner, 3)) if kind == "sampled" else None)
    try:
        rule.check(draft)
        if hasattr(rule, "judge"):
            jax.eval_shape(functools.partial(rule.judge, draft), jnp.zeros((1, size, 3)), jnp.zeros((1, size)))
    except ValueError:
        return False
    return True


def enumerated(text: str, rule: Verifier, source: Source, check: str, count: int) -> Record:
    """The largest distance between the law that comes out and the target's; an exact rule has none."""
    found = enumerate_law(rule, source, random_tables(count=count))
    worst = float(found.tv.max())
    passed = worst < LAW or rule.guarantee not in ("exact", "distribution")
    numbers = {"tv": worst, "accepted": float(found.accepted.mean()), "tables": count}
    note = "" if passed else f"the law of what it emits is {worst:.2g} (total variation) off the target's"
    return Record(RULE, "", text, rule.guarantee, check, passed, numbers, note)


def law_in_the_loop(text: str, rule: Verifier, source: Source | None, draws: int) -> Record:
    """Chi-square of texts of three tokens that the compiled loop wrote, with drafts drawn in the widest form of tree
    that the rule takes, by a target and a drafter whose next token depends on the last one alone."""
    assert source is not None, f"it takes none of the drafts {', '.join(SHAPES)}, so nothing was proven of it"
    table, guess = (np.random.default_rng(seed).normal(size=(4, 4)) for seed in (1, 2))
    model, params = MarkovModel.create(table.astype(np.float32))
    drafter = SampledDrafter(shape=source.shape, replacement=source.replacement)
    decoder = Speculative(model=model, drafter=drafter, verifier=rule)
    result = run_many(decoder, {"target": params, "draft": jnp.asarray(guess, jnp.float32)}, _PROMPT, 3, draws, seed=1)
    numbers = law.test(result.tokens[:, 0, len(_PROMPT):],
                       markov_law(np.asarray(jax.nn.softmax(jnp.asarray(table), -1), float), _PROMPT[-1], 3))
    numbers["accepted_per_step"] = law.accepted_per_step(result.info)
    return law.verdict(RULE, "", text, rule.guarantee, numbers)


def controls() -> Iterator[Task]:
    """Wrong rules and wrong drafts, each of which must come out as wrong."""
    from parallax.testing.controls import CONTROLS

    for name, distance in CONTROLS.items():
        yield Task(f"control: {name}", functools.partial(control, name, distance),
                   functools.partial(Record, CONTROL, "", name, "rejected", "enumerated", False, {}))


def control(name: str, distance) -> Record:
    """Passes if the wrong rule is told from a right one by more than rounding."""
    tv = float(distance())
    caught = tv >= CAUGHT
    return Record(CONTROL, "", name, "rejected", "enumerated", caught, {"tv": tv},
                  "" if caught else f"taken for exact: its law is only {tv:.1g} off the target's")
