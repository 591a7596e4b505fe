"""Between the interpreter's memory and the kernel's buffers: the same numbers, rows and units in another layout."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from mk.interpreter.memory import Floats, Memory
from mk.kernel.runtime import Runtime
from mk.kv import KINDS, KVCache
from mk.page_layout import pack_keys, pack_values, unpack_keys, unpack_values

LOG2_E = math.log2(math.e)  # the kernel's scores are in units of log 2

Pair = tuple[Tensor, Floats]


def _pairs(runtime: Runtime, memory: Memory) -> list[Pair]:
    """Views of a kernel buffer and of the memory's array that hold the same numbers, in the same order of axes."""
    g, rows = memory.shape.geometry, memory.shape.rows
    pairs: list[Pair] = [
        (runtime["x"][:, :rows, : g.hidden], memory.x[..., : g.hidden]),
        (runtime["sumsq"][..., :rows], memory.x_squares),
        (runtime["qkv"][:rows], memory.qkv.reshape(rows, -1)[:, : g.qkv_rows]),
        (runtime["partial_o"][:rows], np.moveaxis(memory.split_out, 3, 2)),
        (runtime["partial_ml"][:rows, ..., 1, : g.group], np.moveaxis(memory.split_sum, 3, 2)),
        (runtime["attn_out"][:rows, : g.q_width], memory.attn_out[:, : g.q_width]),
        (runtime["oproj_out"][:rows], memory.oproj_out),
        (runtime["ffn_out"][:rows], memory.ffn_out),
        (runtime["logits"][:rows], memory.logits),
    ]
    if g.sparse_layers:
        _, strips, _, width = memory.router_part.shape
        logits = runtime["router_part"][:, :rows, : strips * width].unflatten(-1, (strips, width))
        pairs += [
            (logits, memory.router_part.transpose(0, 2, 1, 3)),
            (runtime["ffn_part"][:, :rows], memory.ffn_part),
        ]
    return pairs


def _hidden(runtime: Runtime, memory: Memory, dense: bool) -> Pair:
    """The FFN's activations: the interpreter keeps a dense layer's where expert 0's would be."""
    rows, g = memory.shape.rows, memory.shape.geometry
    if dense:
        return runtime["dense_hidden"][:rows, : g.dense_ffn], memory.hidden[0, :, : g.dense_ffn]
    return runtime["hidden"][:, :rows, : g.expert_ffn], memory.hidden[..., : g.expert_ffn]


def _kinds_of_ffn(memory: Memory) -> list[bool]:
    g = memory.shape.geometry
    return [dense for dense, layers in ((True, g.dense_layers), (False, g.sparse_layers)) if layers]


def upload(runtime: Runtime, memory: Memory) -> None:
    """Fills the kernel's buffers, what is bf16 there rounded to it. Padding and other rows stay as they are."""
    with torch.cuda.stream(runtime.stream):
        pairs = [*_pairs(runtime, memory), *(_hidden(runtime, memory, dense) for dense in _kinds_of_ffn(memory))]
        for buffer, array in pairs:
            buffer.copy_(torch.from_numpy(np.ascontiguousarray(array)))
        rows, group = memory.shape.rows, memory.shape.geometry.group
        tops = np.moveaxis(memory.split_max, 3, 2) * np.float32(LOG2_E)
        runtime["partial_ml"][:rows, ..., 0, :group].copy_(torch.from_numpy(tops))


def download(runtime: Runtime, memory: Memory, dense: bool) -> None:
    """Fills the memory from the kernel's buffers. dense: the FFN's activations are those of a dense layer."""
    for buffer, array in [*_pairs(runtime, memory), _hidden(runtime, memory, dense)]:
        array[...] = buffer.float().cpu().numpy()
    rows, group = memory.shape.rows, memory.shape.geometry.group
    tops = runtime["partial_ml"][:rows, ..., 0, :group].cpu().numpy()
    np.moveaxis(memory.split_max, 3, 2)[...] = tops / np.float32(LOG2_E)


def upload_pages(runtime: Runtime, kv: KVCache) -> None:
    """Copies every page of the cache, which must have as many as the kernel's pools."""
    with torch.cuda.stream(runtime.stream):
        for kind in KINDS:
            pages = torch.from_numpy(kv.pools[kind]).to(runtime.device, torch.bfloat16)
            if pages.numel():
                pool = runtime[f"pool_{kind}"]
                pool[:, :, :, 0] = pack_keys(pages[:, :, :, 0])
                pool[:, :, :, 1] = pack_values(pages[:, :, :, 1])


def download_pages(runtime: Runtime, kv: KVCache) -> None:
    for kind in KINDS:
        if kv.pools[kind].size:
            pool = runtime[f"pool_{kind}"].float().cpu()
            kv.pools[kind][:, :, :, 0] = unpack_keys(pool[:, :, :, 0]).numpy()
            kv.pools[kind][:, :, :, 1] = unpack_values(pool[:, :, :, 1]).numpy()
