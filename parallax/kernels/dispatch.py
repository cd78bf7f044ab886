"""Which version of a kernel runs: one decision for all kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import jax
from jax import lax

from parallax.kernels import partition

Kernels = Literal["auto", "xla", "pallas"]


def dispatch(choice: Kernels, *operands: Any, xla: Callable, tpu: Callable, gpu: Callable,
             layouts: tuple[str, ...] | None = None, out: Any = "") -> Any:
    """Calls one of three functions of the same arrays, by what the program is compiled for.

    Args:
      choice: `auto`: the Pallas kernel on TPU and on CUDA, XLA elsewhere. `xla`: XLA everywhere. `pallas`: the kernel
        everywhere, which a CPU interprets: slow, for tests.
      operands: pytrees of arrays.
      xla, tpu, gpu: the versions; the latter two take `interpret` as a keyword.
      layouts, out: how devices share the operands and the result, see `parallax.kernels.partition`. Without them each
        device computes the whole.
    """
    # A host that has nothing but CPUs need not trace kernels: tracing them for every layer takes seconds.
    if choice == "xla" or choice == "auto" and jax.default_backend() == "cpu":
        return xla(*operands)
    default = xla if choice == "auto" else functools.partial(tpu, interpret=True)
    versions = functools.partial(lax.platform_dependent, default=default, tpu=tpu, cuda=gpu)
    return partition.split(versions, layouts or ("",) * len(operands), out)(*operands)


def late(module: str, function: str) -> Callable:
    """A function of a module of this package that is imported when it is called: Pallas takes a quarter of a second."""
    def call(*operands, **options):
        return getattr(importlib.import_module(f"parallax.kernels.{module}"), function)(*operands, **options)

    return call
