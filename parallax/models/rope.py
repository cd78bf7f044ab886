"""Rotary positions. D head size, H heads, B batch, T rows.

Source: RoFormer (arXiv:2104.09864), in the half-split layout of Hugging Face checkpoints; `llama3` scaling as in the
Llama 3.1 release.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from parallax.models.config import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Angle per position of each dimension pair, [D/2] float32."""
    freq = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    if scaling is None:
        return freq.astype(np.float32)
    if scaling.kind == "linear":
        return (freq / scaling.factor).astype(np.float32)
    wavelength = 2 * math.pi / freq
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    blend = ((scaling.original_max_positions / wavelength - scaling.low_freq_factor)
             / (scaling.high_freq_factor - scaling.low_freq_factor))
    between = (1 - blend) * freq / scaling.factor + blend * freq
    scaled = np.where(wavelength > low, freq / scaling.factor, np.where(wavelength < high, freq, between))
    return scaled.astype(np.float32)


def table(positions: Int[Array, "B T"], freq: np.ndarray) -> tuple[Float[Array, "D B T"], Float[Array, "D B T"]]:
    """cos and signed sin over the whole head, made once per forward, feature-major like the activations."""
    angle = jnp.asarray(freq)[:, None, None] * positions.astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos]), jnp.concatenate([-sin, sin])


def rotate(x: Float[Array, "H D B T"], cos: Float[Array, "D B T"],
           sin: Float[Array, "D B T"]) -> Float[Array, "H D B T"]:
    """Turns every head by its position."""
    first, second = jnp.split(x, 2, axis=1)
    swapped = jnp.concatenate([second, first], axis=1)
    return (x * cos + swapped * sin).astype(x.dtype)
