"""transformers and llama.cpp as engines of `parallax.benchmark`: greedy, one sequence, as many threads as there are
cores."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from parallax import zoo
from parallax.benchmark.command import Baselines
from parallax.benchmark.engine import Measurement
from parallax.benchmark.settings import Settings
from parallax.generate import LanguageModel

Generate = Callable[[Sequence[int], int], list[int]]


class Greedy:
    """An engine that only says what it generates: `generate(ids, count)` returns at most `count` new ids."""

    def __init__(self, label: str, generate: Generate, count: int):
        self.label, self._generate, self._count = label, generate, count
        generate([1] * 16, 4)                       # warms up

    def run(self, prompts, row_ids, seed) -> Measurement:
        """What the first token takes is prefill, up to the time per token of the others."""
        began = time.perf_counter()
        self._generate(prompts[0], 1)
        first = time.perf_counter() - began
        began = time.perf_counter()
        out = self._generate(prompts[0], self._count)
        total = time.perf_counter() - began
        per_token = (total - first) / (len(out) - 1) if len(out) > 1 else total
        return Measurement(ids=[out], prefill=max(first - per_token, 0.0), decode=per_token * len(out))


def baselines(flags: Any) -> Baselines:
    """The engines that the flags `transformers` and `gguf` ask for, by name and version.

    Raises:
      ValueError: an engine that is not installed, or no such file.
    """
    found: dict[str, Callable[[LanguageModel, Settings], Greedy]] = {}
    if flags.transformers:
        label = _installed("transformers", "torch", "transformers")
        found[label] = functools.partial(_take_part, label, _transformers)
    if flags.gguf is not None:
        if not pathlib.Path(flags.gguf).is_file():
            raise ValueError(f"there is no file {flags.gguf!r}: give --gguf the model as llama.cpp reads it")
        label = _installed("llama.cpp", "llama-cpp-python")
        found[label] = functools.partial(_take_part, label, functools.partial(_llama_cpp, flags.gguf))
    return found


def _take_part(label: str, load: Callable[[LanguageModel, Settings], Generate], lm: LanguageModel,
               settings: Settings) -> Greedy:
    """Raises ValueError for a benchmark that these engines cannot take part in."""
    if settings.batch_size > 1 or settings.decoding["temperature"] > 0:
        raise ValueError("transformers and llama.cpp are measured greedy and one prompt at a time: leave out "
                         "--batch_size and --temperature")
    return Greedy(label, load(lm, settings), settings.decoding["max_new_tokens"])


def _installed(name: str, *packages: str) -> str:
    try:
        return f"{name} {[importlib.metadata.version(package) for package in packages][-1]}"
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{name} is not installed: pip install {' '.join(packages)}") from None


def _eos(lm: LanguageModel, settings: Settings) -> list[int]:
    return [] if settings.decoding["ignore_eos"] else list(lm.eos_ids)


def _transformers(lm: LanguageModel, settings: Settings) -> Generate:
    """`generate` of transformers on the same folder, float32."""
    import torch
    from transformers import AutoModelForCausalLM
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(zoo.resolve(settings.model), dtype=torch.float32).eval()
    # -1 ends nothing; None or nothing would take the folder's own.
    eos = _eos(lm, settings) or [-1]

    def generate(ids, count):
        x = torch.tensor([ids])
        with torch.no_grad():
            out = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=count, do_sample=False,
                                 pad_token_id=0, eos_token_id=eos)
        return out[0, len(ids):].tolist()

    return generate


def _llama_cpp(gguf: str, lm: LanguageModel, settings: Settings) -> Generate:
    """llama.cpp on a GGUF file, whatever its type."""
    from llama_cpp import Llama
    threads, eos = len(os.sched_getaffinity(0)), _eos(lm, settings)
    model = Llama(gguf, n_ctx=min(lm.model.config.max_positions, 8192), n_threads=threads, n_threads_batch=threads,
                  verbose=False)

    def generate(ids, count):
        model.reset()
        out = []
        for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
            out.append(token)
            if len(out) == count or token in eos:
                break
        return out

    return generate
