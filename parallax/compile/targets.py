"""The hardware to compile for: names, what has to be installed, and devices that are not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

from parallax.compile.chips import CHIPS, Chip

# libtpu looks for the chips of this machine, and complains at length where there are none.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1",
                "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_MIN_LOG_LEVEL": "3",
                "TPU_STDERR_LOG_LEVEL": "3"}
_OPTIONS = {"v4": {"chip_config_name": "megacore"}}     # as JAX runs it: both cores are one device


@dataclasses.dataclass(frozen=True)
class Target:
    """`tensor` devices of a chip, which share the model's heads; for a TPU out of a topology such as (2, 2)."""

    chip: Chip
    topology: tuple[int, ...]
    tensor: int = 1

    @property
    def name(self) -> str:
        return self.chip.name + (f" x {self.tensor}" if self.tensor > 1 else "")


def resolve(text: str, tensor: int = 1) -> Target:
    """`v5e`, `v5e:2x4` or `sm_90`.

    Raises:
      ValueError: an unknown name or form, or fewer devices than `tensor`.
    """
    name, colon, shape = text.partition(":")
    if name not in CHIPS:
        from parallax.models.config import nearest  # late: it brings JAX, which reads the environment below
        raise ValueError(f"unknown target {name!r}: expected one of {', '.join(CHIPS)}, a TPU perhaps with a topology "
                         f"as in v5e:2x4{nearest(name, CHIPS)}")
    chip = CHIPS[name]
    if chip.kind == "gpu":
        if colon:
            raise ValueError(f"target {text!r} has a topology, which only TPUs have: expected {name}")
        if tensor > 1:
            raise ValueError(f"a program for {tensor} devices is compiled for TPUs only: leave --tensor out for {name}")
        return Target(chip, ())
    axes = len(chip.topology)
    if colon:
        if not re.fullmatch("x".join(["[1-9][0-9]*"] * axes), shape):
            raise ValueError(f"target {text!r} has no topology of {axes} numbers: expected for example "
                             f"{name}:{'x'.join(map(str, chip.topology))}")
        topology = tuple(map(int, shape.split("x")))
    else:
        topology = chip.topology
        while math.prod(topology) * chip.devices < tensor:
            at = min(range(axes), key=lambda axis: (topology[axis], -axis))
            topology = (*topology[:at], topology[at] * 2, *topology[at + 1:])
    if math.prod(topology) * chip.devices < tensor:
        raise ValueError(f"--tensor {tensor} needs {tensor} devices, target {text} has "
                         f"{math.prod(topology) * chip.devices}")
    return Target(chip, topology, tensor)


def check_installed(target: Target) -> None:
    """Raises ValueError, which says what to install, unless the compiler for the target is there."""
    module, extra = ("libtpu", "tpu-aot") if target.chip.kind == "tpu" else ("triton", "gpu-aot")
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"compiling for {target.chip.name} needs {module}, which is not installed: "
                         f"pip install 'parallax-decoding[{extra}]'")


def set_environment(dump: str | None = None) -> None:
    """For a process that compiles for absent hardware, before it uses JAX. `dump`: a folder for libtpu's dumps."""
    os.environ.pop("XLA_FLAGS", None)   # they are for this machine
    os.environ.update(_ENVIRONMENT)
    if dump is not None:
        # The last schedules only: all of them are a hundred times as much.
        os.environ["LIBTPU_INIT_ARGS"] = (f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
                                          f"--xla_jf_dump_llo_pass_label_regex=final.* --xla_mosaic_dump_to={dump}")


def mesh(target: Target) -> Any:
    """The mesh of `parallax.sharding` over devices of the target, a TPU.

    Raises:
      ValueError: the installed libtpu does not know the topology.
    """
    from jax.experimental import topologies

    from parallax import sharding
    name = f"{target.chip.name}:{'x'.join(map(str, target.topology))}"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name,
                                             **_OPTIONS.get(target.chip.name, {}))
    except Exception as error:          # of libtpu: JAX has no class of its own for them
        raise ValueError(f"the installed libtpu does not describe {name}: {error}") from None
    return sharding.make_mesh(tensor=target.tensor, devices=found.devices[:target.tensor])


def explained(error: Exception) -> str:
    """A compiler's error in one line: its first paragraph."""
    return " ".join(str(error).split("\n\n")[0].split()) or type(error).__name__
