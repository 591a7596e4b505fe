"""Time one change of the kernel at a time, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
