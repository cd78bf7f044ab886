"""Models as far as compiling needs them: their shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from parallax import zoo
from parallax.models import families
from parallax.models.config import ModelConfig, nearest

_LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}

# The config.json of huggingface.co/meta-llama/Llama-3.2-1B, Qwen/Qwen3-0.6B, meta-llama/Meta-Llama-3-8B and
# HuggingFaceTB/SmolLM2-135M.
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": dict(
        model_type="llama", vocab_size=128256, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, intermediate_size=8192, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling={**_LLAMA3_ROPE, "factor": 32.0}, tie_word_embeddings=True),
    "qwen3-0.6b": dict(
        model_type="qwen3", vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, intermediate_size=3072, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1000000.0, tie_word_embeddings=True),
    "llama-3-8b": dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, intermediate_size=14336, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=False),
    "smollm2-135m": dict(
        model_type="llama", vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, intermediate_size=1536, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=100000.0, tie_word_embeddings=True),
}


def resolve(name: str) -> ModelConfig:
    """The config of a preset, of a model that the package ships, or of a Hugging Face folder.

    Raises:
      ValueError: an unknown name, or a config.json that is not supported.
      OSError: an unreadable one.
    """
    if name in PRESETS:
        return families.from_hf(PRESETS[name])
    known = [*PRESETS, *(model for model, entry in zoo.MODELS.items() if isinstance(entry, zoo.Shipped))]
    folder = zoo.SHIPPED / name if name in known else Path(name).expanduser()
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"unknown model {name!r}: expected {', '.join(known)}, or a folder with config.json"
                         f"{nearest(name, known)}")
    try:
        values = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    return families.from_hf(values)
