"""Time what a step pays for drawing its tokens, by how it draws them, steps in turn."""

from experiments.decode_variants import main

__all__ = ["main"]
