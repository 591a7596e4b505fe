"""Prefill: from a prompt's tokens to its KV pages, in the layout that the decode step reads.

Where there is no CUDA device, Triton's kernels run under its interpreter. Triton decides that as it is imported, hence
the choice in here, before any module of this package can import it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
