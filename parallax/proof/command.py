"""What `python -m parallax.prove` does once its flags are parsed."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from tqdm import tqdm

import parallax
from parallax import zoo
from parallax.decoding import METHODS, VERIFIERS, check_settings, spec
from parallax.decoding import method as method_of
from parallax.generate import LanguageModel
from parallax.proof import law, rules, structure, table, ties, tokens
from parallax.proof.real import Real
from parallax.proof.record import TARGET, Record, Task
from parallax.proof.subjects import Subject, everything, refusal, target, trace

_KEPT = 48              # checks after which compiled programs are dropped: a process may map only so many


def prove(subjects: Sequence[Subject] | None = None, *, rule_texts: Sequence[str] = (), controls: bool = False,
          quick: bool = False, model: str | None = None, draft: str | None = None, output: str | None = None,
          overwrite: bool = False, sampling: Mapping[str, Any] | None = None) -> int:
    """Checks the claims, prints tables, perhaps writes JSON.

    Args:
      subjects: methods with their verifiers; None takes all that are registered, in all pairs that fit.
      rule_texts: verifiers to check by themselves, on toy tables.
      controls: also run the negative controls.
      quick: fewer seeds, tables and texts, and XLA without its optimisations, which is most of the time.
      model, draft: names of models to check the methods on, besides tiny ones.
      output: file for the records; `overwrite`: whether it may exist.
      sampling: settings of the sampled checks of all methods.

    Returns:
      0 if all claims stood, 1 if one fell.

    Raises:
      ValueError: parts that do not fit together, or an output that cannot be written; before anything is checked.
    """
    _check_output(output, overwrite)
    explicit, refused = subjects is not None, {}
    if explicit:
        for subject in subjects:
            _check(subject)
    if quick and model is None:             # read when JAX first uses a device
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    if explicit:
        for subject in subjects:
            trace(subject.sampled(target()), target().case(subject))
    else:
        found = [(subject, refusal(subject))
                 for subject in everything(sampling or Subject("autoregressive").sampling, quick)]
        subjects = [subject for subject, why in found if why is None]
        refused = {f"{subject.label} {subject.verifier}": why for subject, why in found if why is not None}
    tasks = [*plan(subjects, quick), *rules.plan(rule_texts, quick), *(rules.controls() if controls else ())]
    if model is not None:
        tasks += real_tasks(subjects, model, draft, quick, explicit)
    records, bar = [], tqdm(tasks, unit="check", disable=not sys.stderr.isatty(), leave=False)
    for number, task in enumerate(bar):
        bar.set_postfix_str(task.label, refresh=True)
        records.append(task.run())
        if number % _KEPT == _KEPT - 1:
            jax.clear_caches()
            gc.collect()
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for part in table.tables(records, console.width):
        console.print(part)
    fallen = table.failures(records)
    for line in fallen:
        console.print(f"[bold red]failed[/] {escape(line)}", soft_wrap=True, highlight=False)
    console.print(f"{len(records) - len(fallen)} of {len(records)} checks passed. {table.limits()}.", soft_wrap=True,
                  highlight=False)
    if refused:
        console.print(f"{len(refused)} combinations were refused, as by `decode`; the .json file of --output says why.",
                      soft_wrap=True, highlight=False)
    if output is not None:
        table.write(output, records, {**_facts(quick), "refused": refused})
        console.print(output, markup=False, highlight=False, soft_wrap=True)
    return 1 if fallen else 0


def plan(subjects: Sequence[Subject], quick: bool) -> Iterator[Task]:
    """The checks of every method on tiny targets.

    At temperature 0 the rules for drawn drafts *are* sample-and-follow: then only one of them is checked greedily.
    Quick, every method has all kinds of checks once; with further verifiers, trees and controllers only tokens or law.
    """
    seeds = (0, 1) if quick else (0, 1, 2, 3)
    seen: list[Any] = []                                     # greedy decoders
    whole: set[str] = set()                                  # methods that had all the checks of a quick selection
    for subject in subjects:
        sampled, greedy = subject.sampled(target()), None
        with contextlib.suppress(ValueError):                # a draft that must be drawn has no form at temperature 0
            greedy = subject.greedy(target())
        greedy = None if greedy in seen else greedy
        seen.append(greedy)
        checks: dict[str, Callable[[], Record]] = {}
        brief = quick and subject.method in whole
        if greedy is not None and not (brief and sampled.guarantee == "exact"):
            checks["greedy"] = functools.partial(tokens.equal_tokens, subject, "greedy", seeds=seeds, alone=not quick)
        if sampled.guarantee in ("exact", "lossy"):
            checks["seeded"] = functools.partial(tokens.equal_tokens, subject, "seeded", seeds=seeds, alone=not quick)
        if not quick or sampled.guarantee != "exact":        # equal tokens have an equal law
            checks["law"] = functools.partial(law.sampled_law, subject, draws=4000 if quick else 16000)
        names = () if brief else structure.QUICK if quick else structure.ALL
        for decoder, suffix in ((greedy, ""), (sampled, "" if greedy is None else structure.SAMPLED)):
            if decoder is not None and not (quick and suffix):
                checks |= {name + suffix: functools.partial(structure.invariant, subject, decoder, name)
                           for name in names}
        if greedy is not None and not brief:
            checks["bfloat16"] = functools.partial(ties.tiny_ties, subject, seeds=seeds[:1] if quick else seeds)
        whole.add(subject.method)
        for name, check in checks.items():
            claim = greedy.guarantee if name in ("greedy", "bfloat16") else sampled.guarantee
            yield Task(f"{subject.label} {subject.verifier}: {name}", check,
                       functools.partial(Record, TARGET, subject.label, subject.verifier, claim, name, False, {}))


def real_tasks(subjects: Sequence[Subject], model: str, draft: str | None, quick: bool, explicit: bool) -> list[Task]:
    """The checks on the user's model. Loads it, and only if needed its draft model.

    Raises ValueError if a method that was asked for needs a draft model and there is none.
    """
    draft = draft or zoo.draft_of(model)
    needy = [subject for subject in subjects if method_of(subject.method).needs_draft]
    if needy and draft is None:
        if explicit:
            raise ValueError(f"method {needy[0].method!r} needs a draft model of {model!r}: give one with --draft")
        print(f"not checked on {model}, for they need a --draft: {', '.join(dict.fromkeys(s.label for s in needy))}",
              file=sys.stderr)
        subjects = [subject for subject in subjects if subject not in needy]
    zoo.use_compile_cache()
    loaded = draft if any(method_of(subject.method).needs_draft for subject in subjects) else None
    tasks = []
    for dtype in ("float32",) if quick else ("float32", "bfloat16"):
        name = model if dtype == "float32" else f"{model}, bfloat16"
        real = functools.cache(lambda dtype=dtype, name=name: Real(
            name, LanguageModel.load(model, draft=loaded, dtype=dtype)))
        for subject in subjects:
            if subject.method == "autoregressive":
                continue
            claim = spec.parse(subject.verifier, VERIFIERS, "verifier")[0].guarantee
            checks = {"greedy": lambda r=real, s=subject: r().equal_tokens(s, "greedy"),
                      "seeded": lambda r=real, s=subject: r().equal_tokens(s, "seeded")} if dtype == "float32" else \
                     {"bfloat16": lambda r=real, s=subject: r().near_ties(s)}
            tasks += [Task(f"{name}, {subject.label} {subject.verifier}: {check}", run,
                           functools.partial(Record, name, subject.label, subject.verifier, claim, check, False, {}))
                      for check, run in checks.items()]
    return tasks


def _check(subject: Subject) -> None:
    check_settings(subject.method, subject.options, verifier=subject.verifier,
                   draft=method_of(subject.method).needs_draft)


def _check_output(output: str | None, overwrite: bool) -> None:
    if output is None:
        return
    path = pathlib.Path(output)
    if not output or path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{output or repr(output)} cannot be written: expected a file in an existing folder")
    if path.exists() and not overwrite:
        raise ValueError(f"{output} exists: give another --output or add --overwrite")


def _facts(quick: bool) -> dict[str, Any]:
    """What proved it. No name of the machine."""
    return {"quick": quick, "backend": jax.default_backend(), "methods": list(METHODS), "rules": list(VERIFIERS),
            "versions": {"parallax": parallax.__version__, "jax": jax.__version__,
                         "python": platform.python_version()}}
