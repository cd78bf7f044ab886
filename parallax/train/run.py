"""What `python -m parallax.train` does with a training config: checks it, puts the parts together, trains, exports."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from parallax import checkpoint, sharding, zoo
from parallax.checkpoint import Checkpoint
from parallax.models import Model, ModelConfig
from parallax.models.config import nearest
from parallax.settings import complete
from parallax.tokenizer import FileTokenizer, Tokenizer
from parallax.train import corpus, data, defaults, simulate, tokenize
from parallax.train.checkpoints import Checkpoints
from parallax.train.loop import Program, Schedule, TrainState, join, rest, run
from parallax.train.metrics import Metrics
from parallax.train.objectives import OBJECTIVES
from parallax.train.objectives.next_token import NextToken
from parallax.train.optimizer import Optimizer
from parallax.train.workdir import Workdir

# What may change when a run goes on: how long it is, how often it looks, and on how many devices it runs.
_FREE = ("steps", "log_every", "eval_", "checkpoint_every", "keep", "mesh.")


def main(config: Any, workdir: pathlib.Path) -> None:
    """Trains as `config` says, from where `workdir` stopped.

    Raises:
      ValueError: bad input, before anything is written.
      FloatingPointError: the loss is not a number.
      OSError: something cannot be written.
    """
    values = complete(config.to_dict(), defaults.get_config().to_dict(), extensible=("model",))
    mesh = sharding.make_mesh(**values["mesh"])
    optimizer = build(Optimizer, values["optimizer"], "optimizer")
    schedule = Schedule(**{f.name: values[f.name] for f in dataclasses.fields(Schedule)})
    _check_batch(values, mesh)
    folder = Workdir(workdir, values, _FREE)
    zoo.use_compile_cache()
    dtype = _dtype(values["dtype"])
    target = _target(values, dtype)
    tokenizer = _tokenizer(values, folder, target)
    objective, start = _objective(values, tokenizer, target, dtype)
    texts = _corpus(values, tokenizer, objective.model.config.vocab_size)
    train, held_out = corpus.split(texts, values["data"]["held_out"])
    shape = dict(length=values["sequence_length"], batch_size=values["batch_size"], seed=values["seed"])
    batches = data.batches(train, **shape)
    folder.claim(corpus=texts.digest, **({"target": corpus.digest_of(target.params)} if target else {}))
    if tokenizer is not None:
        (workdir / "tokenizer").mkdir(exist_ok=True)
        tokenizer.save(workdir / "tokenizer")
    frozen = None if target is None else jax.device_put(target.params, sharding.params_sharding(target.params, mesh))
    program = Program(objective=objective, optimizer=optimizer, schedule=schedule, mesh=mesh, seed=values["seed"],
                      frozen=frozen)
    console = Console(stderr=True)
    console.print(_overview(values, objective, program, texts, workdir))
    evaluate = _evaluation(values, program, held_out, shape, target)
    with Checkpoints(workdir, keep=values["keep"]) as checkpoints, Metrics(workdir) as metrics:
        state = _restore(program, checkpoints, batches, metrics, start, console)
        if int(state.step) < schedule.steps:
            state = run(program, state, batches, checkpoints=checkpoints, metrics=metrics, evaluate=evaluate)
        final = evaluate(state.best)
    export(objective.model, state.best, tokenizer, target, workdir / "export")
    if final:
        console.print(_summary(final, workdir))


def build(cls: type, values: dict[str, Any], where: str) -> Any:
    """A dataclass from the config's values; an unknown field is named with the nearest known one."""
    known = [field.name for field in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            raise ValueError(f"{where}.{name} is not known: expected one of {', '.join(known)}{nearest(name, known)}")
    return cls(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})


def _check_batch(values: dict[str, Any], mesh) -> None:
    rows, parts = values["batch_size"], values["accumulate"]
    if rows < 1 or rows % parts:
        raise ValueError(f"batch_size={rows} must be a positive multiple of accumulate={parts}")
    sharding.check_batch(rows // parts, mesh)
    if values["sequence_length"] < 2:
        raise ValueError(f"sequence_length must be at least 2, got {values['sequence_length']}")


def _dtype(name: str) -> str:
    if name == "auto":
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"unknown dtype {name!r}: expected auto, float32 or bfloat16{nearest(name, ('bfloat16',))}")
    return name


def _target(values: dict[str, Any], dtype: str) -> Checkpoint | None:
    name = values["objective"]
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}: expected one of {', '.join(OBJECTIVES)}"
                         f"{nearest(name, OBJECTIVES)}")
    if name == "next_token":
        if values["target"]:
            raise ValueError("objective next_token trains a target and has none: leave `target` empty, or name the "
                             "weights to start from in `init`")
        return None
    if not values["target"]:
        raise ValueError(f"objective {name} needs a target: set --config.target to a zoo name, a folder, a .gguf file "
                         "or a Hub id")
    return zoo.load(values["target"], dtype=dtype)


def _tokenizer(values: dict[str, Any], folder: Workdir, target: Checkpoint | None) -> Tokenizer | None:
    if target is not None:
        return target.tokenizer
    if (folder.path / "tokenizer" / "tokenizer.json").is_file():
        return FileTokenizer.from_folder(folder.path / "tokenizer")
    part = values["data"]
    return tokenize.build(values["tokenizer"], corpus.texts(part["source"], glob=part["glob"], limit=part["limit"]))


def _objective(values, tokenizer, target, dtype):
    """(the objective, parameters to start from or None)."""
    cls = OBJECTIVES[values["objective"]]
    start = None
    if values["init"]:
        start = zoo.load(values["init"], dtype="float32", tokenizer=False)
        config = start.config
    else:
        config = build(ModelConfig, values["model"] | {"vocab_size": values["model"]["vocab_size"] or _size(
            tokenizer, target)}, "model")
    if tokenizer is not None and config.vocab_size < tokenizer.vocab_size:
        raise ValueError(f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} "
                         "tokens: leave it at 0, which takes the tokenizer's")
    if values["sequence_length"] > config.max_positions:
        raise ValueError(f"sequence_length={values['sequence_length']} is longer than the model's "
                         f"max_positions={config.max_positions}")
    model = Model(config.replace(dtype=dtype))
    if cls is NextToken:
        return cls(model=model), start and start.params
    part = dict(values["loss"])
    return cls(model=model, target=Model(target.config), loss_name=part.pop("name"), **part), start and start.params


def _size(tokenizer, target) -> int:
    return target.config.vocab_size if target is not None else tokenizer.vocab_size


def _corpus(values, tokenizer, vocab_size):
    part = values["data"]
    return corpus.cached(zoo.cache() / "corpora", part["source"], tokenizer, vocab_size=vocab_size, glob=part["glob"],
                         limit=part["limit"])


def _evaluation(values, program: Program, held_out, shape, target: Checkpoint | None):
    """A function of parameters: held-out means, and what decoding with them will measure."""
    batches = list(data.held_out_batches(held_out, length=shape["length"], batch_size=shape["batch_size"],
                                         limit=values["eval_batches"]))
    texts = None
    if target is not None and values["eval_prompts"] and len(held_out.prompts):
        prompts = data.prompts(held_out, values["eval_prompts"], values["eval_prompt_length"])
        texts = simulate.greedy_texts(program.objective.target, program.frozen, prompts, values["eval_new_tokens"],
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


def export(model: Model, params: Any, tokenizer: Tokenizer | None, target: Checkpoint | None,
           folder: pathlib.Path) -> None:
    """Writes the parameters as a Hugging Face folder in float32."""
    config = model.config.replace(dtype="float32")
    eos = target.eos_ids if target is not None else tokenizer.eos_ids if tokenizer is not None else ()
    checkpoint.save(Checkpoint(config, jax.tree.map(np.asarray, jax.device_get(params)), tokenizer, eos), folder,
                    overwrite=True)


def _overview(values, objective, program: Program, texts, workdir) -> Table:
    size = sum(x.size for x in jax.tree.leaves(program.like.params))
    table = Table(show_header=False, box=None)
    for name, value in (
            ("objective", values["objective"]), ("parameters", f"{size:,}"),
            ("corpus", f"{len(texts.starts) - 1:,} documents, {len(texts.tokens):,} tokens, {texts.digest[:12]}"),
            ("per update", f"{values['batch_size']} rows of {values['sequence_length']} tokens"),
            ("updates", f"{values['steps']:,}"),
            ("devices", f"{program.mesh.size} x {jax.devices()[0].platform}, {objective.model.config.dtype}"),
            ("workdir", str(workdir))):
        table.add_row(name, value)
    return table


def _summary(final: dict[str, float], workdir: pathlib.Path) -> Table:
    table = Table("held out", "")
    for name, value in final.items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    table.caption = f"{workdir}/export"
    return table
