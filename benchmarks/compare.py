"""Our decoders against each other, transformers and llama.cpp, in alternation on the same prompts.

    python -m benchmarks.compare --prompts benchmarks/prompts/editing.jsonl --methods prompt_lookup
    python -m benchmarks.compare --prompts FILE --gguf smollm2.f32.gguf --transformers --count 10

Greedy, batch 1, float32, each engine up to its end of text; one warm-up per engine. Prints medians over prompts and
repeats, the spread, ratios to plain decoding, tokens per forward, distinct 4-grams and whether the tokens are equal;
where they are not, the gap between the two tokens' logits. Baselines want `pip install torch transformers llama-cpp-
python`.
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.engines import Parallax, engines
from parallax import prompts as prompt_files
from parallax.decoding import METHODS
from parallax.generate import LanguageModel
from parallax.models import Block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--methods", nargs="*", default=[],
                        help="besides plain decoding, as NAME or NAME:option=value,...")
    parser.add_argument("--count", type=int, default=20, help="prompts, evenly spread over the file")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gguf", help="llama.cpp's model")
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--output", help="all runs as JSONL")
    args = parser.parse_args()

    lm = LanguageModel.load(args.model)
    texts = prompt_files.read(args.prompts)
    texts = [texts[i * len(texts) // args.count] for i in range(min(args.count, len(texts)))]
    rows = [lm.encode(text, chat=True) for text in texts]
    ours = [Parallax(lm)] + [Parallax(lm, name, **options) for name, options in map(_method, args.methods)]
    all_engines = ours + engines(lm, args.model, args.gguf, args.transformers)
    records = [record for i, ids in enumerate(tqdm(rows, unit="prompt"))
               for record in _measure(all_engines, ids, i, args.max_new_tokens, args.repeats)]
    if args.output:
        with open(args.output, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    Console(width=150).print(_table(lm, rows, all_engines, records))


def _method(text: str) -> tuple[str, dict]:
    name, _, options = text.partition(":")
    if name not in METHODS:
        raise SystemExit(f"unknown method {name!r}: expected one of {', '.join(METHODS)}")
    return name, {key: int(value) if value.isdigit() else value for key, value in
                  (item.split("=") for item in filter(None, options.split(",")))}


def _measure(all_engines, ids, prompt, new_tokens, repeats):
    if prompt == 0:
        for engine in all_engines:
            engine.run(ids, new_tokens)                                # warms up; compile time is never counted
    for repeat in range(repeats):
        for engine in all_engines:
            out, ms = engine.run(ids, new_tokens)
            yield {"engine": engine.name, "prompt": prompt, "repeat": repeat, "ms_per_token": ms, "ids": out,
                   "forwards": getattr(engine, "forwards", None)}


def _table(lm, rows, all_engines, records) -> Table:
    table = Table("engine", "ms/token median", "10-90 %", "time / plain", "speedup", "tokens/forward",
                  "distinct 4-grams", "tokens equal")
    by = {(r["engine"], r["prompt"], r["repeat"]): r for r in records}
    keys = sorted({(p, n) for _, p, n in by})
    plain = {key: by[all_engines[0].name, *key] for key in keys}
    for engine in all_engines:
        runs = {key: by[engine.name, *key] for key in keys}
        times = [r["ms_per_token"] for r in runs.values()]
        ratio = statistics.median(runs[key]["ms_per_token"] / plain[key]["ms_per_token"] for key in keys)
        total = (sum(r["ms_per_token"] * len(r["ids"]) for r in plain.values())
                 / sum(r["ms_per_token"] * len(r["ids"]) for r in runs.values()))
        low, high = np.percentile(times, [10, 90])
        forwards = [r["forwards"] for r in runs.values()]
        tokens_per_forward = f"{sum(len(r['ids']) for r in runs.values()) / sum(forwards):.2f}" if forwards[0] else "-"
        different = [_difference(lm, rows[p], runs[p, n]["ids"], plain[p, n]["ids"]) for p, n in keys if n == 0]
        different = [d for d in different if d]
        equal = f"{len(rows) - len(different)} of {len(rows)} " + "; ".join(different)
        grams = [len(set(zip(*(r["ids"][i:] for i in range(4))))) / max(len(r["ids"]) - 3, 1) for r in runs.values()]
        table.add_row(engine.name, f"{statistics.median(times):.2f}", f"{low:.1f}-{high:.1f}", f"{ratio:.2f}",
                      f"{total:.2f}x", tokens_per_forward, f"{statistics.mean(grams):.2f}", equal)
    return table


def _difference(lm, prompt, ours, theirs) -> str | None:
    """Where two outputs part before the end of the text, and how far apart the two tokens' logits are there."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), None)
    if at is None:
        return None
    tokens = np.asarray([prompt + theirs[:at]], np.int32)
    size = tokens.shape[1]
    block = Block(tokens, np.arange(size)[None], np.tril(np.ones((size, size), bool)))
    hidden = lm.model.forward(lm.params["target"], block, lm.model.new_cache(1, 0)).hidden[0, -1]
    logits = np.asarray(lm.model.unembed(lm.params["target"], hidden))
    return f"token {at}, gap {abs(float(logits[ours[at]] - logits[theirs[at]])):.1e}"


if __name__ == "__main__":
    main()
