"""Tensor names of Hugging Face checkpoints <-> the parameter tree.

One table per family tells which tensors make up which leaf. q, k and v are stacked along their output rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from parallax.models.config import ModelConfig
from parallax.models.families import family_of

Path = tuple[str, ...]


class Entry(NamedTuple):
    """A leaf's path; its tensors' names (`{i}` is the layer), stacked along axis 0; whether those are [in, out]."""

    path: Path
    names: tuple[str, ...]
    transposed: bool = False

    @property
    def per_layer(self) -> bool:
        return self.path[0] == "layers"


def table(config: ModelConfig) -> list[Entry]:
    """Every leaf of the parameter tree and the tensors it is made of."""
    gpt2 = family_of(config) == "gpt2"
    entries = _gpt2_table() if gpt2 else _llama_like_table(config)
    if not config.tie_embeddings:
        entries.append(Entry(("head",), ("lm_head.weight",)))
    return entries


def _llama_like_table(config: ModelConfig) -> list[Entry]:
    layer = "model.layers.{i}."
    sandwich = config.sandwich_norms
    entries = [Entry(("embed", "tokens"), ("model.embed_tokens.weight",)),
               Entry(("final_norm", "scale"), ("model.norm.weight",))]

    def add(path: str, *names: str):
        entries.append(Entry(("layers", *path.split(".")), tuple(layer + name for name in names)))

    def linear(path: str, bias: bool, *names: str):
        add(path + ".w", *(f"{name}.weight" for name in names))
        if bias:
            add(path + ".b", *(f"{name}.bias" for name in names))

    add("attention_norm.scale", "input_layernorm.weight")
    linear("attention.qkv", config.qkv_bias, *(f"self_attn.{p}_proj" for p in "qkv"))
    linear("attention.out", config.out_bias, "self_attn.o_proj")
    if config.qk_norm:
        add("attention.q_norm.scale", "self_attn.q_norm.weight")
        add("attention.k_norm.scale", "self_attn.k_norm.weight")
    add("mlp_norm.scale", "pre_feedforward_layernorm.weight" if sandwich else "post_attention_layernorm.weight")
    if sandwich:
        add("attention_post_norm.scale", "post_attention_layernorm.weight")
        add("mlp_post_norm.scale", "post_feedforward_layernorm.weight")
    for name in ("gate", "up", "down") if config.gated_mlp else ("up", "down"):
        linear(f"mlp.{name}", config.mlp_bias, f"mlp.{name}_proj")
    return entries


def _gpt2_table() -> list[Entry]:
    entries = [Entry(("embed", "tokens"), ("transformer.wte.weight",)),
               Entry(("embed", "positions"), ("transformer.wpe.weight",)),
               Entry(("final_norm", "scale"), ("transformer.ln_f.weight",)),
               Entry(("final_norm", "bias"), ("transformer.ln_f.bias",))]
    for ours, theirs in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
        for leaf, name in (("scale", "weight"), ("bias", "bias")):
            entries.append(Entry(("layers", ours, leaf), (f"transformer.h.{{i}}.{theirs}.{name}",)))
    for part, ours, theirs in (("attention", "qkv", "attn.c_attn"), ("attention", "out", "attn.c_proj"),
                               ("mlp", "up", "mlp.c_fc"), ("mlp", "down", "mlp.c_proj")):
        for leaf, name in (("w", "weight"), ("b", "bias")):
            entries.append(Entry(("layers", part, ours, leaf), (f"transformer.h.{{i}}.{theirs}.{name}",), leaf == "w"))
    return entries


def shapes(config: ModelConfig) -> dict[Path, tuple[int, ...]]:
    """Shape of every leaf, of one layer where there are many."""
    e, f, h, kv, d = (config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
                      config.head_dim)
    last = {"qkv": ((h + 2 * kv) * d, e), "out": (e, h * d), "gate": (f, e), "up": (f, e), "down": (e, f),
            "q_norm": (d,), "k_norm": (d,)}
    result = {}
    for entry in table(config):
        path = entry.path
        if path[0] in ("embed", "head"):
            words = config.draft_vocab or config.vocab_size if path[-1] == "head" else config.vocab_size
            result[path] = (config.max_positions if path[-1] == "positions" else words, e)
        else:
            shape = last.get(path[-2], (e,))
            result[path] = shape[:1] if path[-1] == "b" else shape
    return result


def _part_rows(config: ModelConfig, entry: Entry, rows: int) -> list[int]:
    """How many of the leaf's rows each of its tensors brings; only q, k and v share a leaf."""
    if len(entry.names) == 1:
        return [rows]
    return [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]


# Tensors that hold no weights: buffers that older checkpoints carry along.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def assemble(config: ModelConfig, names: set[str], get: Callable[[str], np.ndarray], dtype,
             put: Callable[[np.ndarray], Any] = np.asarray) -> dict[str, Any]:
    """Builds the parameter tree, layer leaves as tuples of arrays.

    Args:
      config: the architecture.
      names: all tensors of the checkpoint.
      get: reads one of them.
      dtype: of the result.
      put: takes each array to where it shall live as soon as it is read, so that nothing is held twice.

    Raises:
      ValueError: a tensor is missing, has another shape, or has no place in this architecture.
    """
    expected = shapes(config)
    used = set()

    def read(entry: Entry, i: int | None) -> np.ndarray:
        parts = []
        for name, rows in zip(entry.names, _part_rows(config, entry, expected[entry.path][0])):
            name = name.format(i=i)
            if name not in names:
                raise ValueError(f"the checkpoint lacks the tensor {name!r} that its config asks for")
            used.add(name)
            part = np.asarray(get(name))
            shape = (rows, *expected[entry.path][1:])[::-1 if entry.transposed else 1]
            if part.shape != shape:
                raise ValueError(f"tensor {name!r} has shape {part.shape}, the config asks for {shape}")
            parts.append(part.T if entry.transposed else part)
        leaf = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return put(np.ascontiguousarray(leaf, dtype=dtype))

    tree: dict[str, Any] = {}
    for entry in table(config):
        node = tree
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        node[entry.path[-1]] = (tuple(read(entry, i) for i in range(config.num_layers)) if entry.per_layer
                                else read(entry, None))
    if config.tie_embeddings:
        used.add("lm_head.weight")
    extra = sorted(name for name in names - used if not name.endswith(_BUFFERS))
    if extra:
        raise ValueError(f"the checkpoint has {len(extra)} tensors that its config does not account for, such as "
                         f"{extra[0]!r}; they may change the maths, so it is not loaded")
    return tree


def disassemble(config: ModelConfig, params: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every Hugging Face tensor of the parameter tree."""
    for entry in table(config):
        node = params
        for key in entry.path:
            node = node[key]
        for i in range(config.num_layers) if entry.per_layer else (None,):
            leaf = np.asarray(node if i is None else node[i])
            leaf = leaf.T if entry.transposed else leaf
            cuts = np.cumsum(_part_rows(config, entry, leaf.shape[0]))[:-1]
            for name, part in zip(entry.names, np.split(leaf, cuts)):
                yield name.format(i=i), np.ascontiguousarray(part)
