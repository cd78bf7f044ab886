"""Fixtures that several test modules share."""

import gc
import os
import pathlib
import re

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from parallax import checkpoint
from parallax.checkpoint import Checkpoint
from parallax.generate import LanguageModel
from parallax.models.config import ModelConfig
from parallax.models.transformer import Model
from parallax.tokenizer import FileTokenizer

# Compiling is most of what the tests do, and they compare numbers, not times. Read when JAX first uses a device.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of a test marked `often(pattern)`, those whose id the pattern is not found in are slow."""
    for item in items:
        for mark in item.iter_markers("often"):
            if not re.search(mark.args[0], item.callspec.id):
                item.add_marker("slow")


@pytest.fixture(autouse=True, scope="module")
def programs_are_freed():
    """Programs of one module are of no use to the next."""
    yield
    _free()


@pytest.fixture(autouse=True)
def maps_are_few():
    """Each compiled program maps pages of its own. A process may have 65530 such maps, and XLA dies at one more."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40000:
        _free()


def _free():
    jax.clear_caches()
    gc.collect()


_TEXT = "the quick brown fox jumps over the lazy dog and the small cat sat on the mat while it rained in the town"
_CHAT = ("{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
         "{% if add_generation_prompt %}[assistant] {% endif %}")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A Hugging Face folder: a random Llama of two layers, whose text wanders, with a byte-level BPE of 300 tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator([_TEXT], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    tokenizer = FileTokenizer(backend, bos="<s>", eos=("</s>",), chat_template=_CHAT)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2,
                         head_dim=8, intermediate_size=64, max_positions=256, tie_embeddings=False)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(0, 0.5, leaf.shape).astype(leaf.dtype),
                          jax.eval_shape(Model(config).init, jax.random.key(0)))
    for i in range(config.vocab_size):
        if not tokenizer.decode([i]).isascii() or not tokenizer.decode([i]).isprintable():
            params["head"][i] = 0
    folder = tmp_path_factory.mktemp("tiny") / "model"
    checkpoint.save(Checkpoint(config, params, tokenizer, tokenizer.eos_ids), folder)
    return folder


@pytest.fixture(scope="session")
def tiny_lm(tiny_folder):
    return LanguageModel.load(str(tiny_folder))
