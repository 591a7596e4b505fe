"""Time static lists beside work stealing, by the number of SMs that claim, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
