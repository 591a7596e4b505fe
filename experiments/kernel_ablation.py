"""Times one change of the kernel at a time: rows of decode_throughput, from one process."""

from experiments.decode_variants import main

__all__ = ["main"]
