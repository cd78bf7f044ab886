"""What a speculative step takes besides the target's forward: the share of verification, commit and bookkeeping.

    python -m benchmarks.overhead [--nodes 32] [--vocabulary 49152] [--repeats 15]

A target of SmolLM2-135M's shape with random weights, one sequence behind 256 tokens. Drafts are trees of uniformly
drawn tokens, which cost next to nothing, so what is left is the rule's own work: `follow` draws the target's token at
every node; `rejection` and `traversal` compare p with q there. The floor is the bare forward over the same rows, logits
included; a step and the forwards that are taken off it are timed in alternation.
"""

from __future__ import annotations

import argparse
from typing import ClassVar

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from parallax import costs
from parallax.decoding import VERIFIERS, Draft, Drafter, Greedy, Sample, Shape, Speculative
from parallax.decoding.base import Kind, policy, static
from parallax.decoding.sampling import DRAFT, private_keys
from parallax.models import Model, ModelConfig

RULES = (("follow", Greedy()), ("follow", Sample()), ("rejection", Sample()), ("traversal", Sample()))


@policy
class Uniform(Drafter):
    """Every node's token is any of the vocabulary."""

    shape: Shape = static()

    kind: ClassVar[Kind] = "sampled"
    replacement: ClassVar[bool] = True

    @property
    def depth(self) -> int:
        return self.shape.depth

    def propose(self, params, own, ctx):
        batch, size, vocabulary = len(ctx.length), len(self.shape.parents), ctx.model.config.vocab_size
        keys = private_keys(ctx.key, ctx.length, ctx.length, DRAFT)
        drawn = jax.vmap(lambda key: jax.random.randint(key, (size - 1,), 0, vocabulary))(keys)
        pending = jnp.take_along_axis(ctx.tokens, ctx.length[:, None] - 1, 1)
        logq = jnp.full((batch, 1 + max(self.shape.parents), vocabulary), -jnp.log(float(vocabulary)))
        return Draft(jnp.concatenate([pending, drawn], 1), self.shape.parents, jnp.ones((batch, size), bool),
                     depth=self.depth, kind="sampled", logq=logq, replacement=True, certain=True), own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=32, help="block rows, the pending token included")
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    model = Model(ModelConfig(vocab_size=args.vocabulary, hidden_size=576, num_layers=args.layers, num_heads=9,
                              num_kv_heads=3, head_dim=64, intermediate_size=1536, max_positions=2048))
    params = {"target": jax.jit(model.init)(jax.random.key(0))}
    shape = Shape.best_first(args.nodes - 1, 6, (0.5, 0.2, 0.1, 0.05))
    target = costs.measure(model, params["target"], rows=(args.nodes,), repeats=args.repeats, fresh=True)
    floor = target.at(args.nodes)
    table = Table("rule", "sampler", "forward ms (floor)", "besides it ms", "share of the step")
    for name, sampler in RULES:
        decoder = Speculative(model=model, drafter=Uniform(shape=shape), verifier=VERIFIERS[name](sampler=sampler))
        besides = costs.draft_ms(decoder, params, repeats=args.repeats, fresh=True)
        table.add_row(name, "greedy" if isinstance(sampler, Greedy) else "temperature 1", f"{floor:.1f}",
                      f"{besides:.2f}", f"{besides / (besides + floor):.1%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
