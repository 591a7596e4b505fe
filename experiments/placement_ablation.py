"""Time every placement of tasks on SMs, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
