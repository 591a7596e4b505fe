"""Time windows of the weight ring: rows of decode_throughput, from one process."""

from experiments.decode_variants import main

__all__ = ["main"]
