"""The types that every decoder is made of. Nothing here computes.

B sequences, N token slots, T block rows or tree nodes (row 0 is the root), D draft depth, K = D + 1 tokens that one
step can emit, P prompt slots, V vocabulary, E hidden size.

A decoder is three pure functions: `init` fills the cache with the prompt, `step` runs one target forward and emits
tokens, and `parallax.decoding.loop` repeats the step. The pending token, whose keys and values are not committed yet,
is `tokens[b, length[b] - 1]`; the cache holds `length - 1` positions. So prefill computes no logits, the last prompt
token is the root of the first step, and plain decoding emits exactly one token per forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from parallax.kernels.dispatch import Kernels
from parallax.models.cache import Block, Cache, Output
from parallax.models.transformer import Model

Params = dict[str, Any]          # {"target": of the model, "draft": of the drafter, if it has any}
Guarantee = Literal["exact", "distribution", "stepwise", "lossy"]
Kind = Literal["deterministic", "sampled", "coupled"]       # of drafts, see `Draft`


def static(**kwargs):
    """A dataclass field that is part of the compiled program (structure), not a traced number."""
    return dataclasses.field(metadata=dict(static=True), **kwargs)


def policy(cls):
    """Makes `cls` a frozen keyword-only dataclass and a pytree: fields are traced numbers unless they are `static`.

    The class itself is part of the structure. `jax.tree_util.register_dataclass` leaves it out (jax 0.10.2): the
    structures of two classes with equal fields compare as equal there, and one time in a hundred `jax.jit` then runs
    the program of the other class.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fixed = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static")]
    traced = [field.name for field in dataclasses.fields(cls) if field.name not in fixed]

    def flatten(self):
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in traced]
        return children, (cls, *(getattr(self, name) for name in fixed))

    def unflatten(structure, children):
        return cls(**dict(zip(traced, children)), **dict(zip(fixed, structure[1:])))

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


class DecodeState(NamedTuple):
    """What the next step needs. The loop itself reads only `done`.

    tokens [B, N] int32, zeros from `length` on; length [B] decided tokens, prompt included; limit [B] longest allowed
    length; done [B]; key [B] one random key per sequence; cache; own: whatever the decoder keeps for itself.
    """

    tokens: Int[Array, "B N"]
    length: Int[Array, "B"]
    limit: Int[Array, "B"]
    done: Bool[Array, "B"]
    key: Key[Array, "B"]
    cache: Cache
    own: Any


class StepInfo(NamedTuple):
    """What a human plots, int32 [B] per step or summed over steps. The next step never reads it.

    emitted tokens (after cuts at the limit and at end of text); accepted and proposed draft tokens; target forwards and
    the block rows that they computed; drafter forwards and rows; failed: logits were not numbers.
    accepted_at, proposed_at [B, D]: steps that accepted a token at depth 1, 2, ..., and steps that had one to offer
    there, behind the token accepted one level above. Their quotient is the acceptance by depth; steps that accepted
    exactly d tokens are the differences of accepted_at.
    """

    emitted: Int[Array, "B"]
    accepted: Int[Array, "B"]
    proposed: Int[Array, "B"]
    target_forwards: Int[Array, "B"]
    target_rows: Int[Array, "B"]
    draft_forwards: Int[Array, "B"]
    draft_rows: Int[Array, "B"]
    failed: Int[Array, "B"]
    accepted_at: Int[Array, "B D"]
    proposed_at: Int[Array, "B D"]

    @classmethod
    def zeros(cls, batch: int, depth: int) -> StepInfo:
        """Nothing counted yet, for drafts of `depth` levels."""
        flat = jnp.zeros((batch,), jnp.int32)
        levels = jnp.zeros((batch, depth), jnp.int32)
        return cls(**{name: levels if name.endswith("_at") else flat for name in cls._fields})


class Result(NamedTuple):
    """tokens [B, N], prompt first, zeros behind `length` [B]; prompt_length [B]; info summed over the steps."""

    tokens: Int[Array, "B N"]
    length: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    info: StepInfo


@struct.dataclass
class Draft:
    """Candidate continuations as a tree.

    tokens [B, T], column 0 the pending token; parents [T] or [B, T], parent before child, parents[0] = 0; valid [B, T]:
    an invalid node is never accepted (a token id never means "no draft"); depth: the deepest node, static.
    kind (static): `deterministic` (a function of the past), `sampled` (the children of node n drawn from
    exp(logq[:, n]), which is normalised), `coupled` (drawn with the target's own noise). What stays in a sampled tree
    must not depend on which tokens were drawn: pruning turns a sampled tree into a deterministic one.
    replacement (static): siblings of a sampled tree were drawn independently, else one after the other from what the
    ones before left over; they are verified in the order of their indices. logq may lack rows of the last nodes, if
    these have no children.
    certain (static): no node is ever invalid; then no shorter forward is compiled for steps without a draft.
    scores [B, T]: log-probability of the path down to every node, of a deterministic tree whose drafter knows it.
    match [B]: how many tokens of the text a retrieved draft matched. forwards, rows: what drafting cost, a number or
    one per sequence.
    """

    tokens: Int[Array, "B T"]
    parents: Any
    valid: Bool[Array, "B T"]
    depth: int = struct.field(pytree_node=False)
    kind: Kind = struct.field(pytree_node=False, default="deterministic")
    logq: Float[Array, "B I V"] | None = None
    replacement: bool = struct.field(pytree_node=False, default=False)
    certain: bool = struct.field(pytree_node=False, default=False)
    scores: Float[Array, "B T"] | None = None
    match: Int[Array, "B"] | None = None
    forwards: Any = 0
    rows: Any = 0


class Verdict(NamedTuple):
    """path [B, K]: accepted nodes, root first; count [B]: how many of them (accepted drafts + 1); next [B]: the token
    behind the last of them; node [B]: that last node; targets [B, T]: the target's token at every node, if drawn.
    """

    path: Int[Array, "B K"]
    count: Int[Array, "B"]
    next: Int[Array, "B"]
    node: Int[Array, "B"]
    targets: Int[Array, "B T"] | None


class Advance(NamedTuple):
    """One commit event, a prefill chunk or a step: the committed rows were at positions start, start + 1, ...

    tokens [B, K]: the tokens *after* the committed rows; count [B]; start [B]; hidden [B, K, E] and taps [B, K, n, E]
    of the committed rows.
    """

    tokens: Int[Array, "B K"]
    count: Int[Array, "B"]
    start: Int[Array, "B"]
    hidden: Float[Array, "B K E"]
    taps: Float[Array, "B K n E"]


class Step(NamedTuple):
    """The raw step behind an `Advance`; None for prefill chunks. logits [B, T, V] are the target's, unwarped."""

    draft: Draft
    block: Block
    out: Output
    logits: Float[Array, "B T V"]
    verdict: Verdict


class Context(NamedTuple):
    """What drafters may read: the target and its parameters, all decided tokens, the committed cache, the keys."""

    model: Model
    params: Any
    tokens: Int[Array, "B N"]
    length: Int[Array, "B"]
    cache: Cache
    key: Key[Array, "B"]

    @property
    def kernels(self) -> Kernels:
        """Which kernels the model asks for; XLA's where there is none, as in the enumeration of a rule's law."""
        return "xla" if self.model is None else self.model.config.kernels


@runtime_checkable
class Drafter(Protocol):
    """Guesses what comes next. A subclass needs `depth` and `propose`; the rest is that of a drafter without memory.

    depth: of every draft, which sizes the buffers (a shorter one has invalid nodes). kind, replacement: of all its
    drafts.
    """

    depth: int
    kind: Kind = "deterministic"
    replacement: bool = False

    def check(self, target: Model) -> None:
        """Raises ValueError, before anything is compiled, if it cannot draft for this target."""

    def init(self, params: Any, ctx: Context, prompt: Int[Array, "B P"], prompt_length: Int[Array, "B"]) -> Any:
        """The drafter's own state before prefill. `ctx.length` is 0 there; `ctx.cache` has the room that commits of
        a whole draft or prefill chunk need."""
        return ()

    def propose(self, params: Any, own: Any, ctx: Context) -> tuple[Draft, Any]:
        """A draft behind the pending token."""

    def observe(self, params: Any, own: Any, advance: Advance, step: Step | None, ctx: Context) -> Any:
        """Learns what was committed. `ctx` is the state after the commit; a finished sequence has count 0."""
        return own

    def rewind(self, params: Any, own: Any, ctx: Context) -> Any:
        """Forgets what lies behind `ctx.length`, for a drafter that drafts for a drafter whose text was not accepted.

        Caches must be cut; tables that only suggest may keep what they learned."""
        return own


@runtime_checkable
class Verifier(Protocol):
    """Decides which nodes to accept. `guarantee` is what it proves; `kinds` are the drafts it can verify."""

    guarantee: Guarantee
    kinds: tuple[Kind, ...]

    def check(self, source: Drafter | Draft) -> None:
        """Raises ValueError, before anything is compiled, if it cannot verify such drafts."""
        if source.kind not in self.kinds:
            raise ValueError(f"{type(self).__name__} cannot verify a {source.kind} draft: it takes "
                             f"{', '.join(self.kinds)}")

    def __call__(self, draft: Draft, logits: Float[Array, "B T V"], hidden: Float[Array, "B T E"],
                 ctx: Context) -> Verdict:
        """The target's logits and last hidden states at every node; `ctx.length` is the position of the first token
        to emit. Never cuts at limit or end of text: the step does."""


@runtime_checkable
class Decoder(Protocol):
    """A whole method: a frozen pytree with static structure (see `policy`)."""

    guarantee: Guarantee
    depth: int                       # of the longest draft, D

    def check(self) -> None:
        """Raises ValueError if the parts do not fit each other or the model."""

    def init(self, params: Params, prompt: Int[Array, "B P"], prompt_length: Int[Array, "B"], keys: Key[Array, "B"],
             limit: Int[Array, "B"], capacity: int) -> DecodeState:
        """Allocates the state and commits `prompt[:, :-1]`."""

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """One target forward. Finished sequences stay as they are and count nothing."""
