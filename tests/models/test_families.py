"""What is refused, and whether the message names the reason."""

import numpy as np
import pytest

from parallax.models import weights
from parallax.models.config import ModelConfig, RopeScaling
from parallax.models.families import from_hf, to_hf

LLAMA = dict(model_type="llama", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, intermediate_size=48, max_position_embeddings=128)
QWEN3 = dict(LLAMA, model_type="qwen3", head_dim=8)
GEMMA3 = dict(LLAMA, model_type="gemma3_text", head_dim=8)
GPT2 = dict(model_type="gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128)
SMALL = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
             max_positions=128)


@pytest.mark.parametrize(("config", "keys", "named"), [
    (QWEN3, dict(attn_output_gate=True), "attn_output_gate=True"),
    (QWEN3, dict(use_gated_attention="headwise"), "use_gated_attention='headwise'"),
    (LLAMA, dict(rope_scaling=dict(rope_type="yarn", factor=4.0)), "rope_type='yarn'"),
    (LLAMA, dict(rope_scaling=dict(type="dynamic", factor=4.0)), "rope_type='dynamic'"),
    (LLAMA, dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)), "rope_type='longrope'"),
    (LLAMA, dict(rope_scaling=dict(rope_type="linear")), "factor"),
    (LLAMA, dict(rope_scaling=dict(rope_type="linear", factor=2.0, attention_factor=0.5)), "attention_factor=0.5"),
    (LLAMA, dict(rope_scaling=dict(rope_type="linear", factor=2.0), rope_parameters=dict(rope_type="default")),
     "rope_scaling"),
    (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    (LLAMA, dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)), "partial_rotary_factor=0.5"),
    (GEMMA3, dict(rope_parameters=dict(full_attention=dict(rope_type="default"),
                                       sliding_attention=dict(rope_type="linear", factor=2.0))), "sliding"),
    (GEMMA3, dict(rope_parameters=dict(full_attention=dict(rope_type="default"),
                                       sliding_attention=dict(partial_rotary_factor=0.5))),
     "partial_rotary_factor=0.5"),
    (GEMMA3, dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
    (LLAMA, dict(rope_interleaved=True), "rope_interleaved=True"),
    (LLAMA, dict(quantization_config=dict(quant_method="gptq")), "quantization_config"),
    (LLAMA, dict(residual_multiplier=0.2), "residual_multiplier=0.2"),
    (LLAMA, dict(hidden_act="relu"), "'relu'"),
    (LLAMA, dict(sliding_window=64), "sliding_window=64"),
    (LLAMA, dict(layer_types=["full_attention", "sliding_attention"], sliding_window=64), "layer_types"),
    (dict(LLAMA, model_type="mistral"), dict(layer_types=["full_attention", "sliding_attention"], sliding_window=64),
     "layer_types"),
    (QWEN3, dict(layer_types=["full_attention", "linear_attention"]), "'linear_attention'"),
    (GPT2, dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
    (GPT2, dict(scale_attn_weights=False), "scale_attn_weights=False"),
    (GPT2, dict(reorder_and_upcast_attn=True), "reorder_and_upcast_attn=True"),
    (GPT2, dict(add_cross_attention=True), "add_cross_attention=True"),
])
def test_keys_that_change_the_maths_are_refused_by_name(config, keys, named):
    from_hf(config)
    with pytest.raises(ValueError, match=named):
        from_hf(config | keys)


@pytest.mark.parametrize("name", ["attn_output_gate", "no_rope_layers", "an_idea_of_tomorrow"])
@pytest.mark.parametrize("config", [LLAMA, QWEN3, GEMMA3, GPT2], ids=lambda config: config["model_type"])
def test_unknown_keys_are_refused_only_where_they_hold_a_value(config, name):
    for nothing in (None, False, 0, "", [], {}):
        assert from_hf(config | {name: nothing}) == from_hf(config)
    for value in (True, 3, "on", [1], {"a": 1}):
        with pytest.raises(ValueError, match=name):
            from_hf(config | {name: value})


def test_unknown_families_are_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="'qwen33'.*did you mean 'qwen3'"):
        from_hf(LLAMA | dict(model_type="qwen33"))
    with pytest.raises(ValueError, match="None.*llama"):
        from_hf({})


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                                  "intermediate_size"])
def test_missing_sizes_are_named(name):
    with pytest.raises(ValueError, match=f"lacks '{name}'"):
        from_hf({key: value for key, value in LLAMA.items() if key != name})


def test_keys_that_leave_the_maths_alone_are_accepted():
    harmless = dict(architectures=["LlamaForCausalLM"], torch_dtype="bfloat16", dtype="bfloat16", use_cache=True,
                    attention_dropout=0.1, initializer_range=0.02, bos_token_id=1, eos_token_id=[2, 3],
                    pretraining_tp=1, transformers_version="5.0.0", partial_rotary_factor=1.0, rope_interleaved=False,
                    quantization_config=None, rope_scaling=None)
    assert from_hf(LLAMA | harmless) == from_hf(LLAMA)


def test_the_language_part_of_a_vision_model_is_found():
    assert from_hf(dict(model_type="gemma3", vision_config={"hidden_size": 9}, text_config=GEMMA3)) == from_hf(GEMMA3)


def test_a_quantized_vision_model_is_refused():
    with pytest.raises(ValueError, match="quantization_config"):
        from_hf(dict(model_type="gemma3", text_config=GEMMA3, quantization_config=dict(quant_method="gptq")))


def test_older_and_newer_ways_to_write_rope_mean_the_same():
    old = from_hf(LLAMA | dict(rope_theta=500.0, rope_scaling=dict(type="linear", factor=2.0)))
    new = from_hf(LLAMA | dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=2.0)))
    assert old == new
    assert old.rope_theta == 500.0
    assert old.rope_scaling == RopeScaling(kind="linear", factor=2.0)
    old = from_hf(GEMMA3 | dict(rope_theta=500.0, rope_local_base_freq=50.0,
                                rope_scaling=dict(type="linear", factor=2.0)))
    new = from_hf(GEMMA3 | dict(rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=500.0, factor=2.0),
        sliding_attention=dict(rope_type="default", rope_theta=50.0))))
    assert old == new
    assert old.local_rope_theta == 50.0


def test_layer_types_follow_the_rules_of_older_configs():
    assert from_hf(LLAMA | dict(model_type="mistral", sliding_window=9)).layer_types == ("sliding",) * 2
    assert from_hf(LLAMA | dict(model_type="gemma2")).layer_types == ("sliding", "full")
    assert from_hf(GEMMA3 | dict(num_hidden_layers=4, sliding_window_pattern=3)).layer_types == (
        "sliding", "sliding", "full", "sliding")
    window = dict(use_sliding_window=True, sliding_window=9, max_window_layers=1)
    assert from_hf(QWEN3 | window).layer_types == ("full", "sliding")
    assert from_hf(QWEN3 | window | dict(use_sliding_window=False)).layer_types == ()
    assert from_hf(QWEN3 | window | dict(max_window_layers=2)).sliding_window is None


@pytest.mark.parametrize(("changes", "message"), [
    *(({name: 0}, f"{name} must be positive, got 0") for name in SMALL),
    (dict(num_kv_heads=3), "num_heads=4 must be a multiple of num_kv_heads=3"),
    (dict(head_dim=7), "head_dim=7 must be even"),
    (dict(activation="gelu_tan"), "unknown activation 'gelu_tan'.*did you mean 'gelu_tanh'"),
    (dict(norm="rms"), "unknown norm 'rms'.*rmsnorm, layernorm"),
    (dict(positions="alibi"), "unknown positions 'alibi'"),
    (dict(dtype="float16"), "unknown dtype 'float16'"),
    (dict(alignment="shift"), "unknown alignment 'shift'.*did you mean 'shifted'"),
    (dict(visibility="block"), "unknown visibility 'block'"),
    (dict(layer_types=("full",)), "layer_types names 1 layers, num_layers=2"),
    (dict(layer_types=("full", "linear")), "unknown layer type 'linear'"),
    (dict(layer_types=("full", "sliding")), "sliding_window is not set"),
    (dict(taps=(2,)), "tap 2 is not a layer: expected 0 to 1"),
    (dict(taps=(-1,)), "tap -1 is not a layer"),
])
def test_architectures_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SMALL | changes)


def test_rope_scaling_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="unknown rope scaling kind 'yarn'"):
        RopeScaling(kind="yarn", factor=2.0)
    with pytest.raises(ValueError, match="rope scaling factor must be positive"):
        RopeScaling(kind="linear", factor=0.0)


def test_odd_heads_are_fine_without_rotary_positions():
    assert ModelConfig(**SMALL | dict(head_dim=7, positions="learned")).head_dim == 7


@pytest.mark.parametrize(("changes", "named"), [
    (dict(attention_scale=1.0), "nearest is llama, which differs in attention_scale"),
    (dict(alignment="same", visibility="full"), "alignment, visibility"),
    (dict(embed_scale=2.0), "embed_scale"),
    (dict(logit_softcap=9.0), "logit_softcap"),
])
def test_models_that_no_family_expresses_are_not_exported(changes, named):
    config = ModelConfig(**SMALL, norm_eps=1e-6)
    assert from_hf(to_hf(config)) == config
    with pytest.raises(ValueError, match=named):
        to_hf(config.replace(**changes))


@pytest.mark.parametrize("scalar", [1, 3, 11, 96, 144, 168, 224, 256, 4096 // 28])
def test_the_attention_scale_of_gemma_is_exported_exactly(scalar):
    config = from_hf(GEMMA3 | dict(query_pre_attn_scalar=scalar))
    assert to_hf(config)["query_pre_attn_scalar"] == scalar
    assert from_hf(to_hf(config)) == config


def checkpoint(config):
    """Zeros for every tensor of a llama-like model, by name."""
    cfg = from_hf(config)
    tree = {}
    for path, shape in weights.shapes(cfg).items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        layers = path[0] == "layers"
        node[path[-1]] = np.zeros((cfg.num_layers, *shape) if layers else shape, np.float32)
    return cfg, dict(weights.disassemble(cfg, tree))


def assemble(cfg, tensors):
    return weights.assemble(cfg, set(tensors), tensors.__getitem__, np.float32)


def test_a_missing_tensor_is_named():
    cfg, tensors = checkpoint(LLAMA)
    assemble(cfg, tensors)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks the tensor 'model\.layers\.1\.self_attn\.k_proj\.weight'"):
        assemble(cfg, tensors)


def test_a_tensor_without_a_place_is_named():
    cfg, tensors = checkpoint(LLAMA)
    tensors["model.layers.0.self_attn.gate_proj.weight"] = np.zeros((32, 32), np.float32)
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.gate_proj\.weight'"):
        assemble(cfg, tensors)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight",
                                  "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"])
@pytest.mark.parametrize("axis", [0, -1])
def test_a_tensor_of_another_shape_is_named(name, axis):
    cfg, tensors = checkpoint(LLAMA | dict(tie_word_embeddings=False))
    tensors[name] = np.concatenate([tensors[name]] * 2, axis)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        assemble(cfg, tensors)


def test_queries_and_keys_of_swapped_sizes_are_refused():
    cfg, tensors = checkpoint(LLAMA)
    layer = "model.layers.0.self_attn."
    tensors[layer + "q_proj.weight"], tensors[layer + "k_proj.weight"] = (
        tensors[layer + "k_proj.weight"], tensors[layer + "q_proj.weight"])
    with pytest.raises(ValueError, match="q_proj"):
        assemble(cfg, tensors)


def test_a_transposed_tensor_is_read_as_its_checkpoint_stores_it():
    cfg, tensors = checkpoint(GPT2)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert tensors[name].shape == (32, 128)
    tensors[name] = np.arange(32 * 128, dtype=np.float32).reshape(32, 128)
    np.testing.assert_array_equal(assemble(cfg, tensors)["layers"]["mlp"]["up"]["w"][0], tensors[name].T)


def test_buffers_and_a_repeated_head_are_not_missed():
    cfg, tensors = checkpoint(LLAMA | dict(tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert "head" not in assemble(cfg, tensors)
    cfg, tensors = checkpoint(GPT2)
    tensors["transformer.h.0.attn.bias"] = np.ones((1, 1, 128, 128), bool)
    assemble(cfg, tensors)
