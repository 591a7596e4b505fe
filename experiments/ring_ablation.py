"""Time the kernel with less room in its ring, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
