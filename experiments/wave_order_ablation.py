"""Time every wave order, schedule and placement: rows of decode_throughput, from one process."""

from experiments.decode_variants import main

__all__ = ["main"]
