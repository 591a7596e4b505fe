"""One decoder layer over the same bf16 input, history and expert ids, as four machines compute it.

The float32 reference is what the others are measured against; transformers' own layer in bfloat16 says how much of a
distance bfloat16 explains. These two take neighbouring tokens behind a history as well as one. The kernel, or the
interpreter with the kernel's numerics, is what is tested: it runs the layer as a part of a decode step, one token a
row at the end of that row's own context. (Prefill's arm is in `experiments/prefill_layers.py`.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from mk.interpreter import Machine
from mk.kernel.runtime import Runtime
from mk.kernel.step_params import MAX_ROWS
from mk.kv import PAGE, KVCache, PageTable, kv_layers
from mk.model.geometry import ROWS, Geometry
from mk.model.greedy_oracle import layer_state
from mk.model.packing import PackedWeights
from mk.model.reference import LayerOutput, Reference, ReferenceCache, rope_table, top_k
from mk.page_layout import pack_keys, pack_values
from mk.parts import InterpreterWorker, StepInput
from mk.schedule.cut import cut, places
from mk.schedule.lower import Program
from mk.verify import verify

EXPERTS_IMPLEMENTATION = "eager"  # of transformers: a loop over the experts that were chosen
QUERY_BLOCK = 512  # queries whose scores exist at a time


@dataclass(frozen=True)
class History:
    """K (rotated) and V of the tokens before a row's own, bf16 [kv_heads, tokens, head_dim] each."""

    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    @classmethod
    def none(cls, g: Geometry, device: torch.device) -> Self:
        """Of a sequence's first token."""
        empty = torch.empty(g.kv_heads, 0, g.head_dim, dtype=torch.bfloat16, device=device)
        return cls(empty, empty)


@dataclass(frozen=True)
class Contributions:
    """What a layer adds to the residual, float32 [rows, hidden] each; rows without a context hold anything."""

    attention: Tensor
    ffn: Tensor


@dataclass(frozen=True)
class LayerTokens:
    """A layer over neighbouring tokens: what it adds to the residual [tokens, hidden] each, and their keys (rotated)
    and values [kv_heads, tokens, head_dim]. choice: ids [tokens, top_k] that the router prefers, whatever was replayed;
    None of a dense layer."""

    attention: Tensor
    ffn: Tensor
    keys: Tensor
    values: Tensor
    choice: Tensor | None


class Arm(Protocol):
    """A machine that runs layers of a program. heads: attention before o_proj, float32 [rows, q_heads, head_dim].
    values: V of the rows' own tokens, float32 [rows, kv_heads, head_dim]. Both are of the last `run`."""

    name: str
    heads: Tensor
    values: Tensor

    def set_history(self, layer: int, row: int, history: History) -> None:
        """Fill the pages that a row's token sees, with NaN behind the last of its history."""
        ...

    def run(self, layer: int, x: Tensor, ids: Tensor | None) -> Contributions:
        """x: bf16 [rows, hidden]. ids: int64 [rows, top_k], None in a dense layer."""
        ...

    def executed_hash(self) -> str:
        """Of the last `run`'s schedule, read back from the machine."""
        ...


class LayerParts:
    """The layers of a step, each from its first wave to its last, cut when they are first asked for."""

    def __init__(self, whole: Program) -> None:
        self.whole = whole
        self._parts: dict[int, Program] = {}

    def __getitem__(self, layer: int) -> Program:
        if layer not in self._parts:
            own = [place for place in places(self.whole) if place.layer == layer and place.end > place.first]
            waves = [place.name for place in own if place.wave != "embed"]
            self._parts[layer] = cut(self.whole, waves[0], waves[-1])
            verify(self._parts[layer])
        return self._parts[layer]


def strip_squares(x: Tensor) -> Tensor:
    """Partial sums of squares as an embedding or a residual leaves them: float32 [strips, rows] of x [rows, hidden]."""
    return x.float().unflatten(-1, (-1, ROWS)).square().sum(-1).T


class ReferenceArm:
    """Float32, one row after the other."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    def queries(self, layer: int, x: Tensor, keys: int) -> Tensor:
        """q of one row whose context is `keys` long, float32 [q_heads, head_dim]; x bf16 [hidden]."""
        h = self.reference.normed(layer, x[None].float())
        return self.reference.project(layer, h, keys - 1)[0][:, 0]

    def run(self, layer: int, x: Tensor, ids: Tensor | None = None) -> tuple[LayerTokens, Tensor | None]:
        """A sequence's first tokens, x [tokens, hidden]; ids int64 [tokens, top_k] in the place of the router's choice.
        The router's logits [tokens, experts] come along."""
        cache = ReferenceCache()
        out = self.reference.layer(layer, x.float(), 0, cache, ids)
        choice = None if out.router_logits is None else top_k(out.router_logits, self.reference.geometry.top_k)
        made = LayerTokens(out.attention, out.ffn, cache.keys[layer], cache.values[layer], choice)
        return made, out.router_logits

    def row(self, layer: int, x: Tensor, history: History) -> LayerOutput:
        """One row, x bf16 [hidden]; the router chooses."""
        cache = ReferenceCache()
        cache.keys[layer], cache.values[layer] = history.keys.float(), history.values.float()
        return self.reference.layer(layer, x[None].float(), history.tokens, cache)


class TransformersArm:
    """`Cohere2MoeDecoderLayer` with eager attention, made for one layer at a time."""

    def __init__(
        self,
        geometry: Geometry,
        get: Callable[[str], Tensor],
        layer: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        from transformers.models.cohere2_moe.configuration_cohere2_moe import Cohere2MoeConfig
        from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeDecoderLayer

        config = Cohere2MoeConfig(**geometry.to_hf_config())
        config._attn_implementation, config._experts_implementation = "eager", EXPERTS_IMPLEMENTATION
        with torch.device("meta"):
            self.module = Cohere2MoeDecoderLayer(config, layer)
        state = {name: w.to(device, dtype) for name, w in layer_state(geometry, get, layer).items()}
        self.module.load_state_dict(state, assign=True)
        self.module.eval()
        self.geometry, self.layer, self.device, self.dtype = geometry, layer, device, dtype
        # the argument's name has changed between releases
        parameters = inspect.signature(self.module.self_attn.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def run(self, x: Tensor, history: History, ids: Tensor | None) -> LayerTokens:
        """Neighbouring tokens x bf16 [tokens, hidden], the first one behind `history`; ids int64 [tokens, top_k]."""
        h = self.module.input_layernorm(x[None].to(self.dtype))
        cache = _Growing(self.geometry, self.layer, history.keys.to(self.dtype), history.values.to(self.dtype))
        start, parts = history.tokens, []
        for part in h.split(QUERY_BLOCK, dim=1):
            angles = rope_table(self.geometry, torch.arange(cache.tokens, cache.tokens + part.shape[1]))
            tables = (t.repeat_interleave(2, dim=-1)[None].to(self.device, self.dtype) for t in angles)
            parts.append(
                self.module.self_attn(
                    hidden_states=part,
                    position_embeddings=tuple(tables),
                    attention_mask=cache.mask(part.shape[1]),
                    **{self.cache_argument: cache},
                )[0][0]
            )
        ffn, choice = self._ffn(h[0], ids)
        return LayerTokens(torch.cat(parts), ffn, cache.keys[:, start:], cache.values[:, start:], choice)

    def _ffn(self, h: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        mlp = self.module.mlp
        if self.geometry.mlp_kinds[self.layer] == "dense":
            return mlp(h), None
        logits = torch.nn.functional.linear(h, mlp.gate.weight)
        choice = logits.topk(self.geometry.top_k).indices
        taken = choice if ids is None else ids
        return mlp.experts(h, taken, logits.gather(1, taken).sigmoid()), choice


@dataclass(slots=True)
class _Growing:
    """What transformers' attention asks of a cache: from the first key that a block's first query sees, to its own."""

    geometry: Geometry
    layer: int
    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def _window(self) -> int:
        """Keys that a query sees besides its own."""
        g = self.geometry
        return (g.window_keys if g.layer_kinds[self.layer] == "sliding" else g.max_positions) - 1

    def mask(self, queries: int) -> Tensor:
        """Of the next block, added to the scores, [1, 1, queries, keys in its sight]."""
        position = torch.arange(self.tokens, self.tokens + queries, device=self.keys.device)[:, None]
        key = torch.arange(max(0, self.tokens - self._window()), self.tokens + queries, device=self.keys.device)
        visible = (key <= position) & (key >= position - self._window())
        return torch.zeros(visible.shape, dtype=self.keys.dtype, device=key.device).masked_fill(~visible, -torch.inf)[
            None, None
        ]

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        first = max(0, self.tokens - self._window())
        self.keys, self.values = torch.cat([self.keys, keys[0]], dim=1), torch.cat([self.values, values[0]], dim=1)
        return self.keys[None, :, first:], self.values[None, :, first:]


class InterpreterArm:
    """The interpreter with the kernel's rounding, on a CPU."""

    name = "interpreter"

    def __init__(self, weights: PackedWeights, kv: KVCache, whole: Program, table: PageTable, keys: Sequence[int]):
        self.worker = InterpreterWorker(Machine(weights, kv, "kernel"), whole.shape)
        self.parts, self.table, self.keys = LayerParts(whole), table, list(keys)
        self.heads = self.values = torch.zeros(0)

    def set_history(self, layer: int, row: int, history: History) -> None:
        kv, g = self.worker.kv, self.worker.kv.geometry
        pages = self.table[g.layer_kinds[layer]][row]
        kv.pools[g.layer_kinds[layer]][pages[pages >= 0], kv.index[layer]] = np.nan
        k, v = (part.float().cpu().transpose(0, 1).numpy() for part in (history.keys, history.values))
        kv.write(self.table, row, layer, 0, k, v)

    def run(self, layer: int, x: Tensor, ids: Tensor | None) -> Contributions:
        memory, g = self.worker.memory, self.worker.kv.geometry
        memory.poison()
        which = layer % 2
        memory.x[which, :, : g.hidden] = x.float().cpu().numpy()
        memory.x_squares[which] = strip_squares(x).cpu().numpy()
        routed = None if ids is None else {layer: ids.cpu().numpy()}
        self.worker.run(self.parts[layer], StepInput(self.keys, [0] * len(self.keys), self.table, routed))
        rows = len(self.keys)
        self.heads = torch.from_numpy(memory.attn_out[:, : g.q_width].copy()).view(rows, g.q_heads, g.head_dim)
        own = memory.qkv.reshape(rows, -1)[:, g.q_width + g.kv_width : g.qkv_rows].copy()
        self.values = torch.from_numpy(own).view(rows, g.kv_heads, g.head_dim)
        return Contributions(torch.from_numpy(memory.oproj_out.copy()), torch.from_numpy(memory.ffn_out.copy()))

    def executed_hash(self) -> str:
        return self.worker.executed_hash()


class KernelArm:
    """The kernel on a card: history is packed on the device, and a layer is one launch."""

    name = "cuda"

    def __init__(self, runtime: Runtime, whole: Program, table: PageTable, keys: Sequence[int]) -> None:
        self.runtime, self.parts, self.table, self.keys = runtime, LayerParts(whole), table, list(keys)
        self.heads = self.values = torch.zeros(0)

    def set_history(self, layer: int, row: int, history: History) -> None:
        g = self.runtime.geometry
        kind = g.layer_kinds[layer]
        index = kv_layers(g, kind).index(layer)
        blocks = np.flatnonzero(self.table[kind][row] >= 0)
        first, last = int(blocks[0]), int(blocks[-1]) + 1
        assert len(blocks) == last - first  # what a row sees is one stretch
        pages = torch.from_numpy(self.table[kind][row][blocks].astype(np.int64)).to(self.runtime.device)
        pool = self.runtime[f"pool_{kind}"]
        for half, (part, pack) in enumerate(((history.keys, pack_keys), (history.values, pack_values))):
            seen = part[:, first * PAGE : last * PAGE]
            padded = torch.full((g.kv_heads, (last - first) * PAGE, g.head_dim), torch.nan, dtype=torch.bfloat16,
                                device=part.device)  # fmt: skip
            padded[:, : seen.shape[1]] = seen
            pool[pages, index, :, half] = pack(padded.unflatten(1, (-1, PAGE)).transpose(0, 1))

    def run(self, layer: int, x: Tensor, ids: Tensor | None) -> Contributions:
        runtime, g, rows = self.runtime, self.runtime.geometry, len(self.keys)
        which, part = layer % 2, self.parts[layer]
        forced = torch.zeros(g.layers, MAX_ROWS, max(1, g.top_k), dtype=torch.int32, device=runtime.device)
        if ids is not None:
            forced[layer, :rows] = ids.int()
        runtime["x"][which, :rows, : g.hidden] = x
        runtime["sumsq"][which, :, :rows] = strip_squares(x)
        for name in ("oproj_out", "ffn_out"):
            runtime[name].fill_(torch.nan)
        if torch.cuda.is_available():
            runtime.stream.wait_stream(torch.cuda.current_stream())
        runtime.load(part)
        runtime.set_tables(self.table.table)
        runtime.set_sequences(self.keys, [0] * rows)
        runtime.force_routing(None if ids is None else forced)
        runtime.launch()
        runtime.finish()
        runtime.require_healthy(f"layer {layer}")
        self.heads = runtime["attn_out"][:rows, : g.q_width].float().view(rows, g.q_heads, g.head_dim)
        own = runtime["qkv"][:rows, g.q_width + g.kv_width : g.qkv_rows].float()
        self.values = own.view(rows, g.kv_heads, g.head_dim)
        return Contributions(runtime["oproj_out"][:rows].clone(), runtime["ffn_out"][:rows].clone())

    def executed_hash(self) -> str:
        return self.runtime.executed_hash()
