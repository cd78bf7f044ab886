"""Compiling for hardware that is not there."""
