import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from parallax import sharding
from parallax.models.cache import Block
from parallax.models.transformer import Model
from parallax.testing.tiny import tiny_config
from parallax.train.checkpoints import Checkpoints, read_params

_MODEL = Model(tiny_config(vocab_size=64, num_layers=1, scan_layers=False, tie_embeddings=False))    # compiles fast
_TX = optax.adam(0.01)
_MESHES = {"1,1,1": (1, 1, 1), "2,2,2": (2, 2, 2), "1,8,1": (1, 8, 1), "1,1,8": (1, 1, 8), "8,1,1": (8, 1, 1)}


def init(key):
    params = _MODEL.init(key)
    return params, _TX.init(params)


def step(state, tokens):
    """Next-token training of B rows of T + 1 tokens."""
    params, opt_state = state

    def loss(params):
        rows, count = tokens.shape[0], tokens.shape[1] - 1
        block = Block(tokens[:, :-1], jnp.broadcast_to(jnp.arange(count), (rows, count)), jnp.tri(count, dtype=bool))
        logits = _MODEL.unembed(params, _MODEL.forward(params, block, _MODEL.new_cache(rows, 0)).hidden)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = _TX.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), (value, optax.tree.norm(grads))


def digest(tree):
    return [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(tree)]


def on_eight_devices(folder):
    """What the tests below look at, from a process with eight devices: JAX counts them once."""
    tokens = np.random.default_rng(0).integers(0, 64, (8, 7)).astype(np.int32)
    start = jax.jit(init)(jax.random.key(0))
    report = {"devices": len(jax.devices()), "sharded": {}, "curves": {}, "restored": {}}
    for name, sizes in _MESHES.items():
        mesh = sharding.make_mesh(*sizes)
        where = sharding.params_sharding(start, mesh)
        state = jax.device_put(start, where)
        train = jax.jit(step, out_shardings=(where, None))
        batch = jax.device_put(tokens, sharding.batch_sharding(mesh))
        curve = []
        for _ in range(3):
            state, measured = train(state, batch)
            curve += [float(value) for value in measured]
        report["curves"][name] = curve
        local = lambda leaf: list(leaf.addressable_shards[0].data.shape)                             # noqa: E731
        report["sharded"][name] = [local(batch), local(state[0]["head"]), local(state[1][0].mu["head"])]
        if name == "2,2,2":
            report["saved"] = digest(state)
            with Checkpoints(folder) as checkpoints:
                checkpoints.save(3, *state)
    for name, sizes in _MESHES.items():
        like = sharding.abstract(start, sharding.make_mesh(*sizes))
        with Checkpoints(folder) as checkpoints:
            found = checkpoints.restore(3, *like)[:2]
        placed = jax.tree.map(lambda leaf, wanted: leaf.sharding == wanted.sharding, tuple(found), like)
        report["restored"][name] = digest(found) if all(jax.tree.leaves(placed)) else "elsewhere"
    return report


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    root = pathlib.Path(__file__).parent.parent
    code = "import json, sys; from tests import test_sharding as t; print(json.dumps(t.on_eight_devices(sys.argv[1])))"
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code, str(folder)], cwd=root, capture_output=True,
                           text=True, timeout=300, env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"})
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["devices"] == 8
    return report | {"folder": folder}


def test_every_mesh_gives_the_curve_of_one_device(eight):
    for name in _MESHES:
        np.testing.assert_allclose(eight["curves"][name], eight["curves"]["1,1,1"], rtol=2e-4, err_msg=name)
    assert eight["curves"]["1,1,1"][4] < eight["curves"]["1,1,1"][0] - 0.1          # it trains


def test_arrays_are_really_spread(eight):
    assert eight["sharded"] == {
        "1,1,1": [[8, 7], [64, 32], [64, 32]],
        "2,2,2": [[2, 7], [32, 16], [32, 16]],
        "1,8,1": [[1, 7], [64, 4], [64, 4]],
        "1,1,8": [[8, 7], [8, 32], [8, 32]],
        "8,1,1": [[1, 7], [64, 32], [64, 32]],
    }


def test_a_checkpoint_of_one_mesh_restores_onto_any_other_to_the_bit(eight):
    assert eight["restored"] == dict.fromkeys(_MESHES, eight["saved"])


def test_a_checkpoint_of_eight_devices_restores_where_there_is_one(eight):
    like = sharding.abstract(jax.eval_shape(init, jax.random.key(0)), sharding.make_mesh(devices=jax.devices()[:1]))
    with Checkpoints(eight["folder"]) as checkpoints:
        found = checkpoints.restore(3, *like)[:2]
    assert digest(found) == eight["saved"]
    assert digest(read_params(eight["folder"])) == digest(found[0])


@functools.cache
def device_mesh(data, fsdp, tensor):
    """A mesh without devices behind it, to ask for specs."""
    return jax.sharding.AbstractMesh((data, fsdp, tensor), sharding.AXES)


def specs(tree, *sizes):
    found = sharding.params_sharding(tree, device_mesh(*sizes))
    return {jax.tree_util.keystr(path, simple=True, separator="."): where.spec
            for path, where in jax.tree_util.tree_leaves_with_path(found)}


def test_the_table_places_every_matrix_of_a_model():
    model = Model(tiny_config(vocab_size=64, tie_embeddings=False, qkv_bias=True, positions="learned"))
    found = specs(jax.eval_shape(model.init, jax.random.key(0)), 1, 2, 2)
    assert found["embed.tokens"] == found["head"] == P("tensor", "fsdp")
    assert found["embed.positions"] == P(None, "fsdp")
    for name in ("attention.qkv", "mlp.up", "mlp.gate"):
        assert found[f"layers.{name}.w"] == P(None, "tensor", "fsdp")
    for name in ("attention.out", "mlp.down"):
        assert found[f"layers.{name}.w"] == P(None, "fsdp", "tensor")
    whole = {name for name, spec in found.items() if not any(spec)}
    assert whole == {"final_norm.scale", "layers.attention_norm.scale", "layers.mlp_norm.scale",
                     "layers.attention.qkv.b"}


def test_layers_kept_apart_and_optimizer_states_follow_the_table():
    params = jax.eval_shape(Model(tiny_config(vocab_size=64, scan_layers=False)).init, jax.random.key(0))
    transform = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), 2)
    found = specs({"rest": jax.eval_shape(transform.init, params), "ema": params}, 1, 2, 2)
    matrices = [name for name in found if name.endswith(("up.w.0", "up.w.1"))]
    assert len(matrices) == 2 * 4                      # mu, nu, the gradients that are collected, and the average
    assert {found[name] for name in matrices} == {P("tensor", "fsdp")}
    assert found["rest.mini_step"] == P()


def test_summaries_of_a_leaf_that_factored_optimizers_keep_are_left_whole():
    shapes = {"v_row": {"up": {"w": jax.ShapeDtypeStruct((48,), "float32")}}}
    assert specs(shapes, 1, 2, 2) == {"v_row.up.w": P()}


def test_a_dimension_that_its_axis_does_not_divide_is_left_whole():
    shapes = {"head": jax.ShapeDtypeStruct((61, 32), "float32")}
    assert specs(shapes, 1, 2, 2) == {"head": P(None, "fsdp")}


def test_names_that_only_end_alike_are_not_in_the_table():
    shapes = {"overhead": jax.ShapeDtypeStruct((64, 32), "float32")}
    assert specs(shapes, 1, 2, 2) == {"overhead": P(None, None)}


def test_the_default_mesh_is_one_device():
    assert sharding.make_mesh().shape == {"data": 1, "fsdp": 1, "tensor": 1}


def test_minus_one_takes_the_devices_that_are_left():
    assert sharding.make_mesh(data=-1, devices=jax.devices()[:1]).shape["data"] == 1


@pytest.mark.parametrize("sizes, told", [
    (dict(fsdp=16), "a mesh of data=1, fsdp=16, tensor=1 needs 16 devices, there is 1"),
    (dict(data=-1, tensor=2), "a mesh of data=-1, fsdp=1, tensor=2 needs a multiple of 2 devices, there is 1"),
    (dict(data=0), "expected a positive size for each mesh axis, or -1 for one of them, got data=0, fsdp=1, tensor=1"),
    (dict(data=-1, fsdp=-1), "or -1 for one of them, got data=-1, fsdp=-1, tensor=1"),
])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes, told):
    with pytest.raises(ValueError) as error:
        sharding.make_mesh(**sizes, devices=jax.devices()[:1])
    assert told in str(error.value)


def test_a_batch_that_the_devices_cannot_share_is_refused():
    sharding.check_batch(12, device_mesh(2, 3, 8))
    with pytest.raises(ValueError, match=r"batch_size=8 must be .* data \* fsdp = 6; the nearest is 6"):
        sharding.check_batch(8, device_mesh(2, 3, 8))
    with pytest.raises(ValueError, match="the nearest is 6"):
        sharding.check_batch(1, device_mesh(2, 3, 8))
