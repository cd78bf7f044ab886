"""The one training loop: any objective, any mesh, resumable to the bit.

B rows per update, S tokens per row, A micro-batches per update.

Everything random is a function of (seed, step), the data iterator is part of the checkpoint, and a checkpoint is only
written once the step behind it is known to be finite. So a run that is killed at any moment and started again ends
with the very parameters of a run that was not.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from parallax import sharding
from parallax.train.checkpoints import Checkpoints
from parallax.train.data import Batch
from parallax.train.metrics import Metrics, Progress
from parallax.train.objectives import Objective
from parallax.train.optimizer import Optimizer


class TrainState(NamedTuple):
    """step: updates so far; params, float32; opt_state of optax; ema of the parameters, or None."""

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any

    @property
    def best(self) -> Any:
        """The parameters that are evaluated and exported."""
        return self.params if self.ema is None else self.ema


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """When what happens, in updates. `steps` in all; `accumulate` micro-batches per update."""

    steps: int
    accumulate: int = 1
    log_every: int = 20
    eval_every: int = 200
    checkpoint_every: int = 200

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {getattr(self, field.name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The compiled parts of a run: how to make a state, take a step and evaluate. `frozen` are the target's parameters
    for a drafter, None for a target."""

    objective: Objective
    optimizer: Optimizer
    schedule: Schedule
    mesh: jax.sharding.Mesh
    seed: int
    frozen: Any = None

    @functools.cached_property
    def transform(self):
        return self.optimizer.build(self.schedule.steps, self.schedule.accumulate)

    @functools.cached_property
    def like(self) -> TrainState:
        """Shapes and shardings of the state."""
        return sharding.abstract(jax.eval_shape(self._create, None, self.frozen), self.mesh)

    def create(self, params: Any = None) -> TrainState:
        """The state before the first update; `params` to start from, or fresh ones."""
        return jax.jit(self._create, out_shardings=jax.tree.map(lambda x: x.sharding, self.like))(params, self.frozen)

    def _create(self, params, frozen) -> TrainState:
        if params is None:
            params = self.objective.init(jax.random.fold_in(jax.random.key(self.seed), 0), frozen)
        ema = jax.tree.map(jnp.copy, params) if self.optimizer.ema else None
        return TrainState(jnp.int32(0), params, self.transform.init(params), ema)

    @functools.cached_property
    def step(self) -> Callable[[TrainState, Any, Batch], tuple[TrainState, dict[str, jax.Array]]]:
        """One update. The state is donated."""
        shardings = jax.tree.map(lambda x: x.sharding, self.like)
        return jax.jit(self._step, donate_argnums=0, out_shardings=(shardings, None))

    def _step(self, state: TrainState, frozen, batch: Batch):
        accumulate = self.schedule.accumulate
        key = jax.random.fold_in(jax.random.key(self.seed), state.step + 1)

        def micro(carry, inputs):
            params, opt_state = carry
            part, key = inputs
            # optax averages the gradients of the micro-batches: each counts by its targets, as in one batch.
            share = part.weights[:, 1:].sum() / jnp.maximum(targets / accumulate, 1e-9)

            def loss(params):
                value, metrics = self._loss(params, frozen, part, key)
                return share * value, {name: x if name == "tokens" else share * x for name, x in metrics.items()}

            grads, metrics = jax.grad(loss, has_aux=True)(params)
            updates, opt_state = self.transform.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), {**metrics, "grad_norm": optax.tree.norm(grads)}

        targets = batch.weights[:, 1:].sum()
        # Row i goes to micro-batch i mod A, so that a batch that is shared out over devices stays so.
        parts = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)
        keys = jax.random.split(key, accumulate)
        if accumulate == 1:
            carry, metrics = micro((state.params, state.opt_state), jax.tree.map(lambda x: x[0], (parts, keys)))
        else:
            carry, metrics = lax.scan(micro, (state.params, state.opt_state), (parts, keys))
            metrics = {name: x.sum() if name == "tokens" else x.mean() for name, x in metrics.items()}
        params, opt_state = carry
        ema = state.ema
        if ema is not None:
            # The first steps count more, or what is exported would still hold a good part of the random start.
            decay = jnp.minimum(self.optimizer.ema, (1 + state.step) / (10 + state.step))
            ema = optax.incremental_update(params, ema, 1 - decay)
        metrics["learning_rate"] = self.optimizer.rate(self.schedule.steps)(state.step)
        return TrainState(state.step + 1, params, opt_state, ema), metrics

    def _loss(self, params, frozen, batch, key):
        return self.objective.loss(self._compute(params), frozen, batch, key)

    def _compute(self, params):
        return jax.tree.map(lambda x: x.astype(self.objective.model.config.dtype), params)

    @functools.cached_property
    def _metrics(self):
        return jax.jit(lambda params, frozen, batch: self._loss(params, frozen, batch, jax.random.key(self.seed))[1])

    def evaluate(self, params: Any, batches: Iterable[Batch]) -> dict[str, float]:
        """Means over all positions of `batches` that count."""
        total: dict[str, float] = {}
        for batch in batches:
            metrics = jax.device_get(self._metrics(params, self.frozen, self.put(batch)))
            tokens = float(metrics.pop("tokens"))
            for name, value in {**metrics, "tokens": 1.0}.items():
                total[name] = total.get(name, 0.0) + tokens * float(value)
        count = total.pop("tokens", 0.0)
        return {name: value / max(count, 1.0) for name, value in total.items()}

    @functools.cached_property
    def simulate(self):
        """`objective.simulate` of float32 parameters, compiled."""
        return jax.jit(lambda params, texts: self.objective.simulate(self._compute(params), texts))

    def put(self, batch: Batch) -> Batch:
        """The batch on the mesh, rows shared out over the data axes."""
        return jax.device_put(batch, sharding.batch_sharding(self.mesh))


def run(program: Program, state: TrainState, data: Iterator[Batch], *, checkpoints: Checkpoints, metrics: Metrics,
        evaluate: Callable[[Any], dict[str, float]]) -> TrainState:
    """Trains from `state.step` to the last step.

    Args:
      program: the compiled parts.
      state: where to start; donated.
      data: a grain iterator, at the place that belongs to the state.
      checkpoints, metrics: where to write.
      evaluate: held-out figures of parameters.

    Raises:
      FloatingPointError: the loss or a gradient is not a number; says at which step and what the last checkpoint is.
      OSError: a checkpoint cannot be written.
    """
    schedule = program.schedule
    start = int(state.step)
    pending = None                                    # of the step before: read while the next one runs
    with jax.set_mesh(program.mesh), Progress(schedule.steps, start) as progress:
        for step in range(start + 1, schedule.steps + 1):
            batch = next(data)
            state, now = program.step(state, program.frozen, program.put(batch))
            last = step == schedule.steps
            saves = last or step % schedule.checkpoint_every == 0
            if pending is not None:
                _check(*pending, checkpoints)
            pending = step, now
            if saves or step % schedule.log_every == 0:
                _check(step, now, checkpoints)
                values = {f"train/{name}": float(value) for name, value in now.items()}
                progress.update(step, values["train/loss"], tokens=int((np.asarray(batch.segments) > 0).sum()))
                metrics.scalars(step, {**values, "train/tokens_per_second": progress.tokens_per_second})
            else:
                progress.update(step, None, tokens=int((np.asarray(batch.segments) > 0).sum()))
            if last or step % schedule.eval_every == 0:
                _check(step, now, checkpoints)
                with progress.paused():
                    metrics.scalars(step, {f"eval/{name}": x for name, x in evaluate(state.best).items()})
            if saves:
                with progress.paused():
                    checkpoints.save(step, state.params, rest(state), data.get_state(), wait=last)
    return state


def rest(state: TrainState) -> dict[str, Any]:
    """All of the state but the parameters, which are an item of their own in a checkpoint."""
    return {"step": state.step, "opt_state": state.opt_state, **({} if state.ema is None else {"ema": state.ema})}


def join(params: Any, rest: dict[str, Any]) -> TrainState:
    """The inverse of taking a state apart."""
    return TrainState(rest["step"], params, rest["opt_state"], rest.get("ema"))


def _check(step: int, metrics: dict[str, jax.Array], checkpoints: Checkpoints) -> None:
    for name in ("loss", "grad_norm"):
        value = float(metrics[name])
        if not math.isfinite(value):
            checkpoints.wait()                        # the newest may be on its way to the disk
            good = checkpoints.latest()
            kept = "no checkpoint was written yet" if good is None else f"the last good checkpoint is step {good}"
            raise FloatingPointError(f"the {name.replace('_', ' ')} is {value} at step {step}; {kept}: lower "
                                     "optimizer.learning_rate and run the command again, which goes on from there")
