"""Time wave orders, steps in turn; simulated where there is no GPU, as are the other ablations."""

from experiments.decode_variants import main

__all__ = ["main"]
