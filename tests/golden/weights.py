"""Weights and tokens made from names, so that the golden files need to hold neither.

Only numpy's PCG64 uniform doubles are used: they are the same on every platform and numpy version.
"""

from __future__ import annotations

import zlib

import numpy as np


def tensor(name: str, shape: tuple[int, ...], *, norm: float = 1.0, seed: int = 0) -> np.ndarray:
    """The float32 weight called `name`. Norm scales lie around `norm`: 1, or 0 for models that add the 1 themselves."""
    uniform = 2 * _generator(name, seed).random(shape) - 1
    if len(shape) > 1:
        return (0.3 * uniform).astype(np.float32)
    return ((norm if name.endswith("weight") else 0) + 0.2 * uniform).astype(np.float32)


def tokens(name: str, vocab_size: int, *, seed: int = 0, shape: tuple[int, ...] = (2, 24)) -> np.ndarray:
    """The int32 input of the case called `name`."""
    return (_generator(f"tokens of {name}", seed).random(shape) * vocab_size).astype(np.int32)


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
