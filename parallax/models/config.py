"""What a transformer is made of: one frozen, hashable record that covers every supported family.

The families differ only in the values below (`parallax.models.families` fills them from a Hugging Face
`config.json`), so there is one transformer and no subclass per family.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    Attributes:
      kind: `linear` divides every frequency by `factor`; `llama3` keeps high frequencies, divides low ones and
        blends between (Llama 3.1 model card).
      factor: how much longer than trained.
      low_freq_factor: `llama3` only, wavelengths above `original_max_positions / low_freq_factor` are divided.
      high_freq_factor: `llama3` only, wavelengths below `original_max_positions / high_freq_factor` are kept.
      original_max_positions: `llama3` only, the trained length.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self):
        _one_of("rope scaling kind", self.kind, ("linear", "llama3"))
        _positive("rope scaling factor", self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture, as data.

    Attributes:
      vocab_size: rows of the embedding table, V.
      hidden_size: width of the residual stream, E.
      num_layers: L.
      num_heads, num_kv_heads, head_dim: H query heads share Hkv key/value heads of D dimensions (MHA, GQA, MQA).
      intermediate_size: width of the MLP, F.
      max_positions: the longest sequence that the weights know; learned positions have this many rows.
      activation: `silu`, `gelu_tanh` or `gelu`.
      gated_mlp: `down(act(gate(x)) * up(x))` instead of `down(act(up(x)))`.
      norm: `rmsnorm` or `layernorm` (with bias).
      norm_eps: added to the variance.
      norm_plus_one: RMSNorm multiplies by `1 + scale` (Gemma).
      sandwich_norms: a norm behind attention and MLP as well as in front (Gemma 2 and 3).
      qkv_bias, out_bias, mlp_bias: which projections have a bias.
      qk_norm: RMSNorm over each head of q and k before rope (Qwen3, Gemma 3).
      positions: `rope` or `learned`.
      rope_theta, rope_scaling: base and stretch of full-attention layers.
      local_rope_theta: base of the sliding layers where it differs (Gemma 3), never stretched.
      sliding_window: W; a row sees keys less than W positions behind it, in the layers named `sliding`.
      layer_types: `full` or `sliding` per layer; empty means all full.
      attention_scale: factor on q·k.
      attention_softcap, logit_softcap: `cap * tanh(x / cap)` on scores, on logits (Gemma 2).
      embed_scale: factor on token embeddings (Gemma: sqrt(E)).
      tie_embeddings: the head is the embedding table.
      draft_vocab: Vd, how many tokens the head can say, if these are fewer than V (`parallax.vocabulary`); 0: all.
      taps: layers whose output (the residual stream behind layer i) the forward returns.
      scan_layers: `lax.scan` over layers (small programs, fast compiles) or unrolled (fastest steps on CPU).
      kernels: `auto`, `xla` or `pallas`, which version of the kernels runs (`parallax.kernels.dispatch`).
      dtype: `float32` or `bfloat16`, of parameters, activations and cache.
      alignment: `shifted` (row i predicts token i + 1) or `same` (row i predicts token i).
      visibility: `causal`, `full` or `block_causal`; what the weights were trained to see.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    gated_mlp: bool = True
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False
    sandwich_norms: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    tie_embeddings: bool = True
    draft_vocab: int = 0
    taps: tuple[int, ...] = ()
    scan_layers: bool = False
    kernels: Literal["auto", "xla", "pallas"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    alignment: Literal["shifted", "same"] = "shifted"
    visibility: Literal["causal", "full", "block_causal"] = "causal"

    def __post_init__(self):
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
                     "intermediate_size", "max_positions"):
            _positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        _one_of("activation", self.activation, ("silu", "gelu_tanh", "gelu"))
        _one_of("norm", self.norm, ("rmsnorm", "layernorm"))
        _one_of("positions", self.positions, ("rope", "learned"))
        check_kernels(self.kernels)
        _one_of("dtype", self.dtype, ("float32", "bfloat16"))
        _one_of("alignment", self.alignment, ("shifted", "same"))
        _one_of("visibility", self.visibility, ("causal", "full", "block_causal"))
        if not 0 <= self.draft_vocab < self.vocab_size:
            raise ValueError(f"draft_vocab must be below vocab_size={self.vocab_size}, or 0 for the whole vocabulary, "
                             f"got {self.draft_vocab}")
        if self.draft_vocab and self.tie_embeddings:
            raise ValueError("a head of draft_vocab tokens is not the embedding table: expected tie_embeddings=False")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers, num_layers={self.num_layers}")
        for kind in self.layer_types:
            _one_of("layer type", kind, ("full", "sliding"))
        if "sliding" in self.layer_types and not self.sliding_window:
            raise ValueError("layer_types has sliding layers but sliding_window is not set")
        for tap in self.taps:
            if not 0 <= tap < self.num_layers:
                raise ValueError(f"tap {tap} is not a layer: expected 0 to {self.num_layers - 1}")

    @property
    def scale(self) -> float:
        """The factor on q·k."""
        return self.head_dim ** -0.5 if self.attention_scale is None else self.attention_scale

    def sliding(self, layer: int) -> bool:
        """Whether layer `layer` sees only `sliding_window` positions."""
        return bool(self.layer_types) and self.layer_types[layer] == "sliding"

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)


def nearest(name: str, known) -> str:
    """`; did you mean 'x'?` for the known name closest to `name`, or nothing."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_kernels(choice: str) -> None:
    """Raises ValueError if this is no value of `ModelConfig.kernels`."""
    _one_of("kernels", choice, ("auto", "xla", "pallas"))


def _one_of(what: str, value, known) -> None:
    if value not in known:
        raise ValueError(f"unknown {what} {value!r}: expected one of {', '.join(known)}{nearest(value, known)}")


def _positive(what: str, value) -> None:
    if not value > 0:
        raise ValueError(f"{what} must be positive, got {value}")
