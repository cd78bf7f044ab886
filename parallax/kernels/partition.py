"""Kernels on several devices: each device runs them on its own sequences and heads.

XLA splits its own operations by where their operands live, but it cannot look into a kernel. So where a mesh is in use
(`jax.set_mesh`), a kernel runs under `jax.shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

# A letter of a layout -> the mesh axes that split such a dimension, those of `parallax.sharding`.
_AXES = {"b": ("data", "fsdp"), "h": ("tensor",)}


def split(kernel: Callable, layouts: tuple[Any, ...], out: Any) -> Callable:
    """`kernel` such that each device of the mesh in use runs it on its part of the operands.

    Without a mesh, or inside a `shard_map`, it is the kernel itself. A letter whose axes do not divide all dimensions
    that it names is not split: then every device computes the whole of them.

    Args:
      kernel: a function of pytrees of arrays.
      layouts: for each operand what its first dimensions are, `b` sequences, `h` key/value heads, anything else is
        kept whole: "-bh" for a cache [L, B, Hkv, S, D]. One text holds for all arrays of an operand.
      out: the same of the result.
    """
    def call(*operands):
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.size == 1 or mesh.manual_axes:
            return kernel(*operands)
        axes = {letter: tuple(axis for axis in names if axis in mesh.shape) for letter, names in _AXES.items()}
        parts = {letter: math.prod(mesh.shape[axis] for axis in names) for letter, names in axes.items()}
        sizes = [(letter, size) for layout, operand in zip(layouts, operands, strict=True)
                 for leaf in jax.tree.leaves(operand) for letter, size in zip(layout, np.shape(leaf))]
        whole = {letter for letter, size in sizes if letter in parts and size % parts[letter]}

        def spec(layout):
            return PartitionSpec(*(axes[letter] if letter in axes and letter not in whole else None
                                   for letter in layout))

        return jax.shard_map(kernel, in_specs=tuple(map(spec, layouts)), out_specs=jax.tree.map(spec, out),
                             check_vma=False)(*operands)

    return call
