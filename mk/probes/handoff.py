"""Runs mk/probes/handoff.cu: nanoseconds from one SM's signal to its being seen by another, for all pairs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mk.errors import MkError
from mk.kernel.build import build_probe

SOURCE = Path(__file__).parent / "handoff.cu"
LINE_WORDS = 32


class _Params(ctypes.Structure):
    """As handoff.cu has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("lines", "turn", "gave_up", "cycles", "smid", "clocks")),
        ("limit_ns", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("blocks", "n_lines", "rounds")),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """smid: the SM that each block lay on, [n]. ns: of each pair a < b, in the order of `np.triu_indices(n, 1)`."""

    smid: list[int]
    ns: npt.NDArray[np.float64]


def open_library() -> ctypes.CDLL:
    """The built probe; needs no GPU. Raises MkError without a compiler."""
    library = ctypes.CDLL(str(build_probe(SOURCE)))
    library.handoff_error.restype = ctypes.c_char_p
    if library.handoff_params_bytes() != ctypes.sizeof(_Params):
        raise MkError(f"handoff.cu has parameters of {library.handoff_params_bytes()} bytes, this file another idea")
    return library


def launch(library: ctypes.CDLL, sms: int, shared_bytes: int, lines: int, rounds: int, limit_s: float) -> Launch:
    """One launch on the current device. shared_bytes: as much as a block may have, so that each SM holds one.

    Raises MkError where it cannot be launched, and for a block that waited longer than `limit_s`.
    """
    pairs = sms * (sms - 1) // 2
    device = torch.device("cuda")
    buffers = {
        "lines": torch.zeros(lines * LINE_WORDS, dtype=torch.int32, device=device),
        "turn": torch.zeros(LINE_WORDS, dtype=torch.int32, device=device),
        "gave_up": torch.zeros(LINE_WORDS, dtype=torch.int32, device=device),
        "cycles": torch.zeros(pairs, dtype=torch.int32, device=device),
        "smid": torch.zeros(sms, dtype=torch.int32, device=device),
        "clocks": torch.zeros(2, dtype=torch.int64, device=device),
    }
    addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    params = _Params(**addresses, limit_ns=int(limit_s * 1e9), blocks=sms, n_lines=lines, rounds=rounds)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if code := library.handoff_launch(ctypes.byref(params), shared_bytes, stream):
        raise MkError(f"the probe cannot be launched: {library.handoff_error(code).decode()}")
    torch.cuda.synchronize()
    if block := int(buffers["gave_up"][0]):
        raise MkError(f"block {block - 1} of the probe waited longer than {limit_s} s")
    cycles, nanoseconds = buffers["clocks"].tolist()
    spent = buffers["cycles"].cpu().numpy().astype(np.float64)
    each = spent * nanoseconds / cycles / (lines * rounds * 2)  # a round is two hand-offs
    return Launch(buffers["smid"].tolist(), each)


def matrix(ns: npt.NDArray[np.float64], sms: int) -> npt.NDArray[np.float64]:
    """Pairs in the order of `Launch.ns` as a symmetric matrix [sms, sms] with 0 on its diagonal."""
    full = np.zeros((sms, sms))
    full[np.triu_indices(sms, 1)] = ns
    return full + full.T
