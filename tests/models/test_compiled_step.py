"""What XLA makes of one step: the cache is written in place and weights are read where they lie.

Rewriting either costs more than the step itself on a CPU, and no test of values would notice. The optimization level
that the tests lower is that of the machine code: the text below is the same at every level.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from parallax.decoding import METHODS, loop, make_decoder, speculative
from parallax.models import KV, Cache, Model
from parallax.testing import tiny_config

CAPACITY = 1024
_WHOLE = r"= \w+\[([\d,]+)\]\S* (?:copy|copy-start|transpose|scatter|select|concatenate|pad)\("


class Untied(Model):
    """Hands out keys and values that do not wait for the last layer."""

    def _unrolled(self, *args):
        x, keys, values, taps = super()._unrolled(*args)
        object.__setattr__(self, "early", (tuple(keys), tuple(values)))
        return x, keys, values, taps

    def forward(self, params, block, cache, **options):
        return super().forward(params, block, cache, **options)._replace(kv=KV(*self.early, block.positions))


class Turned(Model):
    """Reads its head in another order than it lies in memory."""

    def unembed(self, params, hidden):
        head = jax.lax.optimization_barrier(params["embed"]["tokens"].T).T
        return super().unembed({**params, "embed": {"tokens": head}}, hidden)


class Scattered(Model):
    """The same model, but traced anew, with another commit."""


def commit_by_vmap(cache, kv, rows, count, kernels):
    def write(layer, block):
        new = jax.vmap(lambda values, chosen: values[chosen].swapaxes(0, 1))(block, rows)
        return jax.vmap(lambda old, values, start: jax.lax.dynamic_update_slice(old, values, (0, start, 0)))(
            layer, new, cache.length)

    return Cache(tuple(map(write, cache.k, kv.k)), tuple(map(write, cache.v, kv.v)), cache.length + count)


def rewritten(name, batch, kind=Model):
    """How many (caches, weights) the compiled loop makes anew per step: all but the entry, which runs once."""
    model = kind(tiny_config(num_layers=4, scan_layers=False))
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, 8), (batch,), (batch,), (batch,))]
    params = {"target": jax.eval_shape(model.init, jax.random.key(0))}
    draft = {}
    if METHODS[name].needs_draft:                              # with a cache and weights of the same shapes
        draft, params["draft"] = {"draft": model}, params["target"]
    inputs = loop.Inputs(make_decoder(name, model, **draft), params, *ints[:3], jax.random.key(0), ints[3])
    state = jax.eval_shape(lambda inputs: loop.prefill(inputs, CAPACITY), inputs)
    text = loop.advance.lower(inputs.decoder, params, state, jnp.int32(1)).compile().as_text()
    computations = re.split(r"\n(?=\S)", text)
    assert sum(part.startswith("ENTRY") for part in computations) == 1 and " while(" in text
    made = [tuple(map(int, found.split(","))) for part in computations if not part.startswith("ENTRY")
            for found in re.findall(_WHOLE, part)]
    weights = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    return (made.count(state.cache.k[0].shape),
            sum(shape in weights or shape[::-1] in weights for shape in made))


@pytest.mark.parametrize("name, batch", [
    (name, batch) if batch == 1 else pytest.param(name, batch, marks=pytest.mark.slow)
    for name in METHODS for batch in (1, 3)])
def test_a_step_copies_no_cache_and_no_weight(name, batch):
    assert rewritten(name, batch) == (0, 0)


def test_the_count_sees_a_cache_that_is_written_before_it_is_read():
    caches, weights = rewritten("autoregressive", 1, Untied)
    assert caches and not weights


def test_the_count_sees_a_weight_that_is_turned():
    caches, weights = rewritten("autoregressive", 1, Turned)
    assert weights and not caches


def test_the_count_sees_a_commit_that_scatters(monkeypatch):
    monkeypatch.setattr(speculative, "commit", commit_by_vmap)
    caches, weights = rewritten("autoregressive", 3, Scattered)
    assert caches and not weights
