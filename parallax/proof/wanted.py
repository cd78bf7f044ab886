"""From the command line's flags to what is to be proven."""

from __future__ import annotations

import pathlib
import runpy
from collections.abc import Mapping
from typing import Any

from parallax.decoding import METHODS, VERIFIERS, Sample, defaults, method, spec
from parallax.decoding.sampling import active, make_sampler, sequences
from parallax.models.config import nearest
from parallax.proof.subjects import TEMPERATURE, Subject, refusal
from parallax.settings import complete

_CONFIGS = pathlib.Path("configs/decode")


def resolve(flags: Any) -> dict[str, Any]:
    """The arguments of `command.prove`.

    Raises:
      ValueError: an unknown name, settings that contradict each other, a config that cannot be read.
    """
    if flags.temperature is not None and not flags.temperature > 0:
        raise ValueError(f"temperature must be above 0 (greedy decoding is checked besides), got {flags.temperature}")
    if flags.options and flags.method is None:
        raise ValueError("options without a method: add --method")
    if flags.config and (flags.method or flags.verifier or flags.options):
        raise ValueError("--config says method, verifier and options: give either it or them")
    if flags.draft and not flags.model:
        raise ValueError("a draft model without a model: add --model")
    sampling = {"temperature": flags.temperature or TEMPERATURE}
    make_sampler(**sampling)
    subjects, rules = None, []
    if flags.config:
        subjects = [from_config(name, flags.temperature) for name in flags.config]
        rules = [subject.verifier for subject in subjects]
    elif flags.method or flags.verifier:
        verifier = flags.verifier or "follow"
        spec.build(verifier, VERIFIERS, "verifier", sampler=Sample())              # says what is wrong with it
        chosen = [Subject(name, _options(name, flags.options), verifier, sampling)
                  for name in ([flags.method] if flags.method else METHODS)]
        subjects = chosen if flags.method else [subject for subject in chosen if not refusal(subject)]
        rules = [verifier]
    everything = flags.all or subjects is None
    return dict(subjects=None if everything else subjects, sampling=sampling,
                rule_texts=list(dict.fromkeys([*(VERIFIERS if everything else ()), *rules])),
                controls=everything or flags.controls, quick=flags.quick, model=flags.model, draft=flags.draft,
                output=flags.output, overwrite=flags.overwrite)


def from_config(name: str, temperature: float | None = None) -> Subject:
    """The method, options, verifier and sampling of a decode config: FILE[:VARIANT] or a name from configs/decode."""
    settings = _config(name)
    if type(settings["temperature"]) not in (int, float):
        raise ValueError(f"{name}: the temperature must be one number to prove, got {settings['temperature']!r}")
    sampling = {**active(settings), "temperature": temperature or settings["temperature"] or TEMPERATURE}
    if sequences(make_sampler(**sampling)):
        raise ValueError(f"{name}: the sampling settings must be the same for all sequences, got lists: prove each")
    return Subject(settings["method"], settings["options"], settings["verifier"], sampling)


def _config(name: str) -> Mapping[str, Any]:
    path, _, variant = name.partition(":")
    file = next((file for file in (pathlib.Path(path), _CONFIGS / f"{path}.py") if file.is_file()), None)
    if file is None:
        known = sorted(found.stem for found in _CONFIGS.glob("*.py"))
        names = f" or one of {', '.join(known)}{nearest(path, known)}" if known else ""
        raise ValueError(f"there is no config {path!r}: expected a .py file{names}")
    try:
        config = runpy.run_path(str(file))["get_config"](*filter(None, [variant])).to_dict()
    except Exception as error:                            # the config is a program
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error}") from None
    chosen = config.get("method", "prompt_lookup")
    method(chosen)
    return complete(config, defaults.get_config(chosen).to_dict())


def _options(name: str, text: str | None) -> dict[str, Any]:
    """`draft_length=3, kind='coupled'` as a dict."""
    method(name)
    return spec.parse(f"{name}({text or ''})", {name: METHODS[name].drafter}, "method")[1]
