"""Hugging Face `config.json` <-> `ModelConfig`, for every supported family.

Every key of a `config.json` is either used, known to leave the maths alone, or refused by name. Nothing is ignored
because it was not thought of: an unsupported attention gate must not turn into silently wrong text.
"""

from __future__ import annotations

import math
from typing import Any

from parallax.models.config import ModelConfig, RopeScaling, nearest

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
FAMILIES = (*LLAMA_LIKE, "gpt2")

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
                "gelu": "gelu"}

# Keys that do not change what a forward computes.
_HARMLESS = frozenset("""
    _name_or_path architectures attention_dropout attn_pdrop auto_map bos_token_id cache_implementation
    chunk_size_feed_forward decoder_start_token_id dtype embd_pdrop eos_token_id finetuning_task
    forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_llama_config keys_to_ignore_at_inference label2id max_length min_length model_type n_ctx
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type
    resid_pdrop return_dict return_dict_in_generate sep_token_id summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache
""".split())


class _Keys:
    """The keys of a config, each taken at most once, so that what is left over is known at the end."""

    def __init__(self, config: dict[str, Any]):
        self._left = dict(config)

    def take(self, *names: str, default: Any = ...) -> Any:
        """The first of `names` that is there; without a default it must be."""
        found = [self._left.pop(name) for name in names if name in self._left]
        found = [value for value in found if value is not None]
        if found:
            return found[0]
        if default is ...:
            raise ValueError(f"config.json lacks {names[0]!r}")
        return default

    def take_or_null(self, name: str, default: Any) -> Any:
        """The value, which may be null; the default only if the key is absent."""
        return self._left.pop(name, default)

    def expect(self, name: str, *values: Any) -> None:
        """Refuses any value but these; an absent key is fine."""
        value = self.take(name, default=values[0])
        if value not in values:
            raise ValueError(f"config.json has {name}={value!r}, which changes the maths and is not supported "
                             f"(supported: {', '.join(map(repr, values))})")

    def finish(self) -> None:
        for name, value in self._left.items():
            if name not in _HARMLESS and value not in (None, False, 0, "", [], {}):
                raise ValueError(f"config.json has {name}={value!r}, which this model code does not know and which may "
                                 "change the maths; if it does not, remove the key from config.json")


def from_hf(config: dict[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face `config.json`.

    Raises:
      ValueError: unknown family, or a key that changes the maths and is not supported.
    """
    if config.get("model_type") == "gemma3" and "text_config" in config:        # the language part of a vision model
        text = config["text_config"]
        config = {"model_type": "gemma3_text", **text,
                  "quantization_config": config.get("quantization_config") or text.get("quantization_config")}
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"unknown model_type {family!r} in config.json: expected one of {', '.join(FAMILIES)}"
                         f"{nearest(family, FAMILIES)}")
    keys = _Keys(config)
    keys.expect("quantization_config", None)
    result = _gpt2(keys) if family == "gpt2" else _llama_like(keys, family)
    keys.finish()
    return result


def _llama_like(keys: _Keys, family: str) -> ModelConfig:
    gemma = family.startswith("gemma")
    hidden, layers, heads = keys.take("hidden_size"), keys.take("num_hidden_layers"), keys.take("num_attention_heads")
    head_dim = keys.take("head_dim", default=256 if gemma else 128 if family == "qwen3" else hidden // heads)
    keys.expect("partial_rotary_factor", 1.0)
    keys.expect("rope_interleaved", False)
    theta, local_theta, scaling = _rope(keys, family)
    window, layer_types = _windows(keys, family, layers)
    attention_bias = keys.take("attention_bias", default=family == "qwen2")
    softcaps = {}
    if gemma:
        keys.expect("use_bidirectional_attention", None, False)
        softcaps = {"attention_scale": keys.take("query_pre_attn_scalar", default=256) ** -0.5}
        attention, logit = (50.0, 30.0) if family == "gemma2" else (None, None)
        softcaps |= {"attention_softcap": keys.take_or_null("attn_logit_softcapping", attention),
                     "logit_softcap": keys.take_or_null("final_logit_softcapping", logit)}
    return ModelConfig(
        vocab_size=keys.take("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.take("num_key_value_heads", default=heads),
        head_dim=head_dim,
        intermediate_size=keys.take("intermediate_size"),
        max_positions=keys.take("max_position_embeddings", default=2048),
        activation=_activation(keys.take("hidden_activation", "hidden_act",
                                         default="gelu_pytorch_tanh" if gemma else "silu")),
        norm_eps=keys.take("rms_norm_eps", default=1e-6),
        norm_plus_one=gemma,
        sandwich_norms=gemma,
        qkv_bias=bool(attention_bias),
        out_bias=bool(attention_bias) and family != "qwen2",
        mlp_bias=bool(keys.take("mlp_bias", default=False)),
        qk_norm=family in ("qwen3", "gemma3_text"),
        rope_theta=theta,
        local_rope_theta=local_theta,
        rope_scaling=scaling,
        sliding_window=window,
        layer_types=layer_types,
        embed_scale=hidden ** 0.5 if gemma else 1.0,
        tie_embeddings=bool(keys.take("tie_word_embeddings", default=gemma)),
        draft_vocab=keys.take("draft_vocab_size", default=0),
        **softcaps,
    )


def _rope(keys: _Keys, family: str):
    """(theta, theta of sliding layers or None, scaling), from `rope_parameters` or from the older keys."""
    parameters = keys.take("rope_parameters", default=None)
    scaling = keys.take("rope_scaling", default=None)
    gemma3 = family == "gemma3_text"
    default = 1_000_000.0 if gemma3 else 10_000.0
    theta = keys.take("rope_theta", default=default)
    local = keys.take("rope_local_base_freq", default=10_000.0) if gemma3 else None
    if parameters:
        if scaling not in (None, parameters):
            raise ValueError(f"config.json has rope_scaling={scaling!r} beside another rope_parameters")
        if "full_attention" in parameters:
            full, sliding = parameters["full_attention"], parameters.get("sliding_attention")
            if sliding:
                local = sliding.get("rope_theta", local)
                if _scaling(sliding) is not None:
                    raise ValueError(f"config.json stretches the sliding layers by {sliding!r}, "
                                     "which is not supported")
            parameters = full or {}
        theta = parameters.get("rope_theta", theta)
        scaling = parameters
    return float(theta), None if local is None else float(local), _scaling(scaling)


def _scaling(values: dict[str, Any] | None) -> RopeScaling | None:
    if not values:
        return None
    keys = _Keys({k: v for k, v in values.items() if k != "rope_theta"})
    kind = keys.take("rope_type", "type", default="default")
    keys.expect("partial_rotary_factor", 1.0)
    if kind == "default":
        result = None
    elif kind == "linear":
        result = RopeScaling(kind="linear", factor=float(keys.take("factor")))
    elif kind == "llama3":
        result = RopeScaling(kind="llama3", factor=float(keys.take("factor")),
                             low_freq_factor=float(keys.take("low_freq_factor")),
                             high_freq_factor=float(keys.take("high_freq_factor")),
                             original_max_positions=int(keys.take("original_max_position_embeddings")))
    else:
        raise ValueError(f"config.json has rope_type={kind!r}, which is not supported (supported: default, linear, "
                         "llama3)")
    keys.finish()
    return result


def _windows(keys: _Keys, family: str, layers: int):
    """(window, layer_types), from `layer_types` or from the rules of the families' older configs."""
    types = keys.take("layer_types", default=None)
    window = keys.take_or_null("sliding_window", 4096 if family in ("mistral", "gemma2", "gemma3_text") else None)
    pattern = keys.take("sliding_window_pattern", "_sliding_window_pattern", default=2 if family == "gemma2" else 6)
    first = keys.take("max_window_layers", default=28)
    if family in ("qwen2", "qwen3"):
        window = window if keys.take("use_sliding_window", default=False) else None
    if types is not None:
        known = {"full_attention": "full", "sliding_attention": "sliding"}
        for kind in types:
            if kind not in known:
                raise ValueError(f"config.json has a layer of type {kind!r}, which is not supported "
                                 f"(supported: {', '.join(known)})")
        types = tuple(known[kind] for kind in types)
        uniform = {"llama": "full", "mistral": "sliding" if window else "full"}.get(family)
        if uniform and set(types) != {uniform}:                  # `transformers` ignores the key in these families
            raise ValueError(f"config.json has layer_types other than {uniform}_attention, which model_type {family!r} "
                             "does not know")
    elif window is None:
        types = ()
    elif family == "mistral":
        types = ("sliding",) * layers
    elif family in ("qwen2", "qwen3"):
        types = tuple("sliding" if i >= first else "full" for i in range(layers))
    elif family in ("gemma2", "gemma3_text"):
        types = tuple("sliding" if (i + 1) % pattern else "full" for i in range(layers))
    else:
        raise ValueError(f"config.json has sliding_window={window}, which model_type {family!r} does not know")
    if "sliding" not in types:
        return None, ()
    return window, types


def _gpt2(keys: _Keys) -> ModelConfig:
    keys.expect("scale_attn_weights", True)
    keys.expect("scale_attn_by_inverse_layer_idx", False)
    keys.expect("reorder_and_upcast_attn", False)
    keys.expect("add_cross_attention", False)
    hidden, heads = keys.take("n_embd", "hidden_size"), keys.take("n_head", "num_attention_heads")
    return ModelConfig(
        vocab_size=keys.take("vocab_size"),
        hidden_size=hidden,
        num_layers=keys.take("n_layer", "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=keys.take("n_inner", default=4 * hidden),
        max_positions=keys.take("n_positions", "max_position_embeddings"),
        activation=_activation(keys.take("activation_function", default="gelu_new")),
        gated_mlp=False,
        norm="layernorm",
        norm_eps=keys.take("layer_norm_epsilon", default=1e-5),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions="learned",
        tie_embeddings=bool(keys.take("tie_word_embeddings", default=True)),
        draft_vocab=keys.take("draft_vocab_size", default=0),
    )


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ValueError(f"config.json has activation {name!r}, which is not supported (supported: "
                         f"{', '.join(_ACTIVATIONS)}){nearest(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def family_of(config: ModelConfig) -> str:
    """The Hugging Face family that expresses `config`."""
    if config.positions == "learned":
        return "gpt2"
    if config.sandwich_norms:
        return "gemma3_text" if config.qk_norm else "gemma2"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    return "mistral" if config.sliding_window else "llama"


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` that `transformers` reads as the same model.

    Raises:
      ValueError: no supported family expresses this combination of fields.
    """
    family = family_of(config)
    activation = {v: k for k, v in reversed(_ACTIVATIONS.items())}[config.activation]
    if family == "gpt2":
        result = {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": config.vocab_size,
            "n_embd": config.hidden_size, "n_layer": config.num_layers, "n_head": config.num_heads,
            "n_inner": config.intermediate_size, "n_positions": config.max_positions,
            "activation_function": "gelu_new" if config.activation == "gelu_tanh" else activation,
            "layer_norm_epsilon": config.norm_eps, "tie_word_embeddings": config.tie_embeddings,
        }
    else:
        result = _to_llama_like(config, family, activation)
    result["torch_dtype"] = config.dtype
    if config.draft_vocab:                      # as EAGLE-3's checkpoints say it; `transformers` refuses such a head
        result["draft_vocab_size"] = config.draft_vocab
    back = from_hf(result)
    run_time = ("taps", "scan_layers", "dtype")
    differing = [name for name, value in vars(config).items()
                 if name not in (*run_time, "attention_scale") and getattr(back, name) != value]
    if not math.isclose(back.scale, config.scale):
        differing.append("attention_scale")
    if differing:
        raise ValueError(f"no Hugging Face family expresses this model: nearest is {family}, which differs in "
                         + ", ".join(differing))
    return result


def _to_llama_like(config: ModelConfig, family: str, activation: str) -> dict[str, Any]:
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2",
             "gemma3_text": "Gemma3"}
    result = {
        "model_type": family, "architectures": [names[family] + "ForCausalLM"], "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta, "tie_word_embeddings": config.tie_embeddings,
    }
    gemma = family.startswith("gemma")
    result["hidden_activation" if gemma else "hidden_act"] = (
        "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else activation)
    if family in ("llama", "qwen3", "gemma2", "gemma3_text"):
        result["attention_bias"] = config.qkv_bias
    if family == "llama":
        result["mlp_bias"] = config.mlp_bias
    if config.rope_scaling is not None:
        scaling = config.rope_scaling
        result["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            result["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions}
    if gemma:
        scalar = config.scale ** -2
        if math.isclose(scalar, round(scalar)):                 # `transformers` takes only integers
            scalar = round(scalar)
        result |= {"query_pre_attn_scalar": scalar, "attn_logit_softcapping": config.attention_softcap,
                   "final_logit_softcapping": config.logit_softcap}
    if family == "gemma3_text":
        result["rope_local_base_freq"] = config.local_rope_theta
    if config.sliding_window:
        result["sliding_window"] = config.sliding_window
        result["layer_types"] = [f"{kind}_attention" for kind in config.layer_types]
        if family in ("qwen2", "qwen3"):
            result["use_sliding_window"] = True
    elif family == "mistral" or gemma:
        result["sliding_window"] = None
    return result
