"""No field of `ModelConfig` is dead: changing it changes the logits, or the shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.models import Block, Model, ModelConfig, RopeScaling

BASE = ModelConfig(vocab_size=40, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
                   intermediate_size=20, max_positions=32, sandwich_norms=True, qkv_bias=True, out_bias=True,
                   mlp_bias=True, qk_norm=True, sliding_window=3, layer_types=("sliding", "full"),
                   attention_softcap=1.0, logit_softcap=1.0)
CHANGES = dict(
    activation="gelu", gated_mlp=False, norm="layernorm", norm_eps=1e-1, norm_plus_one=True, sandwich_norms=False,
    qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False, positions="learned", rope_theta=10.0,
    rope_scaling=RopeScaling(kind="linear", factor=4.0), local_rope_theta=5.0, sliding_window=2,
    layer_types=("full", "sliding"), attention_scale=1.0, attention_softcap=0.5, logit_softcap=None, embed_scale=3.0,
    tie_embeddings=False)
ELSEWHERE = {"vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size",
             "max_positions", "taps", "scan_layers", "dtype", "alignment", "visibility", "kernels",
             "draft_vocab"}


def logits(config):
    model = Model(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map_with_path(_leaf, shapes)
    rows = np.arange(8)
    tokens = np.random.default_rng(1).integers(0, 40, (1, 8))
    block = Block(jnp.asarray(tokens), jnp.asarray(rows)[None], jnp.asarray(rows[:, None] >= rows))
    return np.asarray(model.unembed(params, model.forward(params, block, model.new_cache(1, 0)).hidden))


def _leaf(path, shape):
    """A weight that depends on its path alone, so that two configs share what they both have."""
    seed = sum(map(ord, jax.tree_util.keystr(path)))
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.5, shape.shape), shape.dtype)


@pytest.fixture(scope="module")
def base():
    return logits(BASE)


@pytest.mark.parametrize("field", CHANGES)
def test_changes_the_logits(field, base):
    assert np.abs(logits(BASE.replace(**{field: CHANGES[field]})) - base).max() > 1e-4


def test_every_field_is_covered():
    assert {field.name for field in dataclasses.fields(ModelConfig)} == set(CHANGES) | ELSEWHERE
