"""GGUF files, written here as llama.cpp writes them."""

import gguf as package
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax import checkpoint
from parallax.models import families, gguf, gguf_tokenizer, rope, weights
from parallax.models.cache import Block
from parallax.models.config import RopeScaling
from parallax.models.transformer import Model

LLAMA = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
         "rope_theta": 5000.0}
WIDE = {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 256}
CONFIGS = {
    "llama": {"model_type": "llama", **LLAMA},
    "qwen2": {"model_type": "qwen2", **LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 128},
    "gemma2": {"model_type": "gemma2", **LLAMA, **WIDE, "sliding_window": 5},
    "gemma3": {"model_type": "gemma3_text", **LLAMA, **WIDE, "sliding_window": 5},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 1024},
}
EXTRA = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "wte": "token_embd",
         "wpe": "position_embd", "ln_f": "output_norm"}


def params_of(config):
    """Random parameters in which no norm and no bias is trivial."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.normal(0, 0.2, leaf.shape).astype(np.float32),
                        jax.eval_shape(Model(config).init, jax.random.key(0)))


def gguf_tensors(architecture, config, params):
    """(name, array) in llama.cpp's layout."""
    table = gguf._GPT2_LAYER if architecture == "gpt2" else gguf._LAYER | gguf._QK_NORM
    table = table | (gguf._SANDWICH if architecture.startswith("gemma") else {})
    modules = {theirs: ours for ours, theirs in table.items()}
    for name, array in weights.disassemble(config, params):
        *path, kind = name.split(".")
        if ".layers." in name or ".h." in name:
            module = ".".join(path[3:])
            target = f"blk.{path[2]}.{modules[module]}.{kind}"
            if architecture == "llama" and modules[module] in ("attn_q", "attn_k"):
                heads = config.num_heads if modules[module] == "attn_q" else config.num_kv_heads
                array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            if architecture == "gpt2" and module.split(".")[-1].startswith("c_"):
                array = array.T
        else:
            target = f"{EXTRA[path[-1]]}.{kind}"
        plus_one = architecture.startswith("gemma") and "norm" in target
        yield target, np.ascontiguousarray(array + plus_one)


def write(path, architecture, *, config=None, keys=None, tensors=None, drop=()):
    """Writes a file and returns (config, params) of what is in it."""
    config = families.from_hf(config or CONFIGS[architecture])
    params = params_of(config)
    writer = package.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_vocab_size(config.vocab_size)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope_theta)
        if config.head_dim * config.num_heads != config.hidden_size:
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        else:
            writer.add_rope_dimension_count(config.head_dim)
    if config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    for name, value in (keys or {}).items():
        name = name.replace("ARCH", architecture)
        kind = package.GGUFValueType.get_type(value)
        writer.add_array(name, value) if isinstance(value, list) else writer.add_key_value(name, value, kind)
    for name, array in (dict(gguf_tensors(architecture, config, params)) | (tensors or {})).items():
        if name not in drop:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, params


def logits(config, params, tokens):
    model, rows = Model(config), tokens.shape[1]

    @jax.jit
    def run(params):
        block = Block(jnp.asarray(tokens), jnp.arange(rows)[None], jnp.tril(jnp.ones((rows, rows), bool)))
        return model.unembed(params, model.forward(params, block, model.new_cache(1, 0)).hidden)

    return np.asarray(run(params))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_architecture_loads_back_as_it_was_written(architecture, tmp_path):
    config, params = write(tmp_path / "m.gguf", architecture)
    loaded = checkpoint.load(tmp_path)                      # a folder with one .gguf stands for the file
    assert loaded.config == config.replace(attention_scale=loaded.config.attention_scale)
    assert loaded.config.scale == config.scale
    assert loaded.tokenizer is None and loaded.eos_ids == ()
    assert jax.tree.structure(loaded.params) == jax.tree.structure(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), loaded.params, params)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", CONFIGS)
def test_logits_equal_those_of_transformers(architecture, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.set_num_threads(1)
    write(tmp_path / "m.gguf", architecture, keys={"tokenizer.ggml.tokens": [f"t{i}" for i in range(50)]})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32,
                                                               attn_implementation="eager").eval()
    tokens = np.random.default_rng(1).integers(0, 50, (1, 12)).astype(np.int32)
    loaded = checkpoint.load(tmp_path / "m.gguf")
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(logits(loaded.config, loaded.params, tokens), expected, atol=1e-4)


def test_quantised_tensors_are_dequantised(tmp_path):
    write(tmp_path / "m.gguf", "llama", tensors={"token_embd.weight": np.zeros((50, 32), np.float16)})
    assert checkpoint.load(tmp_path / "m.gguf").params["embed"]["tokens"].dtype == np.float32
    table = np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32)
    packed = package.quantize(table, package.GGMLQuantizationType.Q8_0)
    writer = package.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", packed, raw_dtype=package.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    _, get = gguf.tensors(gguf.read(tmp_path / "q.gguf"))
    np.testing.assert_allclose(get("model.embed_tokens.weight"), table, atol=0.02)


def test_a_head_that_repeats_the_embedding_is_tied(tmp_path):
    _, params = write(tmp_path / "a.gguf", "gpt2")
    write(tmp_path / "m.gguf", "gpt2", tensors={"output.weight": params["embed"]["tokens"]})
    assert checkpoint.load(tmp_path / "m.gguf").config.tie_embeddings
    write(tmp_path / "m.gguf", "gpt2", tensors={"output.weight": params["embed"]["tokens"] * 2})
    assert not checkpoint.load(tmp_path / "m.gguf").config.tie_embeddings


def test_a_llama_with_a_sliding_window_is_a_mistral(tmp_path):
    mistral = {**CONFIGS["llama"], "model_type": "mistral", "sliding_window": 7}
    config, _ = write(tmp_path / "m.gguf", "llama", config=mistral)
    assert checkpoint.load(tmp_path / "m.gguf").config == config


def test_llama_3_factors_are_recognised_and_others_refused(tmp_path):
    wanted = RopeScaling(kind="llama3", factor=8.0)
    factors = rope.frequencies(8, 5e5) / rope.frequencies(8, 5e5, wanted)
    config = {**CONFIGS["llama"], "rope_theta": 5e5}
    write(tmp_path / "m.gguf", "llama", config=config, tensors={"rope_freqs.weight": factors})
    assert checkpoint.load(tmp_path / "m.gguf").config.rope_scaling == wanted
    write(tmp_path / "m.gguf", "llama", config=config, tensors={"rope_freqs.weight": factors * 1.1})
    with pytest.raises(ValueError, match="rope_freqs.weight"):
        checkpoint.load(tmp_path / "m.gguf")


def test_linear_scaling_is_used(tmp_path):
    write(tmp_path / "m.gguf", "llama", keys={"ARCH.rope.scaling.type": "linear", "ARCH.rope.scaling.factor": 4.0})
    assert checkpoint.load(tmp_path / "m.gguf").config.rope_scaling == RopeScaling(kind="linear", factor=4.0)


@pytest.mark.parametrize("architecture, keys, reason", [
    ("llama", {"ARCH.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
    ("qwen3", {"ARCH.rope.dimension_count": 8}, "rope.dimension_count=8"),
    ("llama", {"ARCH.expert_count": 8}, "expert_count=8"),
    ("qwen2", {"ARCH.attention.sliding_window": 8}, "sliding_window=8"),
    ("llama", {"ARCH.attention.scale": 0.5}, "llama.attention.scale=0.5"),
    ("gemma3", {"ARCH.attention.sliding_window_pattern": 2}, "sliding_window_pattern=2"),
    ("llama", {"ARCH.attention.value_length": 4}, "value_length=4"),
    ("llama", {"split.count": 3}, "one of 3 parts"),
    ("llama", {"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": ["a"]}, "model='bert'"),
    ("llama", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "smolm"},
     "did you mean 'smollm'"),
    ("llama", {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "no tokenizer.ggml.scores"),
])
def test_keys_that_are_not_supported_are_refused_by_name(architecture, keys, reason, tmp_path):
    write(tmp_path / "m.gguf", architecture, keys=keys)
    with pytest.raises(ValueError, match=reason) as error:
        checkpoint.load(tmp_path / "m.gguf")
    assert "\n" not in str(error.value) and "m.gguf" in str(error.value)


def test_unknown_architectures_and_tensors_are_refused_by_name(tmp_path):
    package_file = tmp_path / "m.gguf"
    write(package_file, "llama", tensors={"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match="'blk.0.attn_sinks.weight'"):
        checkpoint.load(package_file)
    write(package_file, "llama", drop=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match="lacks the tensor 'model.layers.1.mlp.up_proj.weight'"):
        checkpoint.load(package_file)
    writer = package.GGUFWriter(package_file, "gemma4")
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.close()
    with pytest.raises(ValueError, match="unknown architecture 'gemma4'.*did you mean 'gemma"):
        checkpoint.load(package_file)


def test_damaged_files_are_one_line(tmp_path):
    write(tmp_path / "m.gguf", "llama", keys={"tokenizer.ggml.tokens": ["a"] * 20})
    whole = (tmp_path / "m.gguf").read_bytes()
    broken = [whole[:size] for size in (0, 3, 20, 100, 700, len(whole) // 2, len(whole) - 40)]
    broken += [b"PK" + whole[2:], whole[:8] + b"\xff" * 12 + whole[20:]]
    for i, data in enumerate(broken):
        path = tmp_path / f"broken-{i}.gguf"
        path.write_bytes(data)
        with pytest.raises(ValueError, match="damaged, incomplete or no .gguf file") as error:
            checkpoint.load(path)
        assert "\n" not in str(error.value)
    with pytest.raises(FileNotFoundError, match="no.gguf not found"):
        checkpoint.load(tmp_path / "no.gguf")


def byte_level(pre, **keys):
    alphabet = sorted(package_alphabet())
    tokens = [*alphabet, "ab", "Ġa", "12", "<s>", "</s>", "<end>"]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3,
            "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2"],
            "tokenizer.ggml.bos_token_id": len(tokens) - 3, "tokenizer.ggml.eos_token_id": len(tokens) - 2,
            "tokenizer.ggml.eot_token_id": len(tokens) - 1} | keys


def package_alphabet():
    from tokenizers import pre_tokenizers
    return pre_tokenizers.ByteLevel.alphabet()


@pytest.mark.parametrize("pre, pieces", [("gpt-2", ["12", "12"]), ("smollm", ["1", "2", "1", "2"]),
                                         ("qwen2", ["1", "2", "1", "2"]), ("llama-bpe", ["12", "1", "2"]),
                                         ("default", ["12", "1", "2"])])
def test_the_pre_tokenizer_is_the_named_one(pre, pieces):
    tokenizer = gguf_tokenizer.build(byte_level(pre))
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("1212", special=False)] == pieces


def test_flags_and_special_tokens_of_a_byte_level_tokenizer_are_respected():
    metadata = byte_level("gpt-2", **{"tokenizer.chat_template": "{{ eos_token }}"})
    plain = gguf_tokenizer.build(metadata)
    assert plain.encode("ab</s>") == [256, 260] and plain.decode([256, 260]) == "ab"
    assert plain.eos_ids == (260, 261) and plain.chat([]) == "</s>"
    both = gguf_tokenizer.build(metadata | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    assert both.encode("ab") == [259, 256, 260] and both.encode("ab", special=False) == [256]
    # Llama 3 begins with BOS unless told otherwise.
    assert gguf_tokenizer.build(byte_level("llama-bpe")).encode("ab") == [259, 256]
    with pytest.raises(ValueError, match="eos_token_id=999"):
        gguf_tokenizer.build(metadata | {"tokenizer.ggml.eos_token_id": 999})


def test_sentencepiece_joins_the_best_scored_pieces_first():
    random = np.random.default_rng(0)
    pieces = sorted({"".join(random.choice(list("▁abc"), random.integers(2, 5))) for _ in range(60)})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *"▁abc"]
    scores = [0.0] * 259 + [-float(i) for i in random.permutation(len(pieces))] + [-1000.0] * 4
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
                "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + 4),
                "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    tokenizer = gguf_tokenizer.build(metadata)
    score = dict(zip(tokens, scores))

    def join(text):
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = [(score[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in score]
            if not pairs:
                return [tokens.index(part) for part in parts]
            i = -max(pairs)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]

    for _ in range(50):
        text = "".join(random.choice(list(" abc"), 12))
        assert tokenizer.encode(text) == [1, *join(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é", special=False)[-2:] == [3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("aé")) == "aé"
    bare = gguf_tokenizer.build(metadata | {"tokenizer.ggml.add_space_prefix": False,
                                            "tokenizer.ggml.add_bos_token": False})
    assert bare.decode(bare.encode(" a")) == " a"
    assert bare.encode("é") == [3 + 0xC3, 3 + 0xA9]
