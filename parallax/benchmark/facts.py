"""Where, with what and on what a benchmark was measured."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax

import parallax
from parallax.benchmark.settings import Settings
from parallax.decoding.sampling import active
from parallax.generate import LanguageModel


def process(lm: LanguageModel) -> dict[str, Any]:
    """Where and with what this process measures. No name of the machine, no path of it."""
    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"parallax": parallax.__version__, "jax": jax.__version__, "python": platform.python_version()},
        "backend": devices[0].platform,
        "device": _processor() if on_cpu else devices[0].device_kind,
        "devices": len(devices),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(lm.params["target"])),
        "config": dataclasses.asdict(lm.model.config),
    }


def _processor() -> str:
    """The CPU's name, where the system tells it."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.processor() or platform.machine())


def summary(settings: Settings, processes: Sequence[dict[str, Any]], records) -> dict[str, str]:
    """What was measured where, for the head of a page."""
    last, decoding = processes[-1], settings.decoding
    count, began = len(processes), processes[0]["started"][:16].replace("T", " at ")
    drawn = f"temperature {decoding['temperature']}" if decoding["temperature"] else "greedy"
    sampling = ", ".join([drawn, *(f"{key} {value}" for key, value in active(decoding).items())])
    config = last["config"]
    facts = {
        "model": f"{settings.model}, {last['parameters'] / 1e6:.1f}M parameters, {config['num_layers']} layers, "
                 f"{config['dtype']}" + (f"; draft model {settings.draft}" if settings.draft else ""),
        "decoding": f"{sampling}, at most {decoding['max_new_tokens']} new tokens, batch {settings.batch_size}"
                    + (", past end of text" if decoding["ignore_eos"] else "")
                    + (", chat template" if settings.chat else ""),
        "prompts": "; ".join(f"{p.file} ({len(p.texts)} prompts, {_lengths(records, p.label)} tokens, sha256 "
                             f"{p.sha256[:12]})" for p in settings.prompts),
        "measured": f"{settings.repeats} repeat{'s' * (settings.repeats > 1)}, all methods in turn, in {count} "
                    f"process{'es' * (count > 1)}, first on {began} UTC",
    }
    facts["hardware"] = " and ".join(dict.fromkeys(map(_where, processes)))
    return facts


def _where(process: dict[str, Any]) -> str:
    devices = f"{process['devices']} device{'s' if process['devices'] > 1 else ''}, {process['cpus']} CPUs"
    versions = ", ".join(f"{name} {version}" for name, version in process["versions"].items())
    flags = f", XLA_FLAGS {process['xla_flags']}" if process["xla_flags"] else ""
    return f"{process['backend']}, {process['device']}, {devices}, {versions}{flags}"


def _lengths(records, label: str) -> str:
    lengths = [n for record in records if record["prompts"] == label for n in record["prompt_tokens"]]
    return f"{min(lengths)} to {max(lengths)}"
