"""Sample and follow: the target's own token at every node decides. B sequences, T nodes, V vocabulary."""

from __future__ import annotations

from typing import ClassVar

from parallax.decoding import tree
from parallax.decoding.base import Guarantee, Kind, Verifier, policy
from parallax.decoding.sampling import Greedy, Sampler


@policy
class Follow(Verifier):
    """Draw the target's token at every node, and walk down while the tree has it.

    With `Greedy` this is greedy verification. It emits the target's own tokens whatever the draft is, so it is
    exact for every drafter and tree; with noise keyed by position it gives the very tokens of seeded plain
    decoding. It accepts less than rejection sampling when the draft is itself sampled. Source: the naive
    baseline of MCSD (arXiv:2401.06706) and the rule of DFlash; one draw per node, never one per path, which
    would not be lossless.
    """

    sampler: Sampler = Greedy()

    guarantee: ClassVar[Guarantee] = "exact"
    kinds: ClassVar[tuple[Kind, ...]] = ("deterministic", "sampled", "coupled")

    def __call__(self, draft, logits, hidden, ctx):
        offsets = tree.depths(draft.parents, draft.depth)
        targets = self.sampler.draw(logits, ctx.key, ctx.length, offsets, draft.depth, tree.seen(draft, ctx),
                                    ctx.kernels)
        return tree.walk(draft, targets)
