"""parallax, transformers and llama.cpp behind one call: the same ids in, new ids and milliseconds per token out."""

from __future__ import annotations

import time
from typing import Protocol

from parallax import zoo
from parallax.generate import LanguageModel


class Engine(Protocol):
    """Greedy, one sequence, two threads."""

    name: str

    def run(self, ids: list[int], new_tokens: int) -> tuple[list[int], float]:
        """(new ids, milliseconds per new token without the prompt's prefill)."""


class Parallax:
    """One method of ours. `forwards` counts the target forwards of the last run."""

    def __init__(self, lm: LanguageModel, method: str = "autoregressive", **options):
        self.lm, self.method, self.options = lm, method, options
        self.name = " ".join([method, *(f"{k}={v}" for k, v in options.items())])
        self.forwards = 0

    def run(self, ids, new_tokens):
        run = self.lm.generate([ids], method=self.method, options=self.options, max_new_tokens=new_tokens)
        self.forwards = run.target_forwards
        return list(run.completions[0].ids), 1e3 * run.decode / run.tokens


class Transformers:
    """`generate` of transformers on the same folder, float32."""

    name = "transformers"

    def __init__(self, folder: str, eos: tuple[int, ...], threads: int = 2):
        import torch
        from transformers import AutoModelForCausalLM
        torch.set_num_threads(threads)
        self.torch, self.eos = torch, list(eos)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, ids, new_tokens):
        return _difference(self._generate, ids, new_tokens)

    def _generate(self, ids, count):
        x = self.torch.tensor([ids])
        with self.torch.no_grad():
            out = self.model.generate(x, attention_mask=self.torch.ones_like(x), max_new_tokens=count,
                                      do_sample=False, pad_token_id=0, eos_token_id=self.eos)
        return out[0, len(ids):].tolist()


class LlamaCpp:
    """llama.cpp on a GGUF file, whatever its type."""

    name = "llama.cpp"

    def __init__(self, gguf: str, eos: tuple[int, ...], threads: int = 2):
        from llama_cpp import Llama
        self.eos = eos
        self.model = Llama(gguf, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(self, ids, new_tokens):
        return _difference(self._generate, ids, new_tokens)

    def _generate(self, ids, count):
        self.model.reset()
        out = []
        for token in self.model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            out.append(token)
            if len(out) == count or token in self.eos:
                return out
        return out


def _difference(generate, ids, count):
    """Leaves the prefill out: the time for all tokens less the time for the first."""
    began = time.perf_counter()
    generate(ids, 1)
    first = time.perf_counter() - began
    began = time.perf_counter()
    out = generate(ids, count)
    return out, 1e3 * (time.perf_counter() - began - first) / max(len(out) - 1, 1)


def engines(lm: LanguageModel, model: str, gguf: str | None, with_transformers: bool) -> list[Engine]:
    """The baselines that were asked for."""
    found: list[Engine] = []
    if with_transformers:
        found.append(Transformers(str(zoo.resolve(model)), lm.eos_ids))
    if gguf:
        found.append(LlamaCpp(gguf, lm.eos_ids))
    return found
