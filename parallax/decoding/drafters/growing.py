"""What the drafters share that write with a language model: a tree policy, a controller, and how tokens are drawn."""

from __future__ import annotations

from parallax.decoding import spec
from parallax.decoding.base import Drafter, Kind, policy, static
from parallax.decoding.control import CONTROLLERS, Controller
from parallax.decoding.growth import TREES, Chain, TreePolicy
from parallax.decoding.sampling import Greedy, Sampler


@policy
class Growing(Drafter):
    """A drafter that grows its drafts with `parallax.decoding.grow`.

    Attributes:
      sampler: how coupled and sampled drafts are drawn, best as the target's tokens are.
      kind: `deterministic` takes the most likely tokens. `coupled` draws them with the target's own noise, so that
        `verify.Follow` accepts where the two models agree and still emits the tokens of seeded plain decoding; the
        siblings of a tree are the runners-up of that draw. `sampled` draws with noise of its own and records the law,
        for the rules that judge drawn drafts. A tree that cannot be coupled takes the kind that it can be.
      draft_length: tokens per draft, if that is a chain. The card of the method says 3 to 8: more for a draft that is
        often right.
      tree: a policy of `growth.TREES`, such as `levels(4, 2, 2)` or `beam(width=10, depth=6, nodes=60)`; empty for the
        chain.
      controller: one of `control.CONTROLLERS`, such as `heuristic` or `confidence(threshold=0.4)`.
    """

    sampler: Sampler = Greedy()
    kind: Kind = static(default="deterministic")
    draft_length: int = static(default=4)
    tree: TreePolicy = ""
    controller: Controller = "constant"

    def __post_init__(self):
        if self.draft_length < 1:
            raise ValueError(f"draft_length must be at least 1, got {self.draft_length}")
        if self.kind not in ("deterministic", "coupled", "sampled"):
            raise ValueError(f"kind must be 'deterministic', 'coupled' or 'sampled', got {self.kind!r}")
        set_field = object.__setattr__
        set_field(self, "controller", spec.build(self.controller, CONTROLLERS, "controller"))
        if isinstance(self.tree, str):
            tree = spec.build(self.tree, TREES, "tree") if self.tree else Chain(length=self.draft_length)
            set_field(self, "tree", tree)
        if not isinstance(self.tree, TreePolicy):               # a placeholder, while jax handles the structure
            return
        if self.draft_length not in (4, self.tree.depth):
            raise ValueError(f"draft_length is that of a chain, and the tree has its own depth, {self.tree.depth}: got "
                             f"draft_length={self.draft_length} beside it, leave one of them out")
        set_field(self, "draft_length", self.tree.depth)
        if self.kind == "coupled" and "coupled" not in self.tree.kinds:
            set_field(self, "kind", self.tree.kinds[0])

    @property
    def depth(self) -> int:
        return self.tree.depth

    @property
    def replacement(self) -> bool:
        return self.tree.replacement and self.kind == "sampled"

    def check(self, target):
        name = next((name for name, tree in TREES.items() if type(self.tree) is tree), type(self.tree).__name__)
        most, size = max(self.tree.first, self.tree.rest), target.config.vocab_size
        if most > size:
            raise ValueError(f"tree {name!r} draws {most} different tokens behind one, and the vocabulary has {size}")
        if self.kind == "sampled" and isinstance(self.sampler, Greedy):
            raise ValueError("a sampled draft needs a sampler with a temperature, got Greedy: use kind='deterministic'")
        if self.kind not in self.tree.kinds:
            fix = ("set a temperature" if "sampled" in self.tree.kinds else
                   "what stays in it depends on its tokens, verify it with follow")
            raise ValueError(f"tree {name!r} makes {' or '.join(self.tree.kinds)} drafts, not {self.kind} ones: {fix}")
        if self.kind not in self.controller.kinds:
            raise ValueError(f"{type(self.controller).__name__} ends a path because of the tokens of others, "
                             f"which {self.kind} drafts must not: use confidence, or verify with follow")
