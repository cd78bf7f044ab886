"""The forward and the loop are the same with kernels and without."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.kernels.dispatch import dispatch
from parallax.models import Block, Model, ModelConfig, commit

ROWS = 5
CONFIG = dict(vocab_size=40, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
              intermediate_size=32, max_positions=64)
SHAPES = {"scanned": dict(scan_layers=True), "unrolled": {}, "bfloat16": dict(dtype="bfloat16"),
          "windows and softcap": dict(scan_layers=True, sliding_window=3, layer_types=("sliding", "full"),
                                      attention_softcap=2.0)}


def run(model, params):
    """Logits of a block behind a prefix of another length in each of two sequences; the cache behind it."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 2 * ROWS)))
    cache = model.new_cache(2, 24)
    for part, count in ((tokens[:, :ROWS], jnp.asarray([ROWS, 3])), (tokens[:, ROWS:], jnp.asarray([2, ROWS]))):
        positions = cache.length[:, None] + jnp.arange(ROWS)
        out = model.forward(params, Block(part, positions, jnp.tril(jnp.ones((ROWS, ROWS), bool))), cache)
        cache = commit(cache, out.kv, jnp.broadcast_to(jnp.arange(ROWS), (2, ROWS)), count, model.config.kernels)
    return model.unembed(params, out.hidden), cache


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_logits_and_cache_are_the_same_with_kernels(changes):
    config = ModelConfig(**CONFIG, **changes)
    params = Model(config).init(jax.random.key(0))
    ours, plain = (jax.jit(run, static_argnums=0)(Model(config.replace(kernels=kernels)), params)
                   for kernels in ("pallas", "xla"))
    bound = 2e-2 if config.dtype == "bfloat16" else 2e-6
    np.testing.assert_allclose(ours[0], plain[0], atol=bound)
    for one, other in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(plain[1])):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(other, np.float32), atol=bound)


@pytest.mark.parametrize("kernels, calls", [("auto", False), ("xla", False), ("pallas", True)])
def test_the_choice_decides_what_the_program_calls(kernels, calls):
    """On a host that has only CPUs."""
    model = Model(ModelConfig(**CONFIG, kernels=kernels))
    program = jax.make_jaxpr(lambda params: run(model, params))(model.init(jax.random.key(0)))
    assert ("pallas_call" in str(program)) == calls


def test_training_never_runs_a_kernel_for_kernels_have_no_gradient():
    model = Model(ModelConfig(**CONFIG, kernels="pallas"))
    rows = jnp.arange(ROWS)

    def loss(params):
        out = model.forward(params, Block(rows[None], rows[None], rows[:, None] >= rows), model.new_cache(1, 0))
        return model.unembed(params, out.hidden).sum()

    params = model.init(jax.random.key(0))
    assert "pallas_call" not in str(jax.make_jaxpr(jax.grad(loss))(params))


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
@pytest.mark.parametrize("choice", ["auto", "pallas"])
def test_the_version_is_that_of_the_hardware(choice, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")              # a host that has more than CPUs

    def version(name):
        return lambda x, interpret=False: x + ({"xla": 1, "tpu": 2, "gpu": 3}[name] + 10 * interpret)

    def chosen(x):
        return dispatch(choice, x, **{name: version(name) for name in ("xla", "tpu", "gpu")})

    text = jax.jit(chosen).trace(jnp.float32(0)).lower(lowering_platforms=(platform,)).as_text()
    expected = {"cpu": 1 if choice == "auto" else 12, "tpu": 2, "cuda": 3}[platform]
    assert {added for added in (1, 2, 3, 12) if f"dense<{added}.000000e+00>" in text
            or f"dense<{added // 10}.{added % 10}00000e+01>" in text} == {expected}


def test_who_runs_no_kernel_does_not_wait_for_pallas():
    code = "import sys, parallax; assert not [name for name in sys.modules if name.endswith('_tpu')]"
    subprocess.run([sys.executable, "-c", code], check=True)
