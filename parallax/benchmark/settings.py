"""What a benchmark compares and on what: the config and the flags, checked before anything is loaded."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from parallax import prompts as prompt_files
from parallax import zoo
from parallax.benchmark import defaults
from parallax.decoding import check_settings, make_sampler, method, options_of
from parallax.decoding.sampling import SAMPLING, active
from parallax.models.config import check_kernels, nearest
from parallax.settings import complete

REFERENCE = "autoregressive"
BUILT_IN = "built-in"               # the prompt where no file is given; a chat, if the model has a template


@dataclasses.dataclass(frozen=True)
class Contender:
    """A method with its options and its verifier; `label` names it in the tables."""

    label: str
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    verifier: str = "follow"


@dataclasses.dataclass(frozen=True)
class Prompts:
    """The prompts taken from one file: `file` as the user gave it, `index` where they stood in it."""

    file: str
    label: str
    texts: tuple[str, ...]
    index: tuple[int, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Settings:
    """A checked benchmark. `contenders` begin with plain decoding; `baselines` are labels of other engines.

    `decoding` is what every method is called with: max_new_tokens, ignore_eos, temperature, and other settings of
    `make_sampler` that change something.
    """

    model: str
    draft: str
    contenders: tuple[Contender, ...]
    prompts: tuple[Prompts, ...]
    chat: bool
    system: str
    batch_size: int
    repeats: int
    seed: int
    decoding: dict[str, Any]
    baselines: tuple[str, ...] = ()
    costs: bool = False
    kernels: str = "auto"

    @property
    def labels(self) -> tuple[str, ...]:
        return (*(contender.label for contender in self.contenders), *self.baselines)

    def describe(self) -> dict[str, Any]:
        """All that decides what is measured, as JSON knows it; of prompts what they hash to."""
        methods = {c.label: {"name": c.name, "options": {**options_of(c.name), **c.options}, "verifier": c.verifier}
                   for c in self.contenders}
        files = {p.file: {"prompts": len(p.texts), "sha256": p.sha256} for p in self.prompts}
        weights = {name: found for name in (self.model, self.draft) if (found := _files_of(name))}
        result = {"model": self.model, "draft": self.draft, "weights": weights, "methods": methods,
                  "baselines": list(self.baselines),
                  "prompts": files, "chat": self.chat, "system": self.system, "batch_size": self.batch_size,
                  "repeats": self.repeats, "seed": self.seed, "kernels": self.kernels,
                  **self.decoding}
        return json.loads(json.dumps(result, default=str))


def _files_of(name: str) -> str | None:
    """What tells a local model from the one that stood at its path before: sizes and times of its files."""
    path = pathlib.Path(name).expanduser()
    if not name or not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def resolve(config: Any, given: Mapping[str, Any], baselines: Sequence[str] = ()) -> Settings:
    """The defaults, the config over them, and the flags over both.

    A method of the config that needs a draft model is left out, with a notice on stderr, where there is none.

    Raises:
      ValueError: an unknown key or method, a value of another type or out of range, a prompt file that cannot be used.
    """
    chosen = {**complete(config.to_dict(), defaults.get_config().to_dict()), **given}
    for key in ("count", "repeats", "max_new_tokens", "batch_size"):
        if chosen[key] < 1:
            raise ValueError(f"{key} must be at least 1, got {chosen[key]}")
    make_sampler(**{key: chosen[key] for key in SAMPLING})
    check_kernels(chosen["kernels"])
    if not 0 <= chosen["seed"] <= 2**31 - chosen["repeats"]:
        raise ValueError(f"seed must be from 0 to {2**31 - chosen['repeats']}, got {chosen['seed']}")
    if chosen["system"] and not chosen["chat"]:
        raise ValueError("a system message needs a chat: add --chat")
    draft = chosen["draft"] or zoo.draft_of(chosen["model"]) or ""
    contenders = _contenders(chosen["methods"], draft, wanted="methods" in given)
    if not any(method(c.name).needs_draft for c in contenders):
        if chosen["draft"]:
            raise ValueError(f"none of the methods uses the draft model {draft!r}: add one that does to --methods, or "
                             "leave out --draft")
        draft = ""
    labels = [*(c.label for c in contenders), *baselines]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ValueError(f"the method {twice!r} is there twice: leave one out, or give each its own label in a config")
    prompts = _prompts(chosen["prompts"], chosen["count"])
    decoding = {key: chosen[key] for key in ("max_new_tokens", "ignore_eos", "temperature")} | active(chosen)
    return Settings(chosen["model"], draft, contenders, prompts, chosen["chat"], chosen["system"],
                    chosen["batch_size"], chosen["repeats"], chosen["seed"], decoding, tuple(baselines),
                    chosen["costs"], chosen["kernels"])


def _contenders(entries: Sequence[Any], draft: str, *, wanted: bool) -> tuple[Contender, ...]:
    """Plain decoding and the methods, fit for each other. `wanted`: each was asked for by name, so none is left out."""
    result = [Contender(REFERENCE, REFERENCE)]
    for chosen in map(contender, entries):
        needy = method(chosen.name).needs_draft
        if needy and not draft and not wanted:
            print(f"{chosen.label} is left out: it needs a draft model, give one with --draft", file=sys.stderr)
            continue
        check_settings(chosen.name, chosen.options, verifier=chosen.verifier, draft=needy and bool(draft))
        result += [chosen] if chosen.name != REFERENCE else []
    return tuple(result)


def contender(entry: str | Mapping[str, Any]) -> Contender:
    """From `NAME:option=value:verifier=NAME` or a mapping with name, options, verifier and label.

    Raises:
      ValueError: an unknown method, or what is neither of the two.
    """
    if isinstance(entry, str):
        entry = _parse(entry)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("options", {}), Mapping):
        raise ValueError(f"a method must be a name or a dict with name and options, got {entry!r}")
    known = [field.name for field in dataclasses.fields(Contender)]
    for key in entry:
        if key not in known:
            raise ValueError(f"a method of the config has no key {key!r}: expected one of {', '.join(known)}"
                             f"{nearest(key, known)}")
    for key in set(entry) - {"options"}:
        if not isinstance(entry[key], str):
            raise ValueError(f"a method's {key} must be a text, got {entry[key]!r}")
    name, options, verifier = entry.get("name"), dict(entry.get("options", {})), entry.get("verifier", "follow")
    method(name)
    named = {**options, **({"verifier": verifier} if verifier != "follow" else {})}
    return Contender(entry.get("label") or " ".join([name, *(f"{k}={v}" for k, v in named.items())]), name, options,
                     verifier)


def names(text: str) -> list[str]:
    """The methods of a list with commas; those in brackets belong to a method's options."""
    return [name.strip() for name in _split(text, ",") if name.strip()]


def _split(text: str, mark: str) -> list[str]:
    """As `text.split(mark)`, but not inside of brackets."""
    depth, parts = 0, [""]
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == mark and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _parse(text: str) -> dict[str, Any]:
    name, *pairs = _split(text.strip(), ":")
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is no method with options: expected NAME:option=value:option=value")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    verifier = {"verifier": options.pop("verifier")} if "verifier" in options else {}
    return {"name": name, "options": options, **verifier}


def _prompts(files: Sequence[str], count: int) -> tuple[Prompts, ...]:
    if not files:
        return (Prompts(BUILT_IN, BUILT_IN, (prompt_files.EDITING,), (0,)),)
    result = []
    for file in files:
        if not isinstance(file, str):
            raise ValueError(f"prompts must be names of files, got {file!r}")
        if files.count(file) > 1:
            raise ValueError(f"the prompt file {file!r} is there twice: give it once")
        texts = prompt_files.read(file)
        size = min(count, len(texts))
        index = tuple(i * len(texts) // size for i in range(size))
        label = pathlib.PurePath(file).name.split(".")[0]
        result.append(Prompts(file, label, tuple(texts[i] for i in index), index))
    labels = [prompts.label for prompts in result]
    return tuple(dataclasses.replace(p, label=p.file) if labels.count(p.label) > 1 else p for p in result)
