"""Time routings, from all rows on one set of experts to an oracle that knows the ids beforehand, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
