"""Reads .gguf files: metadata to a Hugging Face config, tensors to Hugging Face names and layouts, dequantised.

Like `families`, it uses a key, knows it to be harmless or refuses it by name: a file that asks for maths which this
model code does not have is not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallax.models import rope
from parallax.models.config import RopeScaling, nearest

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2")

_LAYER = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
          "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
          "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm", "post_attention_norm": "post_attention_layernorm",
             "post_ffw_norm": "post_feedforward_layernorm"}
_GPT2_LAYER = {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
               "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_TOP = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
             "output": "lm_head"}

# Neither changes the maths: the rows of the embedding count, and a note on the layout that llama.cpp ignores.
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length")


class File(NamedTuple):
    """path; metadata by key, as Python values; tensors by name, as the `gguf` package describes them."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Any]

    @property
    def architecture(self) -> str:
        return self.metadata.get("general.architecture", "")


def read(path: str | Path) -> File:
    """Opens a file; tensors stay on disk.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, one of several parts, or of an architecture that is not supported.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, offset, dtype, count=1, *args, **kwargs):
            # The package slices beyond the end without a word, and a damaged length would then keep it busy for ever.
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends too early")
            return super()._get(offset, dtype, count, *args, **kwargs)

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: expected a .gguf file")
    try:
        reader = Reader(path)
        metadata = {name: _plain(field) for name, field in reader.fields.items()}
    except Exception as error:          # the package raises whatever numpy or its own tables raise
        raise ValueError(f"{path} is damaged, incomplete or no .gguf file ({' '.join(str(error).split())}): "
                         "fetch it again") from None
    file = File(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{path} is one of {metadata['split.count']} parts: merge them with llama-gguf-split --merge")
    if metadata.get("general.type", "model") != "model" or file.architecture not in _ARCHITECTURES:
        what = file.architecture or metadata.get("general.type")
        raise ValueError(f"{path} has the unknown architecture {what!r}: expected one of {', '.join(_ARCHITECTURES)}"
                         f"{nearest(what, _ARCHITECTURES)}")
    return file


def _plain(field: Any) -> Any:
    value = field.contents()
    # 1e-5 is stored in single precision: the shortest decimal that means the same is what was meant.
    return float(str(np.float32(value))) if isinstance(value, float) and field.parts[-1].dtype == np.float32 else value


def config(file: File) -> dict[str, Any]:
    """The Hugging Face `config.json` of the model, for `families.from_hf`.

    Raises:
      ValueError: a key or tensor is missing, or asks for something that is not supported.
    """
    arch = file.architecture
    keys = _Keys(file)
    hidden, heads, layers = keys.take("embedding_length"), keys.take("attention.head_count"), keys.take("block_count")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} lacks the tensor 'token_embd.weight': it holds no language model")
    vocab = int(file.tensors["token_embd.weight"].shape[-1])
    keys.expect("expert_count", 0)
    keys.expect("expert_used_count", 0)
    keys.expect("attention.causal", True)
    if arch == "gpt2":
        result = {"model_type": "gpt2", "vocab_size": vocab, "n_embd": hidden, "n_head": heads, "n_layer": layers,
                  "n_positions": keys.take("context_length"), "n_inner": keys.take("feed_forward_length", 4 * hidden),
                  "layer_norm_epsilon": keys.take("attention.layer_norm_epsilon"), "activation_function": "gelu_new"}
        keys.expect("attention.head_count_kv", heads)
        keys.expect("rope.dimension_count", hidden // heads)    # some converters write it; gpt2 has no rope
    else:
        result = _llama_like(file, keys, hidden, heads, layers, vocab)
    result["tie_word_embeddings"] = _tied(file)
    keys.finish()
    return result


def _llama_like(file: File, keys: _Keys, hidden: int, heads: int, layers: int, vocab: int) -> dict[str, Any]:
    arch, gemma = file.architecture, file.architecture.startswith("gemma")
    head_dim = keys.take("attention.key_length", hidden // heads)
    keys.expect("attention.value_length", head_dim)
    keys.expect("rope.dimension_count", head_dim)
    theta = keys.take("rope.freq_base", 1e6 if arch == "gemma3" else 1e4)
    window = keys.take("attention.sliding_window", 4096 if arch == "gemma2" else 0)
    result = {
        "model_type": {"gemma3": "gemma3_text", "llama": "mistral" if window else "llama"}.get(arch, arch),
        "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", heads), "head_dim": head_dim,
        "intermediate_size": keys.take("feed_forward_length"), "rope_theta": theta,
        "max_position_embeddings": keys.take("context_length"),
        "rms_norm_eps": keys.take("attention.layer_norm_rms_epsilon"),
        "rope_scaling": _scaling(file, keys, head_dim, theta),
    }
    if window:
        if arch.startswith("qwen"):
            raise ValueError(f"{file.path} has {arch}.attention.sliding_window={window}, but nothing in the file says "
                             "which layers it is for")
        result["sliding_window"] = window
    if gemma:
        # Not in the file: the largest model of each generation scales by the width per head, all others by head_dim.
        largest = layers == {"gemma2": 46, "gemma3": 62}[arch]
        result["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
        second = arch == "gemma2"
        result["attn_logit_softcapping"] = keys.take("attn_logit_softcapping", 50.0 if second else None)
        result["final_logit_softcapping"] = keys.take("final_logit_softcapping", 30.0 if second else None)
    if arch == "gemma3":
        result["rope_local_base_freq"] = keys.take("rope.freq_base_swa", 10_000.0)
        keys.expect("attention.sliding_window_pattern", 6)
    if arch == "llama":
        for name, tensor in (("attention_bias", "blk.0.attn_output.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
            if tensor in file.tensors:
                result[name] = True
    return result


def _scaling(file: File, keys: _Keys, head_dim: int, theta: float) -> dict[str, Any] | None:
    """`rope_scaling`, from the metadata or from the factors that llama.cpp stores for Llama 3.1 and later."""
    kind = keys.take("rope.scaling.type", "none")
    factor = keys.take("rope.scaling.factor", keys.take("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ValueError(f"{file.path} has {file.architecture}.rope.scaling.type={kind!r}, which is not supported "
                         "(supported: none, linear)")
    linear = {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if "rope_freqs.weight" not in file.tensors:
        return linear
    factors = _dequantise(file, "rope_freqs.weight")
    if factors.shape == (head_dim // 2,) and linear is None:
        if np.all(factors == 1.0):
            return None
        for length in sorted({keys.original_length, 8192}):
            scaling = RopeScaling(kind="llama3", factor=float(factors.max()), original_max_positions=length)
            wanted = rope.frequencies(head_dim, theta, scaling)
            if np.allclose(rope.frequencies(head_dim, theta) / factors, wanted, rtol=1e-4):
                return {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
                        "high_freq_factor": scaling.high_freq_factor, "original_max_position_embeddings": length}
    raise ValueError(f"{file.path} has the tensor 'rope_freqs.weight' with factors that are not those of Llama 3's "
                     "rope scaling, which is not supported")


def tensors(file: File) -> tuple[set[str], Callable[[str], np.ndarray]]:
    """(names, get) for `weights.assemble`: Hugging Face names, and a float32 array for one of them.

    Raises:
      ValueError: a tensor has no place in this architecture, or cannot be dequantised.
    """
    arch = file.architecture
    gpt2, gemma = arch == "gpt2", arch.startswith("gemma")
    top = _GPT2_TOP if gpt2 else _TOP
    layer = _GPT2_LAYER if gpt2 else _LAYER | (_SANDWICH if gemma else {}) | (
        _QK_NORM if arch in ("qwen3", "gemma3") else {})
    stem = "transformer.h" if gpt2 else "model.layers"
    sources = {}
    for name in file.tensors:
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        other = re.fullmatch(r"(\w+)\.(weight|bias)", name)
        if block and block[2] in layer:
            sources[f"{stem}.{block[1]}.{layer[block[2]]}.{block[3]}"] = name
        elif other and other[1] in top:
            sources[f"{top[other[1]]}.{other[2]}"] = name
        elif name != "rope_freqs.weight":
            raise ValueError(f"{file.path} has the tensor {name!r}, which architecture {arch!r} does not know and "
                             "which may change the maths, so it is not loaded")

    keys = _Keys(file)
    heads = {"q_proj": keys.take("attention.head_count")}
    heads["k_proj"] = keys.take("attention.head_count_kv", heads["q_proj"])

    def get(name: str) -> np.ndarray:
        array = _dequantise(file, sources[name])
        module = name.split(".")[-2]
        if arch == "llama" and module in heads:
            # llama.cpp turns neighbouring pairs, Hugging Face the two halves of a head.
            pairs = array.reshape(heads[module], -1, 2, *array.shape[1:])
            return pairs.swapaxes(1, 2).reshape(array.shape)
        if gemma and "norm" in module:
            return array - 1.0          # the file holds what is multiplied by, Hugging Face its distance from one
        if gpt2 and array.ndim == 2 and module.startswith("c_"):
            return array.T
        return array

    return set(sources), get


def is_bfloat16(file: File) -> bool:
    """Whether all matrices are stored in bfloat16."""
    import gguf
    return all(t.tensor_type == gguf.GGMLQuantizationType.BF16 for t in file.tensors.values() if len(t.shape) > 1)


def _tied(file: File) -> bool:
    """Whether the head is the embedding; converters of GPT-2 write it twice."""
    if "output.weight" not in file.tensors:
        return True
    head, table = file.tensors["output.weight"], file.tensors["token_embd.weight"]
    return head.tensor_type == table.tensor_type and np.array_equal(head.data, table.data)


def _dequantise(file: File, name: str) -> np.ndarray:
    import gguf
    tensor = file.tensors[name]
    try:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(f"{file.path}: tensor {name!r} is stored as {tensor.tensor_type.name}, which the gguf package "
                         "cannot dequantise; convert the file to Q8_0 or F16") from None
    return np.asarray(array, np.float32).reshape(tensor.shape[::-1])


class _Keys:
    """The architecture's own keys, each taken once, so that what is left over is known at the end."""

    def __init__(self, file: File):
        self._file, self._prefix = file, file.architecture + "."
        self._left = {name.removeprefix(self._prefix): value for name, value in file.metadata.items()
                      if name.startswith(self._prefix)}
        self.original_length = self._left.get("rope.scaling.original_context_length", 8192)

    def take(self, name: str, default: Any = ...) -> Any:
        value = self._left.pop(name, default)
        if value is ...:
            raise ValueError(f"{self._file.path} lacks the key '{self._prefix}{name}'")
        if isinstance(value, list):     # one number per layer; we can only have the same for all
            if len(set(value)) != 1:
                raise ValueError(f"{self._file.path} has another {self._prefix}{name} in each layer, which is not "
                                 "supported")
            value = value[0]
        return value

    def expect(self, name: str, wanted: Any) -> None:
        value = self.take(name, wanted)
        if value != wanted:
            raise ValueError(f"{self._file.path} has {self._prefix}{name}={value}, which is not supported "
                             f"(supported: {wanted})")

    def finish(self) -> None:
        for name, value in self._left.items():
            if name not in _HARMLESS and value:
                raise ValueError(f"{self._file.path} has {self._prefix}{name}={value!r:.80}, which this model code "
                                 "does not know and which may change the maths, so it is not loaded")
