"""The prefill's Triton kernels. Where there is no CUDA device they run under Triton's interpreter.

Triton decides that when a kernel is defined, so the choice is made here, before any of them is.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
