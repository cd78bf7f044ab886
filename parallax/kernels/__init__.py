"""Kernels of the decode step. Each has a reference that XLA compiles, a TPU and a GPU version, one function in front.

`attention` a block over the committed cache and itself; `vocabulary` one pass over logits; `commit` writes the cache.
"""
