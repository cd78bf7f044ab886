"""Parallel decoding of language models in JAX and Flax."""

__version__ = "0.1.0"
__all__ = ["LanguageModel"]


def __getattr__(name: str):
    if name == "LanguageModel":         # late: `python -m parallax.decode --help` should not wait for jax
        from parallax.generate import LanguageModel
        return LanguageModel
    raise AttributeError(f"module 'parallax' has no attribute {name!r}")
