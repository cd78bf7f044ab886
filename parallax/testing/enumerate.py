"""The exact law of what a rule emits, over toy tables, by going through everything that can happen.

R outcomes, B sequences, T nodes, D depth, V vocabulary, N tables. Drafts of all tokens, each with its probability; all
answers of the numbers that decide; the law of the token behind; and the target's own law for what is still missing up
to D + 1 tokens. All in float64, through the very code that runs in the loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from parallax.decoding import tree
from parallax.decoding.base import Context, Draft, Verifier, policy
from parallax.decoding.tree import Shape

ROWS = 2**16                             # outcomes at a time: some 50 MB of float64


class Tables(NamedTuple):
    """Laws of a target and of a draft: p[d], q[d] [N, V, ..., V] behind every d tokens, for N cases at once."""

    p: tuple[Float[np.ndarray, "N ..."], ...]
    q: tuple[Float[np.ndarray, "N ..."], ...]

    @property
    def size(self) -> int:
        return self.p[0].shape[-1]


class Law(NamedTuple):
    """Of N tables each. law, target [N, V^(D + 1)]: joint laws of D + 1 tokens; tv [N]: their total variation distance;
    accepted [N]: mean number of accepted drafts of a step.
    """

    tv: Float[np.ndarray, "N"]
    accepted: Float[np.ndarray, "N"]
    law: Float[np.ndarray, "N outcomes"]
    target: Float[np.ndarray, "N outcomes"]


def random_tables(seed: int = 0, count: int = 24, size: int = 3, depth: int = 2) -> Tables:
    """Laws from flat to nearly certain, a third of the cases with zeros in them, for drafts of at most `depth`."""
    random = np.random.default_rng(seed)

    def laws(case, lead):
        law = random.dirichlet(np.full(size, (0.3, 1.0, 5.0)[case // 3 % 3]), (size,) * lead)
        if case % 3 == 2:
            law = np.where(law == law.min(-1, keepdims=True), 0, law)
        return law / law.sum(-1, keepdims=True)

    cases = [([laws(case, d) for d in range(depth + 1)], [laws(case, d) for d in range(depth)])
             for case in range(count)]
    return Tables(*(tuple(np.stack(x) for x in zip(*side)) for side in zip(*cases)))


def levels(*widths: int) -> Shape:
    """The shapes 2x1, 1x2 and 2x2 are levels(2, 1), levels(1, 2) and levels(2, 2)."""
    return Shape.levels(widths)


def chance_of_draw(shape: Shape, replacement: bool, q: Sequence, tokens: Int[Array, "R T"]) -> Float[Array, "R T"]:
    """How likely every node's token is to be drawn behind its parent and its earlier siblings; 1 for the root.

    Where nothing is left to draw the place is filled with token 0, as a drafter would fill it with something.
    """
    chances = [jnp.ones(len(tokens))]
    for node, parent in enumerate(shape.parents[1:], 1):
        law = _law_at(q, shape, parent, tokens)
        if not replacement:
            for sibling in (n for n in range(1, node) if shape.parents[n] == parent):
                law = jnp.where(jnp.arange(law.shape[-1]) == tokens[:, sibling, None], 0, law)
            total = law.sum(-1, keepdims=True)
            law = jnp.where(total > 0, law / jnp.where(total > 0, total, 1), jnp.arange(law.shape[-1]) == 0)
        chances.append(jnp.take_along_axis(law, tokens[:, node, None], 1)[:, 0])
    return jnp.stack(chances, 1)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where drafts come from; the default draws what it says that it draws. All but the shape can be wrong.

    shape: the tree. replacement: how siblings are drawn. kind: what the draft says that it is; None: what the verifier
    takes. valid: (chances [R, T], of `chance_of_draw`) -> [R, T], nodes that stay in the tree. logged: what the draft
    says of its log-laws [R, I, V]. chance: (shape, replacement, q, tokens) -> [R, T] in place of `chance_of_draw`.
    """

    shape: Shape
    replacement: bool = False
    kind: str | None = None
    valid: Callable | None = None
    logged: Callable | None = None
    chance: Callable = chance_of_draw


def enumerate_law(verifier: Verifier, source: Source | Shape, tables: Tables) -> Law:
    """The law of what `verifier` emits in a step and of plain decoding behind it, up to D + 1 tokens.

    A rule with `judge` is asked for all answers of its numbers; any other one for all tokens that its sampler can draw
    at the nodes.

    Raises:
      ValueError: the verifier refuses such drafts, or the tables are not deep enough.
    """
    source = Source(source) if isinstance(source, Shape) else source
    shape, size = source.shape, tables.size
    if len(tables.p) < shape.depth + 1 or len(tables.q) < shape.depth:
        raise ValueError(f"the tables reach {len(tables.q)} tokens deep, expected at least {shape.depth}, the depth of "
                         "the tree")
    kind = source.kind or ("sampled" if "sampled" in verifier.kinds else verifier.kinds[0])
    source = dataclasses.replace(source, kind=kind)
    nodes = len(shape.parents)
    judged = hasattr(verifier, "judge")
    answers = (2,) * (nodes - 1) if judged else (size,) * nodes
    outcomes = int(np.prod((size,) * (nodes - 1) + answers))
    steps = -(-outcomes // ROWS)
    with _float64():
        laws, accepted = [], []
        verifier = jax.tree.map(jnp.asarray, verifier)
        for case in range(len(tables.p[0])):
            p, q = ([jnp.asarray(law[case], float) for law in side] for side in tables)
            law, mean = _enumerate(verifier, source, p, q, answers, outcomes, steps)
            laws.append(np.asarray(law))
            accepted.append(float(mean))
    target = tables.p[0]
    for law in tables.p[1:shape.depth + 1]:
        target = target[..., None] * law
    target = target.reshape(len(laws), -1)
    law = np.stack(laws)
    return Law(np.abs(law - target).sum(-1) / 2, np.asarray(accepted), law, target)


@functools.partial(jax.jit, static_argnames=("source", "answers", "outcomes", "steps"))
def _enumerate(verifier, source: Source, p, q, answers, outcomes: int, steps: int):
    """(law [V^(D+1)], mean accepted) of one table, `ROWS` outcomes at a time."""
    rows = min(ROWS, outcomes)

    def add(carry, step):
        law, mean = _part(verifier, source, p, q, answers, step * rows + jnp.arange(rows), outcomes)
        return (carry[0] + law, carry[1] + mean), None

    zero = jnp.zeros(p[0].shape[0] ** (source.shape.depth + 1)), jnp.zeros(())
    return jax.lax.scan(add, zero, jnp.arange(steps))[0]


def _part(verifier, source: Source, p, q, answers, index: Int[Array, "R"], outcomes: int):
    shape, size = source.shape, p[0].shape[0]
    nodes, depth, rows = len(shape.parents), shape.depth, len(index)
    digits = _digits(index, (size,) * (nodes - 1) + answers)
    tokens = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), digits[:, :nodes - 1]], 1)
    numbers = digits[:, nodes - 1:]
    drawn = source.chance(shape, source.replacement, q, tokens)
    weight = jnp.where(index < outcomes, drawn.prod(1), 0)
    valid = jnp.ones_like(tokens, bool) if source.valid is None else source.valid(drawn) | (jnp.arange(nodes) == 0)
    logq = None
    if source.kind == "sampled":
        inner = 1 + max(shape.parents)
        logq = jnp.log(jnp.stack([_law_at(q, shape, node, tokens) for node in range(inner)], 1))
        logq = logq if source.logged is None else source.logged(logq)
    draft = Draft(tokens, shape.parents, valid, depth=depth, kind=source.kind, logq=logq,
                  replacement=source.replacement)
    verifier.check(draft)
    laws = jnp.stack([_law_at(p, shape, node, tokens) for node in range(nodes)], 1)
    if hasattr(verifier, "judge"):
        number = jnp.pad(jnp.where(numbers == 1, -1.0, 2.0), ((0, 0), (1, 0)), constant_values=2.0)
        judgement = verifier.judge(draft, jnp.log(laws), number)
        chances = judgement.chances[:, 1:]
        weight = weight * jnp.where(numbers == 1, chances, 1 - chances).prod(1)
        verdict = tree.verdict(draft, judgement.node, jnp.zeros_like(judgement.node))
        total = judgement.weights.sum(-1, keepdims=True)
        after = judgement.weights / jnp.where(total > 0, total, 1)
    else:
        weight = weight * _chance_of_targets(shape, laws, tokens, numbers).prod(1)
        scripted = dataclasses.replace(verifier, sampler=Scripted(targets=numbers))
        verdict = scripted(draft, jnp.log(laws), laws, _context(rows))
        after = jax.nn.one_hot(verdict.next, size, dtype=laws.dtype)
    return _joint(p, draft, verdict, after, weight), (weight * (verdict.count - 1)).sum()


def _joint(p, draft, verdict, after: Float[Array, "R V"], weight: Float[Array, "R"]):
    """The law of D + 1 tokens: those of the path, one from `after`, and the target's own behind them."""
    size, depth = after.shape[-1], draft.depth
    path = jnp.take_along_axis(draft.tokens, verdict.path, 1)[:, 1:]
    total = jnp.zeros(size ** (depth + 1))
    for kept in range(depth + 1):
        prefix = sum((path[:, d] * size ** (kept - 1 - d) for d in range(kept)), jnp.zeros(len(path), jnp.int32))
        share = jnp.where(verdict.count == kept + 1, weight, 0)
        law = jnp.zeros((size ** kept, size)).at[prefix].add(share[:, None] * after)
        for d in range(kept + 1, depth + 1):
            law = law.reshape(-1)[:, None] * p[d].reshape(-1, size)
        total = total + law.reshape(-1)
    return total


def _chance_of_targets(shape: Shape, laws, tokens: Int[Array, "R T"], targets: Int[Array, "R T"]):
    """[R, T]. Noise is that of the position: behind equal texts (equal siblings) the target draws the same token."""
    chances = []
    for node in range(len(shape.parents)):
        chance = jnp.take_along_axis(laws[:, node], targets[:, node, None], 1)[:, 0]
        for other in (n for n in range(node) if shape.depths[n] == shape.depths[node]):
            equal = [tokens[:, a] == tokens[:, b] for a, b in zip(_path(shape, node), _path(shape, other))]
            same = jnp.stack(equal, 1).all(1)
            chance = jnp.where(same, targets[:, node] == targets[:, other], chance)
        chances.append(chance)
    return jnp.stack(chances, 1)


@policy
class Scripted:
    """In place of a sampler: the tokens that it draws are given."""

    targets: Any

    def draw(self, logits, keys, start, offsets, depth, seen=None, kernels="xla"):
        return self.targets

    def warp(self, logits, seen=None):
        return logits


def _context(rows: int) -> Context:
    zero = jnp.zeros((rows,), jnp.int32)
    return Context(None, None, zero[:, None], zero + 1, None, jax.random.split(jax.random.key(0), rows))


def _law_at(laws, shape: Shape, node: int, tokens: Int[Array, "R T"]) -> Float[Array, "R V"]:
    """The law behind a node, of every outcome."""
    path = _path(shape, node)
    law = laws[len(path)]
    return law[tuple(tokens[:, n] for n in path)] if path else jnp.broadcast_to(law, (len(tokens), law.shape[-1]))


def _path(shape: Shape, node: int) -> list[int]:
    """The nodes from below the root down to `node`."""
    return [*_path(shape, shape.parents[node]), node] if node else []


def _digits(index: Int[Array, "R"], bases: tuple[int, ...]) -> Int[Array, "R digits"]:
    """`index` in mixed bases, the last digit fastest."""
    digits = []
    for base in reversed(bases):
        digits.append(index % base)
        index = index // base
    return jnp.stack(digits[::-1], 1).astype(jnp.int32) if digits else jnp.zeros((len(index), 0), jnp.int32)


def _float64():
    """Double precision inside the block; the function moved between versions of JAX."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64

    return enable_x64()
