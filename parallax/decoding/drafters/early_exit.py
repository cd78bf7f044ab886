"""The target drafts for itself with its first layers.

B sequences, D draft depth. Source: LayerSkip (Elhoushi et al., arXiv:2404.16710); position-decayed depth: D^3.
"""

from __future__ import annotations

import jax.numpy as jnp

from parallax.decoding.base import policy, static
from parallax.decoding.drafters.growing import Growing
from parallax.decoding.grow import Source, grow


@policy
class EarlyExit(Growing):
    """Drafts from the hidden state behind the first layers, through the target's own norm and head.

    It has no weights and no cache: committed keys and values of these layers are the target's. The verifying forward
    runs all layers, for using the draft's hidden states again would save no layer pass (the last token of a draft needs
    one more of its own). Best with a target that was trained to exit early; leave layers unrolled, for a part of
    scanned ones is copied in every forward.

    Attributes:
      exit_layer: layers of the first token; 0 for a third of them. LayerSkip uses 8 of 32.
      decay: token i uses exit_layer * decay^i layers, rounded down, at least 1: less certain tokens cost less. D^3 is
        this with all layers; with the verifier `min_block` that accepts the whole draft it is that (lossy) method, with
        the others a drafter that loses nothing. 1 keeps the depth.
      The others are those of `Growing`.
    """

    exit_layer: int = static(default=0)
    decay: float = static(default=1.0)

    def __post_init__(self):
        super().__post_init__()
        if self.exit_layer < 0:
            raise ValueError(f"exit_layer must be a number of layers, 0 for a third of them, got {self.exit_layer}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    def check(self, target):
        if self.exit_layer > target.config.num_layers:
            raise ValueError(f"exit_layer must be at most the target's {target.config.num_layers} layers, got "
                             f"{self.exit_layer}")
        super().check(target)

    def layers(self, layers: int) -> tuple[int, ...]:
        """Of the tokens of a draft, for a target of so many."""
        exit_layer = self.exit_layer or max(1, layers // 3)
        return tuple(max(1, int(exit_layer * self.decay ** i + 1e-9)) for i in range(self.depth))

    def init(self, params, ctx, prompt, prompt_length):
        return self.controller.init(prompt.shape[0], self.depth)

    def propose(self, params, own, ctx):
        model, last = ctx.model, ctx.length[:, None] - 1
        layers = self.layers(model.config.num_layers)
        same = len(set(layers)) == 1

        def forward(block, context, level):
            return model.forward(ctx.params, block, ctx.cache, context=context,
                                 layers=(0, layers[0 if same else level]))

        end = model.config.max_positions if model.config.positions == "learned" else None
        source = Source(forward, lambda hidden: model.unembed(ctx.params, hidden),
                        jnp.take_along_axis(ctx.tokens, last, 1), last, jnp.ones_like(ctx.length), end, not same)
        grown = grow(source, self.tree, self.controller, own, ctx, sampler=self.sampler, kind=self.kind)
        return grown.draft, (own, grown.levels)

    def observe(self, params, own, advance, step, ctx):
        if step is None:
            return own
        control, levels = own
        return self.controller.update(control, levels, jnp.minimum(step.verdict.count - 1, levels), self.depth)
