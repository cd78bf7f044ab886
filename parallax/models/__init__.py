"""Flax linen models behind one contract: a forward that writes nothing, and a cache of what is decided."""

from parallax.models.cache import KV, Block, Cache, Output, commit, truncate
from parallax.models.config import ModelConfig, RopeScaling
from parallax.models.transformer import Model, split_layers, stack_layers

__all__ = ["KV", "Block", "Cache", "Model", "ModelConfig", "Output", "RopeScaling", "commit", "split_layers",
           "stack_layers", "truncate"]
