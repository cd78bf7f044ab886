"""Writes the golden logits of every supported family: `python -m tests.golden.make`, with torch and transformers.

One case is one tiny `transformers` model: `<case>.json` is its configuration, `<case>.npz` its tokens and logits. Its
weights come from `tests.golden.weights`. The sizes are such that no two of them agree by accident.
"""

from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
import transformers

from parallax import zoo
from tests.golden import weights

FOLDER = pathlib.Path(__file__).parent


def _sizes(vocab, hidden, layers, heads, kv_heads, intermediate, **more):
    return dict(vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, intermediate_size=intermediate, max_position_embeddings=64,
                pad_token_id=None, bos_token_id=None, eos_token_id=None, **more)


CASES = {
    "llama": dict(model_type="llama", **_sizes(68, 40, 2, 5, 5, 56, head_dim=12)),
    # Wavelengths of 6, 22 and 75 positions and more: one is kept, one blended, the others are divided.
    "llama_gqa": dict(model_type="llama", **_sizes(72, 36, 3, 6, 2, 52, head_dim=10), rope_parameters=dict(
        rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=0.5, high_freq_factor=2.0,
        original_max_position_embeddings=16)),
    "llama_linear": dict(model_type="llama", **_sizes(66, 32, 2, 4, 2, 44, head_dim=14), attention_bias=True,
                         mlp_bias=True, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=3.0)),
    "mistral": dict(model_type="mistral", **_sizes(70, 36, 3, 4, 2, 50, head_dim=14), sliding_window=7),
    "qwen2": dict(model_type="qwen2", **_sizes(74, 48, 2, 6, 3, 60), rms_norm_eps=1e-5),
    "qwen2_window": dict(model_type="qwen2", **_sizes(64, 40, 3, 4, 2, 54), tie_word_embeddings=True,
                         use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": dict(model_type="qwen3", **_sizes(78, 32, 3, 4, 2, 46, head_dim=18)),
    "gemma2": dict(model_type="gemma2", **_sizes(76, 40, 4, 4, 2, 58, head_dim=14), sliding_window=7,
                   query_pre_attn_scalar=11, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": dict(model_type="gemma3_text", **_sizes(80, 36, 6, 4, 2, 42, head_dim=16), sliding_window=7,
                        sliding_window_pattern=3, query_pre_attn_scalar=13, rope_parameters=dict(
                            full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=8.0),
                            sliding_attention=dict(rope_type="default", rope_theta=100.0))),
    "gpt2": dict(model_type="gpt2", vocab_size=82, n_embd=40, n_layer=3, n_head=4, n_positions=50, bos_token_id=None,
                 eos_token_id=None),
    "smollm2": dict(model_type="llama", **_sizes(84, 36, 3, 9, 3, 62, head_dim=6), rms_norm_eps=1e-5,
                    tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=100000.0)),
    "mqa": dict(model_type="llama", **_sizes(86, 48, 2, 6, 1, 64, head_dim=10)),
}


def build(config: dict, seed: int = 0) -> transformers.PreTrainedModel:
    """The `transformers` model of a `config.json`, with the weights of `seed`."""
    config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    norm = 0.0 if config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights.tensor(name, tuple(parameter.shape), norm=norm, seed=seed)))
    return model


def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """What the model says behind every token, over the whole sequence at once."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


def real():
    """Some columns of SmolLM2's logits on a chat prompt."""
    folder = zoo.resolve("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "List three primes and explain why 1 is not one of them."
    prompt = [{"role": "user", "content": text}]
    tokens = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        prompt, add_generation_prompt=True, return_tensors="np", return_dict=True)["input_ids"].astype(np.int32)
    columns = np.arange(5, model.config.vocab_size, 491)
    np.savez_compressed(FOLDER / "real" / "smollm2-135m.npz", text=text, tokens=tokens, columns=columns,
                        logits=logits(model, tokens)[..., columns])


def main():
    torch.set_num_threads(1)
    real()
    for case, config in CASES.items():
        model = build(config)
        tokens = weights.tokens(case, model.config.vocab_size)
        np.savez_compressed(FOLDER / f"{case}.npz", tokens=tokens, logits=logits(model, tokens))
        written = json.loads(model.config.to_json_string(use_diff=False))
        (FOLDER / f"{case}.json").write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
        print(f"{case}: {sum(p.numel() for p in model.parameters())} weights")


if __name__ == "__main__":
    main()
