"""Time contexts of 1K to 256K keys: rows of decode_throughput, from one process."""

from experiments.decode_variants import main

__all__ = ["main"]
