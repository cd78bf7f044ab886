"""Random models that are small enough to compile in a second and lively enough not to loop at once."""

from __future__ import annotations

import jax

from parallax.models import Model, ModelConfig


def tiny_config(**changes) -> ModelConfig:
    """A two-layer Llama with grouped-query attention over 61 tokens; `changes` replace fields."""
    fields = dict(vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                  intermediate_size=48, max_positions=512, scan_layers=True)
    return ModelConfig(**{**fields, **changes})


def tiny_model(seed: int = 0, **changes) -> tuple[Model, dict]:
    """(model, parameters). Weights are large, so that logits are far apart and differ between contexts."""
    model = Model(tiny_config(**changes))
    params = jax.jit(model.init)(jax.random.key(seed))
    return model, jax.tree.map(lambda w: w * 6 if w.ndim > 1 else w, params)
