"""Compiling Triton kernels for GPUs that are not there."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from parallax.compile import gpu


def product(size, warps=4, stages=2):
    """A jitted function whose kernel multiplies x [size, size] with itself, and its operand."""
    def kernel(x, out):
        out[...] = jnp.dot(x[...], x[...], preferred_element_type=jnp.float32)

    def call(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32), grid=(3,),
                              in_specs=[pl.BlockSpec((size, size), lambda i: (0, 0))],
                              out_specs=pl.BlockSpec((size, size), lambda i: (0, 0)), name="product",
                              compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages))(x)

    return jax.jit(call), jax.ShapeDtypeStruct((size, size), jnp.bfloat16)


def test_sources_are_the_kernels_of_the_program_with_their_options():
    f, x = product(64, warps=8, stages=4)
    first, second = gpu.sources(lambda x: f(x) + f(2 * x), x)
    assert first == second
    assert (first.name, first.grid, first.num_warps, first.num_stages) == ("product", (3, 1, 1), 8, 4)
    assert "tt.func" in first.ir and "tt.dot" in first.ir


def test_a_program_without_kernels_has_no_sources():
    assert gpu.sources(lambda x: x + 1, jnp.ones(3)) == []


def test_without_triton_one_line_says_what_to_install():
    f, x = product(64)
    [source] = gpu.sources(f, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        with pytest.raises(ValueError, match=r'pip install "parallax-decoding\[gpu-aot\]"$'):
            gpu.compile_one(source, "sm_80")


@pytest.mark.aot
def test_a_kernel_compiles_for_each_architecture():
    f, x = product(64)
    found = gpu.compiled(lambda x: f(x) + f(2 * x), x)
    assert [(kernel.name, kernel.arch, kernel.calls) for kernel in found] == [
        ("product", "sm_80", 2), ("product", "sm_90", 2)]
    for kernel in found:
        assert kernel.reason is None and kernel.spills == 0 and kernel.registers > 16 and kernel.shared > 0


@pytest.mark.aot
def test_too_few_registers_are_seen_as_spills():
    f, x = product(128)
    sm_80, _ = gpu.compiled(f, x)
    assert sm_80.spills > 0 and sm_80.registers >= 250


@pytest.mark.aot
def test_too_much_shared_memory_is_a_reason(monkeypatch):
    monkeypatch.setitem(gpu.SHARED_LIMIT, "sm_80", 1024)
    sm_80, sm_90 = gpu.compiled(*product(64))
    assert sm_80.reason.endswith("bytes of shared memory, a thread block has 1024") and sm_90.reason is None


@pytest.mark.aot
def test_the_compilers_own_words_are_the_reason_and_not_on_stderr(capfd):
    f, x = product(64)
    [source] = gpu.sources(f, x)
    broken = source._replace(ir=source.ir.replace("tt.return", "tt.nothing"))
    assert "tt.nothing" in gpu.compile_one(broken, "sm_90").reason
    assert capfd.readouterr().err == ""
