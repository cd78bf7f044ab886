"""Rows into the cache through the kernels: every bit as the reference, and nothing else changes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from parallax.compile import gpu, hlo, targets, traffic, workers
from parallax.decoding import loop, make_decoder
from parallax.kernels import commit_gpu, commit_tpu
from parallax.kernels.commit import _with, commit, reference
from parallax.models import KV, Cache
from parallax.models import commit as commit_to_cache
from parallax.testing import Case

# layers, sequences, block rows, rows to copy, heads, head size, slots; where the rows go; type; one array per layer
CASES = {
    "a row in front": ((2, 1, 3, 1, 2, 8, 32), [0], "float32", False),
    "across a window": ((2, 3, 5, 4, 2, 8, 40), [7, 8, 30], "float32", True),
    "more than a window": ((1, 2, 12, 11, 1, 16, 48), [5, 16], "float32", False),
    "up to the last slot": ((1, 2, 4, 4, 2, 8, 29), [25, 3], "float32", True),
    "beyond the last slot": ((1, 2, 4, 4, 2, 8, 29), [28, 27], "float32", False),
    "half words": ((2, 2, 5, 5, 3, 8, 48), [15, 1], "bfloat16", True),
    "bytes": ((1, 2, 5, 3, 3, 8, 64), [30, 5], "int8", False),
}
KERNELS = {"tpu": commit_tpu.commit, "gpu": commit_gpu.commit}


def arguments(shape, length, dtype, seed=0):
    """Arguments of the reference, stacked, with NaN in all rows of the block that are not taken."""
    layers, batch, width, count, heads, size, slots = shape
    random = np.random.default_rng(seed)

    def draw(*shape):
        values = jnp.asarray(random.integers(-100, 100, shape) if dtype == "int8" else random.normal(size=shape))
        return values.astype(dtype)

    stored = tuple(draw(layers, batch, heads, slots, size) for _ in range(2))
    rows = random.integers(0, width, (batch, count))                              # repeated, in any order
    untaken = ~(np.arange(width) == rows[..., None]).any(1)                       # [B, T]
    new = tuple(tuple(draw(batch, width, heads, size) for _ in range(layers)) for _ in range(2))
    if dtype != "int8":
        new = jax.tree.map(lambda x: jnp.where(untaken[:, :, None, None], jnp.nan, x), new)
    return stored, new, jnp.asarray(rows, jnp.int32), jnp.asarray(length, jnp.int32)


def per_layer(stored):
    return tuple(map(tuple, stored))


def by_hand(stored, new, rows, length):
    """[2, L, B, Hkv, S, D]: slot by slot."""
    out = np.stack([np.asarray(side) for side in stored])
    count, slots = rows.shape[1], out.shape[4]
    for b, start in enumerate(np.clip(length, 0, slots - count)):
        for side, layer, i in np.ndindex(2, out.shape[1], count):
            out[side, layer, b, :, start + i] = new[side][layer][b, rows[b, i]].astype(out.dtype)
    return out


def bits(tree):
    """The caches [L, B, Hkv, S, D] of either form, as whole numbers."""
    out = np.stack([np.stack([np.asarray(layer) for layer in side]) for side in tree])
    return out.view(f"u{out.dtype.itemsize}")


def run(kernel, *operands, interpret=True):
    return jax.jit(partial(_with, partial(kernel, interpret=interpret)))(*operands)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("shape, length, dtype, split", CASES.values(), ids=CASES)
def test_the_cache_is_that_of_the_reference_to_the_bit(shape, length, dtype, split, kernel):
    stored, *rest = arguments(shape, length, dtype)
    wanted = by_hand(stored, *rest)
    stored = per_layer(stored) if split else stored
    plain, ours = jax.jit(reference)(stored, *rest), run(kernel, stored, *rest)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    np.testing.assert_array_equal(bits(plain), bits(wanted))
    np.testing.assert_array_equal(bits(ours), bits(wanted))
    assert (bits(ours) != bits(stored)).any()


_RANDOM = (1, 2, 9, 12, 2, 8, 33)
_random = {name: jax.jit(partial(_with, partial(kernel, interpret=True))) for name, kernel in KERNELS.items()}


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), length=st.tuples(*[st.integers(0, _RANDOM[-1])] * _RANDOM[1]))
def test_any_rows_go_behind_any_length(seed, length):
    operands = arguments(_RANDOM, length, "bfloat16", seed)
    wanted = bits(by_hand(*operands))
    for kernel in _random.values():
        np.testing.assert_array_equal(bits(kernel(*operands)), wanted)


SPLITS = {
    # bytes of VMEM -> fit heads; shape; heads in all of a call
    "layers": (8, (3, 1, 5, 5, 2, 8, 24), 128),
    "heads": (8, (1, 2, 5, 5, 20, 8, 24), 128),
    "arrays": (99, (3, 1, 5, 5, 2, 8, 24), 4),
    "rows": (1, (1, 2, 7, 9, 2, 8, 24), 128),
}


@pytest.mark.parametrize("fit, shape, heads", SPLITS.values(), ids=SPLITS)
def test_what_does_not_fit_at_once_goes_in_parts(fit, shape, heads, monkeypatch):
    monkeypatch.setattr(commit_tpu, "_BUDGET", fit * 2 * (2 * 8 + shape[2]) * 128 * 4)
    monkeypatch.setattr(commit_tpu, "_HEADS", heads)
    monkeypatch.setattr(commit_tpu, "_ROWS", 4)
    stored, *rest = arguments(shape, [6, 11][:shape[1]], "float32")
    whole, form = bits(by_hand(stored, *rest)), per_layer if heads == 4 else tuple
    parts = jax.make_jaxpr(partial(_with, partial(commit_tpu.commit, interpret=True)))(form(stored), *rest)
    [first, *_] = [eqn for eqn in parts.eqns if eqn.params.get("name") == "_call"]
    [call] = [eqn for eqn in first.params["jaxpr"].eqns if eqn.primitive.name == "pallas_call"]
    calls = sum(eqn.params.get("name") == "_call" for eqn in parts.eqns)
    assert calls > 1 or max(call.params["grid_mapping"].grid[:2]) > 1
    np.testing.assert_array_equal(bits(run(commit_tpu.commit, form(stored), *rest)), whole)


def test_blocks_that_were_never_filled_are_never_stored():
    """Under an interpreter that knows of them: memory is NaN until it is written, and a window is written when left."""
    operands = arguments((2, 3, 5, 11, 2, 8, 40), [0, 13, 29], "float32")
    ours = run(commit_tpu.commit, *operands, interpret=pltpu.InterpretParams())
    np.testing.assert_array_equal(bits(ours), bits(by_hand(*operands)))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_rows_past_the_count_may_name_no_row(kernel):
    stored, new, rows, length = arguments((1, 2, 5, 4, 2, 8, 24), [3, 9], "float32")
    wild = rows.at[:, 2:].set(jnp.asarray([[-7, 2**30], [5, -1]]))
    ours, wanted = bits(run(kernel, stored, new, wild, length)), bits(by_hand(stored, new, rows, length))
    for b, start in enumerate(length):
        ours[:, :, b, :, start + 2:start + 4] = wanted[:, :, b, :, start + 2:start + 4] = 0
    np.testing.assert_array_equal(ours, wanted)


def test_more_rows_than_slots_are_refused():
    (k, v), new, rows, length = arguments((2, 1, 5, 5, 2, 8, 4), [0], "int8")
    with pytest.raises(ValueError, match="cannot commit 5 rows to a cache of 4 slots"):
        commit_to_cache(Cache(k, v, length), KV(*new, None), rows, jnp.asarray([1]))


@pytest.mark.parametrize("size, slots, called", [(128, 256, True), (64, 256, False)])
def test_a_cache_with_its_slots_in_the_lanes_is_left_to_xla(size, slots, called):
    operands = arguments((1, 1, 2, 2, 1, size, slots), [3], "bfloat16")
    traced = jax.jit(partial(commit, kernels="pallas")).trace(*operands)
    assert ("tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()) == called


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_a_whole_decode_writes_the_same_tokens(scan):
    results = []
    for kernels in ("pallas", "xla"):
        case = Case.tiny(head_dim=128, num_kv_heads=1, num_heads=2, num_layers=1, scan_layers=scan, kernels=kernels)
        decoder = make_decoder("prompt_lookup", case.model, draft_length=3)
        results.append(loop.run(case.inputs(decoder), case.capacity))
    assert results[0].tokens.tolist() == results[1].tokens.tolist()
    assert results[0].info.accepted.sum() == results[1].info.accepted.sum()


def loop_on(name, dump):
    """Compiles ten steps that write to a donated cache: (whole copies of it, bytes of temporary memory) per form."""
    where = jax.sharding.NamedSharding(targets.mesh(targets.resolve(name)), jax.sharding.PartitionSpec())
    layers, batch, width, count, heads, size, slots = 4, 2, 8, 5, 8, 128, 1024

    def steps(stored, new, rows, length):
        def body(carry):
            stored, length = carry
            return commit(stored, new, rows, length, "pallas"), length + 1

        return jax.lax.while_loop(lambda carry: carry[1].max() < 10, body, (stored, length))

    def struct(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    found = []
    layer = (batch, heads, slots, size)
    new = ((struct((batch, width, heads, size)),) * layers,) * 2
    for stored in (struct((layers, *layer)), (struct(layer),) * layers):
        done = jax.jit(steps, donate_argnums=0).lower(
            (stored,) * 2, new, struct((batch, count), jnp.int32), struct((batch,), jnp.int32)).compile()
        program = hlo.parse(done.as_text())
        assert "commit" in traffic.kernels(program)
        found.append((traffic.rewritten(program, [layer, (layers, *layer), (1, *layer)]),
                      done.memory_analysis().temp_size_in_bytes))
    return found


@pytest.mark.aot
def test_a_donated_cache_is_written_in_place_on_tpus():
    with workers.Worker() as worker:
        for name in ("v4", "v5e", "v5p", "v6e"):
            for copies, temporary in worker.run(loop_on, name):
                assert copies == [] and temporary < 1 << 20, name


@pytest.mark.aot
@pytest.mark.parametrize("form", [tuple, per_layer], ids=["stacked", "per layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_kernel_compiles_for_gpus_without_spills(dtype, form):
    stored, *rest = jax.eval_shape(lambda: arguments((16, 2, 16, 5, 8, 128, 256), [0, 0], dtype))
    stored = stored if form is tuple else tuple(
        tuple(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for _ in range(x.shape[0])) for x in stored)
    found = gpu.compiled(partial(_with, commit_gpu.commit), stored, *rest)
    assert {kernel.arch for kernel in found} == {"sm_80", "sm_90"}
    for kernel in found:
        assert kernel.reason is None and kernel.spills == 0
