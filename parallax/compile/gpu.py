"""Compiles Pallas-Triton kernels for NVIDIA GPUs that are not there.

JAX lowers such a kernel to a custom call that carries the kernel as Triton IR. The `triton` package compiles that IR
to a cubin on any machine, and the cubin states what the kernel takes on a streaming multiprocessor (SM).
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

# Shared memory that one thread block may ask for, bytes (CUDA programming guide, technical specifications).
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}
_CALL = "__gpu$xla.gpu.triton"


class Source(NamedTuple):
    """A kernel as JAX lowers it: Triton IR as text, the grid of thread blocks, and the options of its compilation."""

    name: str
    ir: str
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int


class Compiled(NamedTuple):
    """A kernel on one architecture.

    Attributes:
      calls: how often the program calls it, a loop's body counted once.
      shared: bytes of shared memory of one thread block.
      registers: of one thread.
      spills: bytes that one thread keeps in local memory because its registers do not suffice.
      reason: why it does not compile, or None; then shared, registers and spills are 0.
    """

    name: str
    arch: str
    calls: int
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    shared: int = 0
    registers: int = 0
    spills: int = 0
    reason: str | None = None


def compiled(f: Callable, *operands: Any, archs: Sequence[str] = tuple(SHARED_LIMIT)) -> list[Compiled]:
    """Compiles every Triton kernel of `f(*operands)`, once per architecture.

    Args:
      f: a function of arrays, jitted or not, that calls Pallas kernels with Triton parameters.
      operands: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them.
      archs: out of `SHARED_LIMIT`.

    Raises:
      ValueError: there is no `triton` package.
    """
    found = Counter(sources(f, *operands))
    return [compile_one(source, arch)._replace(calls=calls) for source, calls in found.items() for arch in archs]


def sources(f: Callable, *operands: Any) -> list[Source]:
    """The Triton kernels of `f(*operands)`, lowered for CUDA, in the order of the program; needs no `triton`."""
    lowered = (f if hasattr(f, "trace") else jax.jit(f)).trace(*operands).lower(lowering_platforms=("cuda",))
    functions = {function.name.value: function for function in lowered.compiler_ir("stablehlo").body}
    return [_source(call) for call in _calls(functions["main"], functions)]


def compile_one(source: Source, arch: str) -> Compiled:
    """Compiles one kernel. Raises ValueError without the `triton` package."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ImportError:
        raise ValueError('compiling for a GPU needs triton: pip install "parallax-decoding[gpu-aot]"') from None
    outcome = Compiled(source.name, arch, 1, source.grid, source.num_warps, source.num_stages)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    # XLA fuses multiplications with additions too; triton means to stop doing so by default.
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": True}
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        path, said = Path(folder, "kernel.ttir"), Path(folder, "stderr")
        path.write_text(source.ir)
        try:
            with _stderr_in(said):
                kernel = triton.compile(str(path), target=target, options=options)
        except Exception as error:  # triton and MLIR raise all kinds
            return outcome._replace(reason=_first_error(said.read_text()) or f"{type(error).__name__}: {error}")
        Path(folder, "kernel.cubin").write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", f"{folder}/kernel.cubin"],
                               check=True, capture_output=True, text=True).stdout
    shared, limit = kernel.metadata.shared, SHARED_LIMIT[arch]
    if shared > limit:
        return outcome._replace(reason=f"it needs {shared} bytes of shared memory, a thread block has {limit}")
    registers, stack = (int(re.search(rf"\b{field}:(\d+)", usage)[1]) for field in ("REG", "STACK"))
    return outcome._replace(shared=shared, registers=registers, spills=stack)


def _calls(operation, functions: dict[str, Any]) -> Iterator[Any]:
    """The custom calls of kernels in an operation and in the functions that it calls, each as often as it is called."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                attributes = inner.operation.attributes
                if inner.operation.name == "func.call":
                    yield from _calls(functions[attributes["callee"].value], functions)
                elif inner.operation.name == "stablehlo.custom_call" and attributes["call_target_name"].value == _CALL:
                    yield inner.operation
                else:
                    yield from _calls(inner.operation, functions)


def _source(call) -> Source:
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    config = call.attributes["mhlo.backend_config"]
    # The dialect needs a context of its own: JAX's knows nothing of Triton.
    with ir.Context() as context, ir.Location.unknown():
        dialect.register_dialect(context)
        context.load_all_available_dialects()
        text = ir.Module.parse(config["ir"].value_bytes).operation.get_asm()
    number = {key: config[key].value for key in ("grid_x", "grid_y", "grid_z", "num_warps", "num_stages")}
    return Source(config["name"].value, text, (number["grid_x"], number["grid_y"], number["grid_z"]),
                  number["num_warps"], number["num_stages"])


@contextlib.contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """MLIR prints its reasons to the process's stderr, past Python's."""
    sys.stderr.flush()
    before = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(before, 2)
            os.close(before)


def _first_error(text: str) -> str | None:
    found = re.search(r"error: (.*)", text)
    return found and found[1]
