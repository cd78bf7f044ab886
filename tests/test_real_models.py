"""Real weights: SmolLM2-135M from the zoo, and stories260K where its files lie beside the repository."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax import zoo
from parallax.decoding import METHODS, Greedy, Sample, make_decoder
from parallax.generate import LanguageModel
from parallax.models import Block, Model, ModelConfig
from parallax.models.weights import assemble
from parallax.testing import Case
from parallax.testing.invariants import check_equals_plain_decoding

GOLDEN = pathlib.Path(__file__).parent / "golden" / "real"
STORIES = pathlib.Path(__file__).parents[2] / "shared" / "data" / "stories260K.bin"
PROMPTS = ["Why is the sky blue?", "Repeat this three times: the cat sat on the mat.",
           "Complete this function.\n\ndef add(a, b):\n    \"\"\"Returns the sum of two numbers.\"\"\"\n"]


@pytest.fixture(scope="module")
def smollm2():
    try:
        zoo.resolve("smollm2-135m")
    except ValueError as error:                       # no network: the zoo says so in one line
        pytest.skip(str(error))
    return LanguageModel.load("smollm2-135m", scan_layers=True)              # compiles in a second


def _logits(lm, tokens):
    rows = np.arange(tokens.shape[1])

    def run(params, tokens):
        block = Block(tokens, jnp.asarray(rows)[None], rows[:, None] >= rows)
        return lm.model.unembed(params, lm.model.forward(params, block, lm.model.new_cache(1, 0)).hidden)

    # As users run it, not with the suite's quick compiles: rounding differs.
    run = jax.jit(run, compiler_options={"xla_backend_optimization_level": 3})
    return np.asarray(run(lm.params["target"], jnp.asarray(tokens)))


def test_smollm2_has_the_recorded_logits(smollm2):
    with np.load(GOLDEN / "smollm2-135m.npz") as file:
        text, tokens, columns, logits = (file[name] for name in ("text", "tokens", "columns", "logits"))
    assert smollm2.encode(str(text), chat=True) == tokens[0].tolist()
    assert np.abs(_logits(smollm2, tokens)[..., columns] - logits).max() < 1e-4


def test_smollm2_has_the_logits_of_transformers(smollm2):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(zoo.resolve("smollm2-135m"), dtype=torch.float32).eval()
    tokens = np.asarray([smollm2.encode(PROMPTS[2], chat=True)])
    with torch.no_grad():
        single = model(torch.from_numpy(tokens)).logits.numpy()
        written = model.generate(torch.from_numpy(tokens), max_new_tokens=24, do_sample=False)[0, tokens.shape[1]:]
        exact = model.double()(torch.from_numpy(tokens)).logits.numpy()
    # Logits reach 39, where single precision of transformers itself is 9e-5 away from double precision.
    assert np.abs(_logits(smollm2, tokens) - exact).max() < 1e-4
    assert np.abs(_logits(smollm2, tokens) - single).max() < 2e-4
    ours = smollm2.generate([tokens[0].tolist()], method="prompt_lookup", max_new_tokens=24)
    assert list(ours.completions[0].ids) == written.tolist()


@pytest.mark.parametrize("settings", [{}, dict(temperature=0.8, top_p=0.95, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("names", [
    ("autoregressive", "prompt_lookup", "token_recycling"),
    tuple(name for name, method in METHODS.items() if not method.needs_draft)], ids=["core", "all"])
@pytest.mark.often("core-greedy")
def test_smollm2_writes_the_same_with_every_method(smollm2, names, settings):
    runs = {name: smollm2.generate(PROMPTS, method=name, chat=True, max_new_tokens=20, batch_size=3, **settings)
            for name in names}
    expected = [completion.ids for completion in runs["autoregressive"].completions]
    for name, run in runs.items():
        assert [completion.ids for completion in run.completions] == expected, name
    assert runs["prompt_lookup"].tokens_per_forward > 1.05


@functools.cache
def _stories():
    """(model, parameters) of karpathy/tinyllamas stories260K in the layout of llama2.c."""
    dim, hidden, layers, heads, shared, vocab, _ = np.fromfile(STORIES, np.int32, 7)
    floats = np.fromfile(STORIES, np.float32, offset=28)
    head = dim // heads
    config = ModelConfig(vocab_size=int(vocab), hidden_size=int(dim), num_layers=int(layers), num_heads=int(heads),
                         num_kv_heads=int(shared), head_dim=int(head), intermediate_size=int(hidden),
                         max_positions=512, scan_layers=True)
    shapes = [("embed_tokens", (vocab, dim))]
    shapes += [(f"layers.{{i}}.{name}", (layers, *shape)) for name, shape in (
        ("input_layernorm", (dim,)), ("self_attn.q_proj", (dim, dim)), ("self_attn.k_proj", (shared * head, dim)),
        ("self_attn.v_proj", (shared * head, dim)), ("self_attn.o_proj", (dim, dim)),
        ("post_attention_layernorm", (dim,)), ("mlp.gate_proj", (hidden, dim)), ("mlp.down_proj", (dim, hidden)),
        ("mlp.up_proj", (hidden, dim)))]
    tensors, at = {}, 0
    for name, shape in [*shapes, ("norm", (dim,))]:
        array = floats[at:at + np.prod(shape)].reshape(shape)
        at += array.size
        for i, part in enumerate(array) if "{i}" in name else [(None, array)]:
            if name.endswith(("q_proj", "k_proj")):            # llama2.c turns neighbouring pairs
                part = part.reshape(-1, head // 2, 2, dim).swapaxes(1, 2).reshape(part.shape)
            tensors[f"model.{name.format(i=i)}.weight"] = part
    params = assemble(config, set(tensors), tensors.__getitem__, np.float32)
    params["layers"] = jax.tree.map(np.stack, params["layers"], is_leaf=lambda leaf: isinstance(leaf, tuple))
    return Model(config), jax.tree.map(jnp.asarray, params)


@pytest.mark.skipif(not STORIES.is_file(), reason="stories260K.bin is not beside the repository")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sampler", [None, Sample(temperature=0.8)], ids=["greedy", "sampled"])
@pytest.mark.often("draft_model|greedy-prompt_lookup")
def test_stories_are_the_same_with_every_method_over_200_tokens(name, sampler):
    model, params = _stories()
    off = np.random.default_rng(0)                       # the draft model is the target, every weight a little off
    draft = jax.tree.map(lambda w: w * (1 + 0.05 * off.normal(size=w.shape)).astype(w.dtype), params)
    case = Case(model, {"target": params, "draft": draft}, ((1, 403, 407, 261, 378), (1,), (1, 403, 407)),
                new_tokens=200)
    options = {"draft": model} if METHODS[name].needs_draft else {}
    check_equals_plain_decoding(make_decoder(name, model, sampler=sampler or Greedy(), **options), case)
