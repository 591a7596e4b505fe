"""Engines: `interpreter` executes descriptors on virtual SMs, `cuda` runs them in the kernel, `reference` is torch."""
