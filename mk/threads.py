"""How many threads PyTorch uses on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 1 << 30  # bytes of float32 weights up to which a model's products are over before a second thread is awake


@contextmanager
def threads_for(nbytes: int) -> Iterator[None]:
    """One thread inside for a model of `nbytes` of float32 weights if that is small, else as many as before.

    On a machine that is busy with something else, the barrier after each tiny product costs far more than the product;
    and with one thread a product's bits do not depend on the machine's cores.
    """
    before = torch.get_num_threads()
    if nbytes <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
