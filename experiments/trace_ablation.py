"""Time what a step pays for being traced, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
