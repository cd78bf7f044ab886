"""Kernels on several devices."""

import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from parallax import sharding
from parallax.kernels import attention, partition
from parallax.kernels import commit as commit_kernel
from parallax.models.cache import Cache

BATCH, HEADS, GROUP, ROWS, SIZE, SLOTS = 2, 4, 2, 3, 8, 16


def operands(heads):
    """Of attention: (q, k, v, ck, cv, length, visible, positions)."""
    random = np.random.default_rng(0)
    floats = [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in (
        (BATCH, heads, GROUP, ROWS, SIZE), *[(BATCH, heads, ROWS, SIZE)] * 2, *[(2, BATCH, heads, SLOTS, SIZE)] * 2)]
    length = jnp.asarray([5, 9], jnp.int32)
    return *floats, length, jnp.tril(jnp.ones((BATCH, ROWS, ROWS), bool)), length[:, None] + jnp.arange(ROWS)


def attend(q, k, v, ck, cv, length, visible, positions, *, kernels):
    return attention.attend(q, k, v, Cache(ck, cv, length), 1, visible=visible, positions=positions,
                            key_positions=positions, scale=0.3, softcap=None, window=None, kernels=kernels)


def commit(ck, cv, k, v, length, *, kernels):
    new = tuple((x.swapaxes(1, 2),) * 2 for x in (k, v))
    rows = jnp.broadcast_to(jnp.arange(ROWS), (BATCH, ROWS))
    return commit_kernel.commit((ck, cv), new, rows, length, kernels)


def on_four_devices():
    """{mesh and heads: [differences from one device, how the results are split, all-gathers]}."""
    report = {}
    for sizes, heads in (((1, 1, 4), 4), ((2, 1, 2), 4), ((1, 1, 4), 3)):
        mesh = sharding.make_mesh(*sizes)

        axes = {"b": "data", "h": "tensor" if heads % sizes[2] == 0 else None}
        given = operands(heads)
        placed = [jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*map(axes.get, layout))))
                  for leaf, layout in zip(given, ("bh", "bh", "bh", "-bh", "-bh", "b", "b", "b"))]
        found = {}
        for name, function, of in (("attend", attend, range(8)), ("commit", commit, (3, 4, 1, 2, 5))):
            run = jax.jit(function, static_argnames="kernels")
            wanted = run(*(given[i] for i in of), kernels="xla")
            with jax.set_mesh(mesh):
                lowered = run.lower(*(placed[i] for i in of), kernels="pallas").compile()
                result = lowered(*(placed[i] for i in of))
            error = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(wanted)))
            shard = jax.tree.leaves(result)[0].addressable_shards[0].data.shape
            found[name] = [error, list(shard), len(re.findall(r" all-gather\(", lowered.as_text()))]
        report[f"{sizes} {heads}"] = found
    return report


@pytest.fixture(scope="module")
def four():
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    root = pathlib.Path(__file__).parent.parent.parent
    code = "import json; from tests.compile import test_partition as t; print(json.dumps(t.on_four_devices()))"
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300,
                           env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"})
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_results_are_those_of_one_device(four):
    for mesh, found in four.items():
        for name, (error, _, _) in found.items():
            assert error < 1e-5, (mesh, name)


def test_each_device_has_its_own_sequences_and_heads(four):
    shards = {mesh: [found["attend"][1][:2], found["commit"][1][1:3]] for mesh, found in four.items()}
    assert shards == {"(1, 1, 4) 4": [[2, 1], [2, 1]], "(2, 1, 2) 4": [[1, 2], [1, 2]],
                      "(1, 1, 4) 3": [[2, 3], [2, 3]]}                       # four do not divide three


def test_no_cache_is_gathered(four):
    assert {name: count for found in four.values() for name, (_, _, count) in found.items()} == {
        "attend": 0, "commit": 0}


def test_without_a_mesh_a_kernel_is_called_as_it_is():
    def kernel(x, y):
        assert isinstance(y, str)                            # nothing but arrays would go through a `shard_map`
        return x

    assert partition.split(kernel, ("b", ""), "b")(3, "text") == 3
