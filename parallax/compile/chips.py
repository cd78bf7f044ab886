"""What accelerators can do, as published, and the least time that work takes on them."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One chip, as its maker describes it.

    Attributes:
      kind: `tpu` or `gpu`.
      hbm_gb, hbm_gbs: memory, and its bandwidth in GB/s.
      tflops: of the matrix units in bfloat16, dense, 10^12 operations a second.
      clock_ghz: at which `tflops` is the matrix units' full width; schedules are counted in its cycles.
      link_gbs: of one link to a neighbouring chip, in one direction, GB/s; 0 where no program is compiled for several.
      devices: how many of JAX's devices the chip is.
      cores: of one such device. They share a kernel's parallel grid axes.
      topology: the smallest that libtpu describes; empty for a GPU.
      source: of the numbers.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    hbm_gb: float
    hbm_gbs: float
    tflops: float
    clock_ghz: float
    link_gbs: float = 0.0
    devices: int = 1
    cores: int = 1
    topology: tuple[int, ...] = ()
    source: str


_GOOGLE = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
CHIPS: dict[str, Chip] = {chip.name: chip for chip in (
    Chip(name="v4", kind="tpu", hbm_gb=32, hbm_gbs=1200, tflops=275, clock_ghz=1.05, link_gbs=50, cores=2,
         topology=(2, 2, 1), source=_GOOGLE + "v4"),
    Chip(name="v5e", kind="tpu", hbm_gb=16, hbm_gbs=819, tflops=197, clock_ghz=1.5, link_gbs=50,
         topology=(2, 2), source=_GOOGLE + "v5e"),
    Chip(name="v5p", kind="tpu", hbm_gb=95, hbm_gbs=2765, tflops=459, clock_ghz=1.75, link_gbs=100, cores=2,
         topology=(2, 2, 1), source=_GOOGLE + "v5p"),
    Chip(name="v6e", kind="tpu", hbm_gb=32, hbm_gbs=1638, tflops=918, clock_ghz=1.75, link_gbs=100,
         topology=(2, 2), source=_GOOGLE + "v6e"),
    Chip(name="tpu7x", kind="tpu", hbm_gb=192, hbm_gbs=7380, tflops=2307, clock_ghz=2.2, link_gbs=100, devices=2,
         topology=(2, 2, 1), source=_GOOGLE + "tpu7x"),
    Chip(name="sm_80", kind="gpu", hbm_gb=80, hbm_gbs=2039, tflops=312, clock_ghz=1.41,
         source=_NVIDIA + "a100 (A100 80GB SXM)"),
    Chip(name="sm_90", kind="gpu", hbm_gb=80, hbm_gbs=3350, tflops=989, clock_ghz=1.83,
         source=_NVIDIA + "h100 (H100 SXM)"),
)}


class Bound(NamedTuple):
    """The least time of some work on a device, and what sets it: `HBM` or `matrix`."""

    seconds: float
    by: str


def bound(chip: Chip, nbytes: float, flops: float) -> Bound:
    """Of work that moves so many bytes and does so many operations, on one of the chip's devices."""
    memory = nbytes / (chip.hbm_gbs * 1e9 / chip.devices)
    matrix = flops / (chip.tflops * 1e12 / chip.devices)
    return Bound(memory, "HBM") if memory >= matrix else Bound(matrix, "matrix")


def cycles(chip: Chip, seconds: float) -> float:
    return seconds * chip.clock_ghz * 1e9


def seconds(chip: Chip, count: float) -> float:
    """Of so many cycles."""
    return count / (chip.clock_ghz * 1e9)


# How often the bytes of a collective's result cross a link of a ring of n devices, which sends both ways at once, and
# over how many links one after the other; each adds about a microsecond (https://jax-ml.github.io/scaling-book).
_HOP_SECONDS = 1e-6
_RING = {"all-reduce": (lambda n: (n - 1) / n, lambda n: n), "all-gather": (lambda n: (n - 1) / n / 2, lambda n: n / 2),
         "reduce-scatter": (lambda n: (n - 1) / 2, lambda n: n / 2), "all-to-all": (lambda n: n / 8, lambda n: n / 2),
         "collective-permute": (lambda n: 1.0, lambda n: 1)}
COLLECTIVES = tuple(_RING)


def wire_seconds(chip: Chip, collective: str, nbytes: float, devices: int) -> float:
    """Of one of `COLLECTIVES`, whose result has `nbytes` on each of the devices."""
    share, hops = _RING[collective]
    return share(devices) * nbytes / (chip.link_gbs * 1e9) + hops(devices) * _HOP_SECONDS
