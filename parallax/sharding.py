"""Where arrays live: one mesh, one table, the same code on one device and on many.

V vocabulary, E hidden size, F MLP width, L layers, B batch; O and I are a product's outputs and inputs.

The mesh has three axes. `data` copies the parameters and splits the batch; `fsdp` splits the batch and the parameters
(each device holds a slice of every weight, and XLA gathers them where they are used); `tensor` splits the products
themselves. Programs are jitted as for one device: XLA derives the communication from where their arguments live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

Tree = Any

AXES = ("data", "fsdp", "tensor")

# What a dimension means -> the mesh axis that splits it.
_RULES = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "mlp": "tensor"}

# The end of a leaf's path -> what its last dimensions mean. A dimension in front of them (L of stacked layers) is left
# whole, and so is every leaf that is not named here: norms, biases and counters are too small to be worth a gather.
_LEAVES = {
    "embed.tokens": ("vocab", "embed"),
    "embed.positions": (None, "embed"),
    "head": ("vocab", "embed"),
    "qkv.w": ("heads", "embed"),
    "out.w": ("embed", "heads"),
    "gate.w": ("mlp", "embed"),
    "up.w": ("mlp", "embed"),
    "down.w": ("embed", "mlp"),
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor`; the default is one device.

    Args:
      data, fsdp, tensor: devices along each axis; one of them may be -1, which takes all that are left.
      devices: which to use, all of them; by default the first that JAX finds, as many as the axes need.

    Raises:
      ValueError: the sizes are no numbers of devices, or do not fit the devices that there are.
    """
    sizes = (data, fsdp, tensor)
    asked = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes))
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise ValueError(f"expected a positive size for each mesh axis, or -1 for one of them, got {asked}")
    found = list(jax.devices() if devices is None else devices)
    fixed = math.prod(size for size in sizes if size != -1)
    shape = tuple(len(found) // fixed if size == -1 else size for size in sizes)
    used = math.prod(shape)
    if used != len(found) and not (devices is None and -1 not in sizes and used < len(found)):
        raise ValueError(f"a mesh of {asked} needs {'a multiple of ' if -1 in sizes else ''}{fixed} devices, "
                         f"there {'is' if len(found) == 1 else 'are'} {len(found)}")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=found[:used])


def params_sharding(tree: Tree, mesh: Mesh) -> Tree:
    """The sharding of every leaf of `tree`, which holds arrays or their shapes.

    Leaves are known by the end of their path, so this works for parameters as well as for what holds trees of their
    form, such as optimizer states and averages. A dimension that the mesh axis does not divide is left whole.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(_name(path), np.shape(leaf), mesh)), tree)


def abstract(tree: Tree, mesh: Mesh) -> Tree:
    """`tree` as shapes, types and shardings: what a checkpoint is restored onto. Its leaves may be shapes already."""
    return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
                        tree, params_sharding(tree, mesh))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of arrays [B, ...]: split along the batch."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def check_batch(batch_size: int, mesh: Mesh) -> None:
    """Raises ValueError unless every device gets the same number of sequences."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % parts:
        raise ValueError(f"batch_size={batch_size} must be a multiple of the mesh's data * fsdp = {parts}; the "
                         f"nearest is {max(round(batch_size / parts), 1) * parts}")


def _name(path: tuple) -> str:
    """`embed.tokens`, `layers.mlp.up.w`: keys joined by dots, without the indices of layers kept apart."""
    parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    return ".".join(part for part in parts if not part.isdigit())


def _spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    meanings = next((meanings for end, meanings in _LEAVES.items() if f".{name}".endswith(f".{end}")), ())
    if len(shape) < len(meanings):              # a summary of the leaf, as factored optimizers keep
        return PartitionSpec()
    axes = [_RULES.get(meaning) for meaning in (None,) * (len(shape) - len(meanings)) + meanings]
    return PartitionSpec(*(axis if axis and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, shape)))
