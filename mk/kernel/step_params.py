"""What a launch of the kernel gets: the parameter struct, and the shapes of the buffers that it points to."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mk.kernel.build import CSRC
from mk.kv import PAGE
from mk.model.geometry import SLOT_K, Geometry
from mk.noise import power_rate
from mk.sampling import SamplingParams
from mk.shortlist import BINS
from mk.splits import SplitPolicy

MAX_ROWS = 8
OWNED = 4  # residual strips an SM can keep the sums of
HOST_STEPS = 1024  # slots of the ring in pinned host memory
COUNTER_STRIDE = 32  # words: a counter has a 128-byte line of its own
KV_BLOCK = PAGE * 128  # elements of K or V of one page, layer and head


def counters_at(per_step: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int32]:
    """Counters [at least 1, COUNTER_STRIDE] after `epoch` steps that each add `per_step` [n] to them, as words wrap."""
    counters = np.zeros((max(1, len(per_step)), COUNTER_STRIDE), np.uint32)
    counters[: len(per_step), 0] = (per_step * epoch) & 0xFFFFFFFF
    return counters.view(np.int32)


def _params_fields() -> list[tuple[str, Any]]:
    """The ctypes fields of `StepParams`, read from params.cuh: the struct is written once."""
    text = (CSRC / "params.cuh").read_text()
    body = re.sub(r"//.*", "", text[text.index("struct StepParams {") :].split("};")[0])
    scalars = {"int": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64}
    fields: list[tuple[str, Any]] = []
    for kind, names in re.findall(r"(?:const |long )?(\w+\*?) ([\w, ]+);", body):
        for name in names.split(", "):
            fields.append((name, ctypes.c_void_p if kind.endswith("*") else scalars[kind]))
    return fields


class StepParams(ctypes.Structure):
    _fields_ = _params_fields()


ROW_SAMPLING = np.dtype(
    [("seed", "u8"), ("top_p", "f8"), ("temperature", "f4"), ("rate", "f4"), ("top_k", "i4"), ("cuts", "i4")]
)
"""`RowSampling` of params.cuh."""


HOST_STEP = np.dtype(
    {
        "names": ["tokens", "status", "step"],
        "formats": [("i4", MAX_ROWS), ("i4", MAX_ROWS), "u8"],
        "offsets": [0, 4 * MAX_ROWS, 8 * MAX_ROWS],
        "itemsize": 128,
    }
)
"""`HostStep` of host_step.cuh."""


def pack_sampling(rows: Sequence[SamplingParams], vocab: int) -> npt.NDArray[np.void]:
    """What the kernel reads of each row's parameters, `ROW_SAMPLING` [MAX_ROWS]; rows without any are greedy."""
    packed = np.zeros(MAX_ROWS, ROW_SAMPLING)
    for row, params in enumerate(rows):
        if not params.greedy:
            top_k = params.top_k if params.top_k < vocab else 0
            rate = power_rate(params.temperature)
            packed[row] = (params.seed, params.top_p, params.temperature, rate, top_k, params.cuts(vocab))
    return packed


def buffer_shapes(g: Geometry, policy: SplitPolicy, sms: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every buffer that starts as zeros, by its name in the struct."""
    bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
    experts, splits = max(1, g.experts), policy.max_splits + 1

    def pad(k: int) -> int:
        return -(-k // SLOT_K) * SLOT_K

    return {
        "keys": (i32, (MAX_ROWS,)),
        "x": (bf16, (2, MAX_ROWS, pad(g.hidden))),
        "sumsq": (f32, (2, g.hidden // 16, MAX_ROWS)),
        "qkv": (bf16, (MAX_ROWS, g.qkv_rows)),
        "partial_o": (f32, (MAX_ROWS, g.kv_heads, splits, g.group, 128)),
        "partial_ml": (f32, (MAX_ROWS, g.kv_heads, splits, 2, 8)),
        "attn_out": (bf16, (MAX_ROWS, pad(g.q_width))),
        "router_part": (f32, (pad(g.hidden) // SLOT_K, MAX_ROWS, 128)),
        "hidden": (bf16, (experts, MAX_ROWS, pad(g.expert_ffn))),
        "dense_hidden": (bf16, (MAX_ROWS, pad(g.dense_ffn))),
        "oproj_out": (f32, (MAX_ROWS, g.hidden)),
        "ffn_part": (f32, (experts, MAX_ROWS, g.hidden)),
        "ffn_out": (f32, (MAX_ROWS, g.hidden)),
        "logits": (f32, (MAX_ROWS, -(-g.vocab // 16) * 16)),
        "candidate_value": (f32, (sms, MAX_ROWS)),
        "candidate_low": (f32, (sms, MAX_ROWS)),
        "candidate_id": (i32, (sms, MAX_ROWS)),
        "sampling": (i64, (MAX_ROWS, 4)),
        "bin_mass": (i64, (2, MAX_ROWS, BINS)),
        "bin_count": (i32, (2, MAX_ROWS, BINS)),
        "undecided": (i32, (MAX_ROWS, -(-g.vocab // 16) * 16, 4)),
        "undecided_count": (i32, (2, MAX_ROWS)),
        "cuts": (i64, (MAX_ROWS, 3)),
        "best_score": (torch.float64, (sms, MAX_ROWS)),
        "best_id": (i32, (sms, MAX_ROWS)),
        "tokens": (i32, (MAX_ROWS,)),
        "route_ids": (i32, (g.layers, MAX_ROWS, max(1, g.top_k))),
        "status": (i32, (MAX_ROWS,)),
        "abort_word": (i32, (1,)),
        "stalls": (i32, (sms, 8)),
        "tiles_taken": (i32, (sms,)),
    }
