"""Time windows of the weight ring, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
