"""Hugging Face folders, read and written."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from tokenizers import models, pre_tokenizers

from parallax import checkpoint
from parallax.checkpoint import Checkpoint
from parallax.models import families, weights
from parallax.models.cache import Block
from parallax.models.transformer import Model
from parallax.tokenizer import FileTokenizer

LLAMA = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64}
WINDOW = {"sliding_window": 4, "query_pre_attn_scalar": 8, "head_dim": 8}
CONFIGS = {
    "llama": {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                                        "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    "mistral": {**LLAMA, "sliding_window": 4},
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "head_dim": 16},
    "gemma2": {**LLAMA, **WINDOW},
    "gemma3_text": {**LLAMA, **WINDOW, "num_hidden_layers": 7},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 48, "n_positions": 64},
}


def words(count=40):
    vocab = {"<s>": 0, "</s>": 1, "[UNK]": 2} | {f"w{i}": i for i in range(3, count)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return FileTokenizer(backend, bos="<s>", eos=("</s>",), chat_template="{{ messages[0].content }}")


def tiny(family="llama", **changes) -> Checkpoint:
    config = families.from_hf({"model_type": family, **CONFIGS[family]}).replace(**changes)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(0, 0.2, leaf.shape).astype(leaf.dtype),
                          jax.eval_shape(Model(config).init, jax.random.key(0)))
    return Checkpoint(config, params, words(), (1,))


def assert_same(a: Checkpoint, b: Checkpoint):
    assert a.config == b.config and a.eos_ids == b.eos_ids
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


@pytest.fixture
def folder(tmp_path):
    checkpoint.save(tiny(), tmp_path / "model")
    return tmp_path / "model"


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_saved_checkpoint_loads_back(family, tmp_path):
    saved = tiny(family)
    size = checkpoint.save(saved, tmp_path / "model")
    loaded = checkpoint.load(tmp_path / "model")
    scale = loaded.config.attention_scale
    assert_same(loaded, saved._replace(config=saved.config.replace(attention_scale=scale)))
    assert loaded.config.scale == saved.config.scale
    assert loaded.tokenizer.encode("w5 w6") == [5, 6]
    assert size == sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_computes_the_same_from_a_saved_checkpoint(family, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    saved = tiny(family)
    checkpoint.save(saved, tmp_path, max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32,
                                                               attn_implementation="eager").eval()
    assert theirs.generation_config.eos_token_id == 1
    if family != "qwen2":                                   # there it insists on a byte-level vocabulary
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer("w5 w6 w7")["input_ids"] == [5, 6, 7] and tokenizer.eos_token_id == 1
    tokens = np.random.default_rng(1).integers(0, 48, (1, 12))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    model = Model(saved.config)
    block = Block(jnp.asarray(tokens, jnp.int32), jnp.arange(12)[None], jnp.tril(jnp.ones((12, 12), bool)))
    output = jax.jit(model.forward)(saved.params, block, model.new_cache(1, 0))
    np.testing.assert_allclose(model.unembed(saved.params, output.hidden), expected, atol=1e-4)


def test_large_weights_are_split_over_shards(tmp_path):
    saved = tiny()
    checkpoint.save(saved, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and shards == sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    with safetensors.safe_open(tmp_path / shards[0], "numpy") as shard:
        assert shard.metadata() == {"format": "pt"}
    assert_same(checkpoint.load(tmp_path), saved)


def test_dtypes_are_kept_or_converted(tmp_path):
    saved = tiny()
    checkpoint.save(saved, tmp_path / "bf16", dtype="bfloat16")
    loaded = checkpoint.load(tmp_path / "bf16")
    assert loaded.config.dtype == "bfloat16" and loaded.params["embed"]["tokens"].dtype == ml_dtypes.bfloat16
    assert checkpoint.load(tmp_path / "bf16", dtype="float32").params["embed"]["tokens"].dtype == np.float32
    checkpoint.save(loaded, tmp_path / "again")
    assert_same(checkpoint.load(tmp_path / "again"), loaded)
    checkpoint.save(saved, tmp_path / "f16", dtype="float16")
    assert json.loads((tmp_path / "f16" / "config.json").read_text())["torch_dtype"] == "float16"
    assert checkpoint.load(tmp_path / "f16").config.dtype == "float32"
    for call in (lambda: checkpoint.load(tmp_path / "bf16", dtype="float16"),
                 lambda: checkpoint.save(saved, tmp_path / "x", dtype="bfloat61")):
        with pytest.raises(ValueError, match="unknown dtype"):
            call()


def test_scanned_layers_come_stacked_and_are_saved_alike(folder, tmp_path):
    scanned = checkpoint.load(folder, scan_layers=True)
    assert scanned.config.scan_layers
    assert scanned.params["layers"]["attention"]["qkv"]["w"].shape == (2, 64, 32)
    checkpoint.save(scanned, tmp_path / "again")
    assert_same(checkpoint.load(tmp_path / "again"), checkpoint.load(folder))


def test_end_tokens_come_from_the_first_place_that_names_them(folder):
    edit(folder / "generation_config.json", eos_token_id=[5, 6])
    assert checkpoint.load(folder).eos_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=7)
    assert checkpoint.load(folder).eos_ids == (7,)
    edit(folder / "config.json", eos_token_id=None)
    assert checkpoint.load(folder).eos_ids == (1,)
    assert checkpoint.load(folder, tokenizer=False)[2:] == (None, ())
    edit(folder / "config.json", eos_token_id=99)
    with pytest.raises(ValueError, match="names the end token 99"):
        checkpoint.load(folder)


def test_names_of_base_and_vision_models_are_understood(tmp_path):
    for family, strip, prefix in (("gpt2", "transformer.", ""), ("llama", "model.", ""),
                                  ("gemma3_text", "", "language_model."),
                                  ("gemma3_text", "model.", "model.language_model.")):
        saved = tiny(family, tie_embeddings=True)
        target = tmp_path / f"{family}{prefix}"
        checkpoint.save(saved, target)
        tensors = {prefix + name.removeprefix(strip): array
                   for name, array in weights.disassemble(saved.config, saved.params)}
        if prefix:
            tensors["vision_tower.x"] = tensors["model.multi_modal_projector.y"] = np.ones(2, np.float32)
            text = json.loads((target / "config.json").read_text())
            (target / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
        safetensors.numpy.save_file(tensors, target / "model.safetensors")
        loaded = checkpoint.load(target)
        jax.tree.map(np.testing.assert_array_equal, loaded.params, saved.params)


def one_line(error, *parts):
    assert "\n" not in str(error.value)
    for part in parts:
        assert str(part) in str(error.value)


@pytest.mark.parametrize("change, reason", [
    ({"attn_output_gate": True}, "attn_output_gate=True"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"model_type": "lama"}, "did you mean 'llama'"),
    ({"hidden_act": "relu"}, "'relu'"),
    ({"hidden_size": 64}, "has shape"),
    ({"num_hidden_layers": 1}, "does not account for"),
    ({"num_hidden_layers": 3}, "lacks the tensor"),
    ({"vocab_size": 20}, "40 tokens but the model's vocabulary has 20"),
])
def test_configs_that_do_not_fit_are_refused_by_name(folder, change, reason):
    edit(folder / "config.json", **change)
    with pytest.raises(ValueError) as error:
        checkpoint.load(folder)
    one_line(error, reason)


def test_missing_and_damaged_files_are_named(tmp_path):
    saved = tiny()
    with pytest.raises(FileNotFoundError) as error:
        checkpoint.load(tmp_path / "nothing")
    one_line(error, "nothing not found")
    with pytest.raises(FileNotFoundError) as error:
        checkpoint.load(tmp_path)
    one_line(error, "config.json not found")
    checkpoint.save(saved, tmp_path / "m", max_shard_bytes=20_000)
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for broken in (whole[:-10], whole[:20], b""):
        shard.write_bytes(broken)
        with pytest.raises(ValueError) as error:
            checkpoint.load(tmp_path / "m")
        one_line(error, shard, "damaged or incomplete")
    shard.unlink()
    with pytest.raises(FileNotFoundError) as error:
        checkpoint.load(tmp_path / "m")
    one_line(error, shard.name, "fetch the missing shard")
    (tmp_path / "m" / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="no model.safetensors.index.json"):
        checkpoint.load(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        checkpoint.load(tmp_path / "m")


def test_several_gguf_files_are_ambiguous(tmp_path):
    (tmp_path / "a.gguf").touch(), (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match="2 .gguf files: pass one of them"):
        checkpoint.load(tmp_path)


def test_pickles_are_refused_with_the_way_to_convert_them(folder):
    pickle = (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for source in (folder, pickle):
        with pytest.raises(ValueError, match="is a pickle.*save_pretrained") as error:
            checkpoint.load(source)
        one_line(error, pickle)


def test_quantised_tensors_are_refused(folder):
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((40, 32), np.int8)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="as I8, which is not supported"):
        checkpoint.load(folder)


def test_a_destination_that_is_not_empty_is_kept_unless_told_otherwise(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="is not empty"):
        checkpoint.save(tiny("qwen3"), folder)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "old").touch()
    checkpoint.save(tiny("qwen3"), folder, overwrite=True)
    assert checkpoint.load(folder).config.qk_norm and not (folder / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(ValueError, match="is a file"):
        checkpoint.save(tiny(), folder / "config.json", overwrite=True)


def test_a_checkpoint_may_be_saved_over_the_one_it_came_from(folder):
    loaded = checkpoint.load(folder)
    checkpoint.save(loaded, folder, overwrite=True)
    assert_same(checkpoint.load(folder), loaded)


def test_a_full_disk_leaves_nothing_behind(folder, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    for target in (tmp_path / "new", folder):
        with pytest.raises(OSError, match="cannot write .*No space left on device; nothing was left behind") as error:
            checkpoint.save(tiny(), target, overwrite=True)
        one_line(error)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert checkpoint.load(folder).config == tiny().config


def test_a_model_of_no_family_is_not_written(tmp_path):
    odd = tiny(qk_norm=True, qkv_bias=True, out_bias=False)
    with pytest.raises(ValueError, match="no Hugging Face family"):
        checkpoint.save(odd, tmp_path / "odd")
    assert not list(tmp_path.iterdir())
