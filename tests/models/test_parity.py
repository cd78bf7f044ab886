"""The forward against `transformers`: recorded logits always, the library itself where it is installed."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parallax.kernels.attention import buckets
from parallax.models import weights
from parallax.models.cache import Block, commit, truncate
from parallax.models.families import from_hf, to_hf
from parallax.models.transformer import Model, split_layers, stack_layers
from tests.golden import weights as golden_weights

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
ROWS = 24
TOLERANCE = 1e-4

# One program per model: every test runs blocks of ROWS rows over CAPACITY slots, and rows that it does not need are
# padding that no other row sees.
CAPACITY = 2 * ROWS

# These models compile much longer than they run.
jit = functools.partial(jax.jit, compiler_options=(
    {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None))


@pytest.fixture(params=[False, True], ids=["unrolled", "scanned"])
def scan(request):
    return request.param


@functools.cache
def hf_config(case):
    return json.loads((GOLDEN / f"{case}.json").read_text())


@functools.cache
def golden(case):
    with np.load(GOLDEN / f"{case}.npz") as file:
        return file["tokens"], file["logits"]


@functools.cache
def model_of(case, scan):
    """The model with every layer tapped."""
    config = from_hf(hf_config(case))
    return Model(config.replace(scan_layers=scan, taps=tuple(range(config.num_layers))))


@functools.cache
def params_of(case, scan, seed=0):
    config = model_of(case, scan).config
    params = weights.assemble(config, set(tensor_shapes(case)), lambda name: tensor_of(case, name, seed), np.float32)
    if scan:
        params["layers"] = jax.tree.map(np.stack, params["layers"], is_leaf=lambda leaf: isinstance(leaf, tuple))
    return params


@functools.cache
def tensor_shapes(case):
    """The shape of every Hugging Face tensor of the case."""
    config = from_hf(hf_config(case))
    layers = jax.eval_shape(Model(config).init, jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), layers)
    return {name: tensor.shape for name, tensor in weights.disassemble(config, zeros)}


def tensor_of(case, name, seed):
    norm = 0.0 if case.startswith("gemma") else 1.0
    return golden_weights.tensor(name, tensor_shapes(case)[name], norm=norm, seed=seed)


@functools.partial(jit, static_argnums=0)
def step(model, params, block, cache, rows, count):
    """Logits of the block, its output, and the cache behind `count` of its `rows`."""
    output = model.forward(params, block, cache)
    return model.unembed(params, output.hidden), output, commit(cache, output.kv, rows, count)


@functools.partial(jit, static_argnums=0)
def step_behind(model, params, block, cache, context):
    return model.unembed(params, model.forward(params, block, cache, context=context).hidden)


@functools.cache
def empty_cache(model, batch):
    return model.new_cache(batch, CAPACITY)


def run(model, params, tokens, cache=None, *, depth=None, visible=None, count=0):
    """`step` on padded rows: logits of the given rows, the output, and the cache behind `count` of them."""
    batch, rows = tokens.shape
    cache = empty_cache(model, batch) if cache is None else cache
    depth = np.arange(rows) if depth is None else depth
    visible = np.tril(np.ones((rows, rows), bool)) if visible is None else visible
    seen = np.broadcast_to(np.eye(ROWS, dtype=bool), (batch, ROWS, ROWS)).copy()
    seen[:, :rows, :rows] = visible
    positions = np.asarray(cache.length)[:, None] + np.pad(depth, (0, ROWS - rows))
    block = Block(np.pad(tokens, ((0, 0), (0, ROWS - rows))), positions.astype(np.int32), seen)
    logits, output, cache = step(model, params, block, cache, np.tile(np.arange(ROWS, dtype=np.int32), (batch, 1)),
                                 np.broadcast_to(np.asarray(count, np.int32), (batch,)))
    return np.asarray(logits)[:, :rows], output, cache


def close(actual, expected, tolerance=TOLERANCE):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_the_recorded_ones(case, scan):
    tokens, expected = golden(case)
    actual, _, _ = run(model_of(case, scan), params_of(case, scan), tokens)
    close(actual, expected)


@pytest.mark.parametrize("case", CASES)
def test_logits_behind_a_committed_prefix_equal_the_recorded_ones(case, scan):
    tokens, expected = golden(case)
    model, params = model_of(case, scan), params_of(case, scan)
    lengths = np.array([9, 14])                              # sequences of a batch advance by their own counts
    _, _, cache = run(model, params, tokens[:, :14], count=lengths)
    rest = np.stack([row[n:n + 10] for row, n in zip(tokens, lengths)])
    actual, _, cache = run(model, params, rest, cache, count=3)
    close(actual, np.stack([row[n:n + 10] for row, n in zip(expected, lengths)]))
    actual, _, _ = run(model, params, rest[:, 3:], cache)
    close(actual, np.stack([row[n + 3:n + 10] for row, n in zip(expected, lengths)]))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_blocks_of_few_rows_equal_wide_ones(rows):
    model, params = model_of("llama_linear", False), params_of("llama_linear", False)
    tokens, expected = golden("llama_linear")
    _, _, cache = run(model, params, tokens[:, :12], count=12)
    seen = slice(12, 12 + rows)
    block = Block(tokens[:, seen], np.tile(np.arange(12, 12 + rows, dtype=np.int32), (2, 1)), np.tri(rows, dtype=bool))
    logits, _, _ = step(model, params, block, cache, np.zeros((2, 1), np.int32), np.ones(2, np.int32))
    close(logits, expected[:, seen])


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, scan):
    make = live()
    seed = 7
    tokens = golden_weights.tokens(case, hf_config(case)["vocab_size"], seed=seed)
    actual, _, _ = run(model_of(case, scan), params_of(case, scan, seed), tokens)
    close(actual, make.logits(torch_model(case, seed), tokens))


@pytest.mark.parametrize("case", CASES)
def test_taps_are_the_hidden_states_of_transformers(case, scan):
    make = live()
    states = []
    model = torch_model(case, 0)
    body = model.transformer.h if case == "gpt2" else model.model.layers

    def record(layer, inputs, out):
        states.append((out[0] if isinstance(out, tuple) else out).numpy())

    hooks = [layer.register_forward_hook(record) for layer in body]
    tokens, _ = golden(case)
    make.logits(model, tokens)
    for hook in hooks:
        hook.remove()
    _, output, _ = run(model_of(case, scan), params_of(case, scan), tokens)
    expected = np.stack(states, 2)
    close(output.taps, expected, TOLERANCE * max(1, np.abs(expected).max()))
    close(output.hidden, expected[:, :, -1], TOLERANCE * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_the_exported_config_as_the_same_model(case):
    live()
    import transformers
    config = from_hf(hf_config(case))
    read = transformers.AutoConfig.for_model(**to_hf(config))
    assert from_hf(json.loads(read.to_json_string(use_diff=False))) == config


@pytest.mark.parametrize("case", CASES)
def test_config_survives_the_way_to_hugging_face_and_back(case):
    config = from_hf(hf_config(case))
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize("case", CASES)
def test_tensors_survive_the_way_to_the_tree_and_back(case, scan):
    written = dict(weights.disassemble(model_of(case, scan).config, params_of(case, scan)))
    assert written.keys() == tensor_shapes(case).keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(tensor, tensor_of(case, name, 0), err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_random_parameters_have_the_structure_of_loaded_ones(case, scan):
    made = jax.eval_shape(model_of(case, scan).init, jax.random.key(0))
    assert made == jax.eval_shape(lambda: params_of(case, scan))


def test_stacked_and_split_layers_are_the_same_parameters(scan):
    params = params_of("qwen2_window", scan)
    other = split_layers(params) if scan else stack_layers(params)
    tokens, expected = golden("qwen2_window")
    close(run(model_of("qwen2_window", scan), other, tokens)[0], expected)


@pytest.mark.parametrize("case", ["llama_gqa", "mistral", "gemma2", "gemma3_text", "gpt2"])
def test_a_node_of_a_tree_sees_exactly_its_root_path(case, scan):
    model, params = model_of(case, scan), params_of(case, scan)
    prefix, _ = golden(case)
    _, _, cache = run(model, params, prefix[:, :8], count=np.array([8, 6]))
    rng = np.random.default_rng(0)
    parents = [-1 if node < 2 else int(rng.integers(max(0, node - 4), node)) for node in range(ROWS)]
    paths = [[0], [1]]
    for node in range(2, ROWS):
        paths.append([*paths[parents[node]], node])
    assert max(map(len, paths)) > 8                         # some ancestors lie behind the sliding windows of 7
    visible = np.zeros((ROWS, ROWS), bool)
    for node, path in enumerate(paths):
        visible[node, path] = True
    nodes = rng.integers(0, model.config.vocab_size, (2, ROWS)).astype(np.int32)
    depth = np.array([len(path) - 1 for path in paths])
    tree, _, _ = run(model, params, nodes, cache, depth=depth, visible=visible)
    for leaf in set(range(ROWS)) - set(parents):
        path = paths[leaf]
        alone, _, _ = run(model, params, nodes[:, path], cache)
        close(tree[:, path], alone, 1e-5)


@pytest.mark.parametrize("case", ["llama_gqa", "mistral", "gemma2", "gemma3_text"])
def test_context_equals_committing_it(case, scan):
    model, params = model_of(case, scan), params_of(case, scan)
    tokens, expected = golden(case)
    _, _, cache = run(model, params, tokens[:, :4], count=4)
    _, output, committed = run(model, params, tokens[:, 4:14], cache, count=10)
    after, _, _ = run(model, params, tokens[:, 14:], committed)
    # The rows behind the tenth are padding, which the block does not see.
    block = Block(jnp.asarray(tokens[:, 14:]), jnp.tile(jnp.arange(14, ROWS), (2, 1)),
                  jnp.asarray(np.concatenate([np.arange(ROWS) < np.full((10, 1), 10), np.tri(10, dtype=bool)], 1)))
    actual = step_behind(model, params, block, cache, output.kv)
    close(actual, after, 1e-5)
    close(actual, expected[:, 14:])


@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
def test_the_first_layers_alone_give_the_tap_behind_them(case, scan):
    model, params = model_of(case, scan), params_of(case, scan)
    tokens, _ = golden(case)
    exit_at = model.config.num_layers - 1
    _, output, cache = run(model, params, tokens[:, :10], count=10)
    _, whole, _ = run(model, params, tokens[:, 10:], cache)
    block = Block(jnp.asarray(tokens[:, 10:]), jnp.tile(jnp.arange(10, ROWS), (2, 1)), jnp.tri(14, dtype=bool))
    forward = jit(functools.partial(model.forward, layers=(0, exit_at)))
    part = forward(params, block, cache)
    taps = np.asarray(whole.taps)[:, :14]
    close(part.hidden, taps[:, :, exit_at - 1], 1e-5)
    close(part.taps, taps[:, :, :exit_at], 1e-5)
    assert len(part.kv.k) == exit_at


def test_taps_come_in_the_order_they_were_asked_for(scan):
    model, params = model_of("llama_gqa", scan), params_of("llama_gqa", scan)
    tokens, _ = golden("llama_gqa")
    _, whole, _ = run(model, params, tokens)
    _, asked, _ = run(Model(model.config.replace(taps=(2, 0))), params, tokens)
    close(asked.taps, np.asarray(whole.taps)[:, :, [2, 0]], 1e-5)


def test_rows_may_take_embeddings_in_place_of_tokens(scan):
    model, params = model_of("gemma2", scan), params_of("gemma2", scan)
    tokens, expected = golden("gemma2")
    soft = np.arange(ROWS) % 3 == 0
    block = Block(jnp.where(soft, 0, tokens), jnp.tile(jnp.arange(ROWS), (2, 1)), jnp.tri(ROWS, dtype=bool),
                  model.embed(params, tokens), jnp.tile(jnp.asarray(soft), (2, 1)))
    hidden = jit(lambda params: model.forward(params, block, model.new_cache(2, 0)).hidden)(params)
    close(model.unembed(params, hidden), expected)


def test_truncated_positions_leave_no_trace(scan):
    model, params = model_of("mistral", scan), params_of("mistral", scan)
    tokens, expected = golden("mistral")
    _, _, cache = run(model, params, np.concatenate([tokens[:, :10], tokens[:, :6]], 1), count=16)
    actual, _, _ = run(model, params, tokens[:, 10:], truncate(cache, jnp.array([10, 10])))
    close(actual, expected[:, 10:])


def test_prefixes_longer_than_the_smallest_bucket_are_read_whole(scan):
    """160 positions committed in blocks over 200 slots, of full and sliding layers, against one block over no cache."""
    model, params = model_of("qwen2_window", scan), params_of("qwen2_window", scan)
    tokens = golden_weights.tokens("long", model.config.vocab_size, shape=(2, 160))
    block = Block(jnp.asarray(tokens), jnp.tile(jnp.arange(160), (2, 1)), jnp.tri(160, dtype=bool))
    whole = jit(lambda params: model.forward(params, block, model.new_cache(2, 0)).hidden)(params)
    cache = model.new_cache(2, 200)
    assert len(buckets(cache.capacity)) == 2
    for start in range(0, 160, 20):
        _, output, cache = run(model, params, tokens[:, start:start + 20], cache, count=20)
        close(np.asarray(output.hidden)[:, :20], np.asarray(whole)[:, start:start + 20])


@pytest.mark.parametrize(("case", "scan"), [
    ("llama_gqa", True), ("gemma2", False), ("gemma3_text", True), ("gpt2", False)])
def test_bfloat16_is_close_to_float32(case, scan):
    model = Model(model_of(case, scan).config.replace(dtype="bfloat16"))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params_of(case, scan))
    tokens, expected = golden(case)
    logits, output, cache = run(model, params, tokens)
    assert logits.dtype == np.float32
    assert {leaf.dtype for leaf in (output.hidden, *output.kv.k, *jax.tree.leaves(cache.k))} == {jnp.dtype("bfloat16")}
    error = np.sqrt(np.square(logits - expected).mean() / np.square(expected - expected.mean()).mean())
    assert error < 0.05


@functools.cache
def live():
    """The golden maker, where `transformers` is there to make anything."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    from tests.golden import make
    return make


@functools.cache
def torch_model(case, seed):
    return live().build(hf_config(case), seed)
