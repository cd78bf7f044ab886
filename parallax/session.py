"""What `python -m parallax.decode` does once its flags are parsed."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from parallax import costs, report, zoo
from parallax import prompts as prompt_files
from parallax.decoding import METHODS, check_settings, defaults, method
from parallax.decoding.sampling import SAMPLING, make_sampler
from parallax.generate import Completion, LanguageModel, Run
from parallax.models.config import check_kernels
from parallax.settings import complete
from parallax.tokenizer import TextStream


def decode(config: Any, given: dict[str, Any], flags: Any) -> None:
    """Reads the prompts, streams the completions to stdout, and ends with a table on stderr.

    Args:
      config: the resolved decode config.
      given: settings from flags, which win over the config.
      flags: prompt, prompts, output, overwrite, compare.

    Raises:
      ValueError: bad input, before the model is loaded wherever possible.
    """
    console = Console(stderr=True)
    if given.get("method") == "help":
        Console().print(_methods())
        return
    settings = _settings(config, given)
    name, options, source, kernels = (settings.pop(key) for key in ("method", "options", "model", "kernels"))
    check_kernels(kernels)
    draft = settings.pop("draft") or (zoo.draft_of(source) if method(name).needs_draft else None)
    check_settings(name, options, verifier=settings["verifier"], draft=draft is not None)
    sampling = {key: settings[key] for key in SAMPLING}
    make_sampler(**sampling)
    if settings["system"] and not settings["chat"]:
        raise ValueError("a system message needs a chat: add --chat")
    output = report.JsonLines(flags.output, overwrite=flags.overwrite) if flags.output is not None else None
    texts = _prompts(flags)
    built_in = texts is None
    if built_in:
        texts = [prompt_files.EDITING]
    compare = sys.stdout.isatty() if flags.compare is None else flags.compare
    zoo.use_compile_cache()
    model = LanguageModel.load(source, draft=draft, kernels=kernels)
    settings["chat"] |= built_in and model.chats
    settings["system"] = settings["system"] or None
    with output or contextlib.nullcontext():
        guarantee = model.decoder(name, options, verifier=settings["verifier"], **sampling).guarantee
        made_by = {"method": name, "guarantee": guarantee, "model": source, "draft": draft, "options": options,
                   "kernels": kernels, **settings}
        run = _show(model, texts, {**settings, "method": name, "options": options},
                    lambda i, done: output and output.write(report.record(texts[i], done, made_by)))
    runs, reference, why = [run], None, None
    if compare and name != "autoregressive":
        with console.status("plain decoding, for comparison"):
            run, reference = _compared(model, texts, settings, run, name, options)
        runs = [run, reference]
        with console.status("what a step costs"):
            why = _explained(model, settings, run, name, options, min(settings["batch_size"], len(texts)))
    console.print(report.table(runs, reference))
    if why is not None:
        console.print(why, highlight=False, markup=False, soft_wrap=True)


def _compared(model: LanguageModel, texts: Sequence[str], settings: dict[str, Any], run: Run, name: str,
              options: dict[str, Any]) -> tuple[Run, Run]:
    """(the run, plain decoding), timed warm: the first run of a program sets up its buffers and counts for nothing.

    The compile times stay those of the first runs. A run of over a minute is not repeated.
    """
    plain = {"method": "autoregressive", "options": {}, "verifier": "follow"}

    def again(**changes: Any) -> Run:
        return model.generate(texts, **{**settings, "method": name, "options": options, **changes},
                              on_tokens=(lambda *_: None) if _streams(settings) else None)

    reference = again(**plain)
    if run.decode + reference.decode > 60:
        return run, reference
    warm, warm_reference = again(), again(**plain)
    return (dataclasses.replace(warm, compile=run.compile),
            dataclasses.replace(warm_reference, compile=reference.compile))


def _explained(model: LanguageModel, settings: dict[str, Any], run: Run, name: str, options: dict[str, Any],
               batch: int) -> str:
    """What the cost model expects of the run: speedup, break-even, and why tokens per forward are not speed."""
    of_batch = {key: value[:batch] if isinstance(value, (list, tuple)) else value
                for key, value in settings.items() if key in SAMPLING}
    decoder = model.decoder(name, options, verifier=settings["verifier"], **of_batch)
    params = model.params if method(name).needs_draft else {"target": model.params["target"]}
    block = costs.block_rows(decoder, params, batch)
    target = costs.measure(model.model, params["target"], batch, (block,))
    rows = sum(done.target_rows for done in run.completions) / run.target_forwards
    return costs.explain(run.tokens_per_forward, rows, costs.mixed_ms(target, rows, block),
                         costs.draft_ms(decoder, params, batch), target)


def _settings(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The defaults, the config over them, and the flags over both; every key is known and has a value of its type."""
    chosen = config.get("method", given.get("method", "prompt_lookup"))
    if given.get("method", chosen) != chosen:
        raise ValueError(f"--method {given['method']} contradicts the config, which is for {chosen}: give only one")
    method(chosen)                                      # answers an unknown one with the known
    return {**complete(config.to_dict(), defaults.get_config(chosen).to_dict()), **given}


def _streams(settings: dict[str, Any]) -> bool:
    """Whether text is shown as it comes; a stop string may be half out before it is one."""
    return settings["batch_size"] == 1 and not settings["stop"]


def _show(model: LanguageModel, texts: Sequence[str], settings: dict[str, Any],
          keep: Callable[[int, Completion], Any]) -> Run:
    """Generates, with the text on stdout as it comes (of prompts decoded together, when they are done)."""
    streaming = _streams(settings)
    streams = [TextStream(model.tokenizer) for _ in texts]
    bar = tqdm(total=len(texts), unit="prompt", disable=len(texts) == 1 or not sys.stderr.isatty(), leave=False)
    started = set()

    def title(i: int) -> None:
        if i not in started and len(texts) > 1:
            print(f"--- prompt {i + 1} of {len(texts)}")
        started.add(i)

    def on_tokens(i: int, ids: Sequence[int]) -> None:
        title(i)
        print(streams[i].push(ids), end="", flush=True)

    def on_completion(i: int, completion: Completion) -> None:
        keep(i, completion)
        title(i)
        print(streams[i].flush() if streaming else completion.text, flush=True)
        bar.update()

    with bar:
        return model.generate(texts, **settings, on_tokens=on_tokens if streaming else None,
                              on_completion=on_completion)


def _prompts(flags: Any) -> list[str] | None:
    """From --prompt, --prompts or standard input; None if there is none of them."""
    if flags.prompt is not None and flags.prompts is not None:
        raise ValueError("both --prompt and --prompts were given: give one of the two")
    if flags.prompts is not None:
        return prompt_files.read(flags.prompts)
    if flags.prompt is not None:
        if not flags.prompt:
            raise ValueError("the prompt is empty: give it at least one character")
        return [flags.prompt]
    kind = os.fstat(sys.stdin.fileno()).st_mode if sys.stdin is not None else 0
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
        return None
    if sys.stderr.isatty():
        print("reading the prompt from standard input", file=sys.stderr)
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text (byte {error.start}): convert it first") from None
    if not text.strip():
        raise ValueError("standard input is empty: pipe a prompt in, or give --prompt or --prompts")
    return [text]


def _methods() -> Table:
    table = Table("method", "what it does", "source")
    for name, entry in METHODS.items():
        table.add_row(name, entry.summary, entry.source)
    return table
