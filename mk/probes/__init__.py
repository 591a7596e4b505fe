"""Kernels that measure a card, apart from the decode kernel: each a library of its own."""
