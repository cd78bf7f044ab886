"""Acceptance rules at equal draft laws: how many drafted tokens each keeps, chains and trees.

    python -m benchmarks.rules --model FOLDER --draft FOLDER --prompts FILE [--temperature 1] [--new_tokens 200]

All rules draft with the same model at the same temperature; rows of the block and draws differ by the tree. The
standard error is over prompts and repeats.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from parallax import prompts
from parallax.generate import LanguageModel

RULES = (
    ("follow, coupled chain", "follow", "chain(4)"),
    ("token-level", "rejection", "chain(4)"),
    ("block", "block", "chain(4)"),
    ("recursive, independent siblings", "rejection", "levels(2, 2, 1, 1, replacement=True)"),
    ("recursive, distinct siblings", "rejection", "levels(2, 2, 1, 1)"),
    ("K-SEQ", "kseq", "levels(2, 2, 1, 1, replacement=True)"),
    ("traversal, independent siblings", "traversal", "levels(2, 2, 1, 1, replacement=True)"),
    ("traversal, distinct siblings", "traversal", "levels(2, 2, 1, 1)"),
    ("recursive, two paths", "rejection", "paths(2, 4)"),
    ("traversal, two paths", "traversal", "paths(2, 4)"),
    ("multi-path, two paths", "multipath", "paths(2, 4)"),
    ("recursive, stochastic beam", "rejection", "stochastic_beam(3, 4)"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-python")
    parser.add_argument("--draft", default="tiny-python-draft")
    parser.add_argument("--prompts", default="benchmarks/prompts/python.jsonl")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--new_tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    lm = LanguageModel.load(args.model, draft=args.draft)
    texts = prompts.read(args.prompts)
    kept = {label: [] for label, _, _ in RULES}
    for seed, (label, verifier, tree) in tqdm(list(itertools.product(range(args.repeats), RULES)), disable=None):
        run = lm.generate(texts, method="draft_model", options={"tree": tree}, verifier=verifier, seed=seed,
                          temperature=args.temperature, max_new_tokens=args.new_tokens, ignore_eos=True,
                          batch_size=len(texts))
        kept[label] += [c.accepted / c.target_forwards for c in run.completions]
    table = Table("rule", "verifier", "tree", "accepted per step", "standard error", "over token-level")
    base = np.asarray(kept["token-level"])
    for label, verifier, tree in RULES:
        ours = np.asarray(kept[label])
        difference = ours - base
        table.add_row(label, verifier, tree, f"{ours.mean():.3f}", f"{ours.std(ddof=1) / len(ours) ** 0.5:.3f}",
                      f"{difference.mean():+.3f} (+- {difference.std(ddof=1) / len(ours) ** 0.5:.3f})")
    console = Console(width=140)
    console.print(table)
    console.print(f"{len(texts)} prompts x {args.repeats} repeats x {args.new_tokens} tokens, temperature "
                  f"{args.temperature}")


if __name__ == "__main__":
    main()
