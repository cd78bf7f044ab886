"""What `python -m parallax.train` does with a training config: checks it, puts the parts together, trains, exports."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from parallax import checkpoint, sharding, zoo
from parallax.checkpoint import Checkpoint
from parallax.models import Model
from parallax.settings import complete
from parallax.tokenizer import Tokenizer
from parallax.train import corpus, data, defaults, setup, simulate
from parallax.train.checkpoints import Checkpoints
from parallax.train.corpus import Corpus
from parallax.train.loop import Program, Schedule, TrainState, join, rest, run
from parallax.train.metrics import Metrics
from parallax.train.optimizer import Optimizer
from parallax.train.workdir import Workdir

# What may change when a run goes on: how long and how fast it learns, how often it looks, on how many devices it runs.
_FREE = ("steps", "log_every", "eval_", "checkpoint_every", "keep", "mesh.", "optimizer.learning_rate")


def main(config: Any, workdir: pathlib.Path) -> None:
    """Trains as `config` says, from where `workdir` stopped.

    Raises:
      ValueError: bad input, before anything is written.
      FloatingPointError: the loss is not a number.
      OSError: something cannot be written.
    """
    values = complete(config.to_dict(), defaults.get_config().to_dict(), extensible=("model",))
    values["dtype"] = setup.resolve_dtype(values["dtype"])
    mesh = sharding.make_mesh(**values["mesh"])
    optimizer = setup.build(Optimizer, values["optimizer"], "optimizer")
    schedule = Schedule(**{f.name: values[f.name] for f in dataclasses.fields(Schedule)})
    setup.check_numbers(values, mesh)
    folder = Workdir(workdir, values, _FREE)
    zoo.use_compile_cache()
    parts = setup.parts(values, workdir)
    train, held_out = corpus.split(parts.texts, values["data"]["held_out"])
    batches = data.batches(train, length=values["sequence_length"], batch_size=values["batch_size"],
                           seed=values["seed"])
    folder.claim(corpus=parts.texts.digest, **({"target": parts.target_digest} if parts.target else {}))
    _keep_tokenizer(parts.tokenizer, workdir / "tokenizer")
    target = parts.target and parts.target.params
    frozen = target and jax.device_put(target, sharding.params_sharding(target, mesh))
    program = Program(objective=parts.objective, optimizer=optimizer, schedule=schedule, mesh=mesh,
                      seed=values["seed"], frozen=frozen)
    console = Console(stderr=True)
    plan = data.summary(train, data.pack(train, values["sequence_length"]))
    console.print(_overview(values, program, parts.texts.digest, plan, workdir))
    evaluate = _evaluation(values, program, held_out, parts.target)
    kept = dict(keep=values["keep"], keep_every=values["keep_every"] or None)
    with jax.set_mesh(mesh), Checkpoints(workdir, **kept) as checkpoints, Metrics(workdir) as metrics:
        state = _restore(program, checkpoints, batches, metrics, parts.start, console)
        metrics.text("config", f"```json\n{json.dumps(values, indent=2)}\n```")
        if int(state.step) < schedule.steps:
            state = run(program, state, batches, checkpoints=checkpoints, metrics=metrics, evaluate=evaluate)
        final = evaluate(state.best)
    export(parts, state.best, workdir / "export")
    if final:
        console.print(_summary(final))
    console.print(f"{workdir / 'export'}", highlight=False, markup=False, soft_wrap=True)


def _keep_tokenizer(tokenizer: Tokenizer | None, folder: pathlib.Path) -> None:
    """Writes the tokenizer beside the run once, all of it or nothing: it may have been trained on the corpus."""
    if tokenizer is None or folder.exists():
        return
    with tempfile.TemporaryDirectory(prefix=".tokenizer-", dir=folder.parent) as temporary:
        new = pathlib.Path(temporary) / "tokenizer"
        new.mkdir()
        tokenizer.save(new)
        new.rename(folder)


def _evaluation(values, program: Program, held_out: Corpus, target: Checkpoint | None):
    """A function of parameters: held-out means, and what decoding with them will measure."""
    batches = list(data.held_out_batches(held_out, length=values["sequence_length"], batch_size=values["batch_size"],
                                         limit=values["eval_batches"]))
    texts = None
    if target is not None and values["eval_prompts"] and len(held_out.prompts):
        prompts = data.prompts(held_out, values["eval_prompts"], values["eval_prompt_length"])
        texts = simulate.greedy_texts(Model(target.config), program.frozen, prompts, values["eval_new_tokens"],
                                      target.eos_ids)

    def evaluate(params) -> dict[str, float]:
        result = program.evaluate(params, batches)
        if texts is not None:
            result |= {name: float(x) for name, x in program.simulate(params, texts).items()}
        return result

    return evaluate


def _restore(program: Program, checkpoints: Checkpoints, batches, metrics: Metrics, start, console) -> TrainState:
    like = program.like
    found = checkpoints.resume(like.params, rest(like))
    if found is None:
        metrics.resume(0)                             # a run killed before its first checkpoint has left figures
        return program.create(start)
    step, params, others, place = found
    batches.set_state(place)
    metrics.resume(step)
    console.print(f"going on behind step {step}")
    return join(params, others)


def export(parts: setup.Parts, params: Any, folder: pathlib.Path) -> None:
    """Writes the parameters as a Hugging Face folder in float32. Raises OSError if it cannot be written."""
    owner = parts.target or parts.tokenizer
    checkpoint.save(Checkpoint(parts.objective.model.config.replace(dtype="float32"),
                               jax.tree.map(np.asarray, jax.device_get(params)), parts.tokenizer,
                               owner.eos_ids if owner else ()), folder, overwrite=True)


def _overview(values, program: Program, digest: str, plan: dict[str, Any], workdir: pathlib.Path) -> Table:
    size = sum(x.size for x in jax.tree.leaves(program.like.params))
    table = Table(show_header=False, box=None)
    for name, value in (
            ("objective", values["objective"]), ("parameters", f"{size:,}"),
            ("corpus", f"{plan['documents']:,} documents, {plan['tokens']:,} tokens in {plan['rows']:,} rows, "
                       f"{plan['fill']:.1%} full, {digest[:12]}"),
            ("per update", f"{values['batch_size']} rows of {values['sequence_length']} tokens"),
            ("updates", f"{values['steps']:,}"),
            ("devices", f"{program.mesh.size} x {jax.devices()[0].platform}, {values['dtype']}"),
            ("workdir", str(workdir))):
        table.add_row(name, value)
    return table


def _summary(final: dict[str, float]) -> Table:
    table = Table("held out", "")
    for name, value in final.items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    return table
