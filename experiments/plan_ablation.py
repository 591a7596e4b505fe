"""Time every plan once: wave orders by placements by schedules."""

from experiments.decode_variants import main

__all__ = ["main"]
