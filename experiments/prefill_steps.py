"""The decode step after a prefill, on pages that both use: the kernel's on a card, the interpreter's elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from experiments.opening import make_runtime, plan_for
from experiments.prefill_rig import Rig
from mk.config import Config
from mk.interpreter import Machine
from mk.kernel.build import build_for
from mk.kernel.step_params import MAX_ROWS
from mk.kv import KINDS, KVCache, blocks_of, pages_for_contexts
from mk.model.packing import PackedWeights
from mk.parts import InterpreterWorker, StepInput
from mk.programs import Programs, bucket_for
from prefill.interpreted import hand_over


class NextStep(Protocol):
    """A machine with a prefill of one slot into its pages."""

    rig: Rig
    build_hash: str | None
    schedule_hash: str | None  # of what `run` executed last

    def run(self, keys: int, token: int, ids: Tensor) -> Tensor:
        """Decode `token` as the last of `keys` in slot 0; its logits, float32 [vocab]. ids: int32 [layers, top_k]."""
        ...


class KernelStep:
    schedule_hash: str | None

    def __init__(self, cfg: Config, weights: PackedWeights, context: int) -> None:
        g, plan = weights.geometry, plan_for(cfg, "cuda")
        library = build_for(cfg, g, plan.splits)
        counts = pages_for_contexts(g, 1, context, cfg.prefill.chunk, paged_chunk=True)
        self.runtime = make_runtime(cfg, library, weights, counts, blocks_of(context), context)
        pools = {kind: self.runtime[f"pool_{kind}"] for kind in KINDS}
        self.rig = Rig(
            weights,
            counts,
            context,
            chunk=min(cfg.prefill.chunk, context),
            dtype=torch.bfloat16,
            products=cfg.prefill.products or "packed",
            pools=pools,
        )
        self.program = Programs(g, 1, plan).get(bucket_for(context))
        self.build_hash, self.schedule_hash = library.build_hash, None

    def run(self, keys: int, token: int, ids: Tensor) -> Tensor:
        runtime, g, pages = self.runtime, self.runtime.geometry, self.rig.pages
        forced = torch.zeros(g.layers, MAX_ROWS, max(1, g.top_k), dtype=torch.int32, device=runtime.device)
        forced[:, 0] = ids
        runtime.load(self.program)
        pages.advance([keys])
        runtime.set_tables(pages.table.table)
        runtime.set_sequences([keys], [token])
        torch.cuda.synchronize()  # the prefill was queued on another stream
        runtime.force_routing(forced)
        runtime.launch()
        runtime.finish()
        runtime.require_healthy(f"the step after {keys - 1} prefilled tokens")
        runtime.force_routing(None)
        self.schedule_hash = runtime.executed_hash()
        return runtime.logits(0).clone()


class InterpreterStep:
    build_hash = None
    schedule_hash: str | None

    def __init__(self, cfg: Config, weights: PackedWeights, context: int) -> None:
        g = weights.geometry
        self.rig = Rig.for_prompts(weights, 1, context, cfg.prefill.chunk, products=cfg.prefill.products or "packed")
        self.program = Programs(g, 1, plan_for(cfg, "interpreter")).get(bucket_for(context))
        self.schedule_hash = None
        kv = KVCache(g, *(len(self.rig.pools[kind]) for kind in KINDS))
        self.worker = InterpreterWorker(Machine(weights, kv, "kernel"), self.program.shape)

    def run(self, keys: int, token: int, ids: Tensor) -> Tensor:
        worker, pages, g = self.worker, self.rig.pages, self.rig.geometry
        pages.advance([keys])
        hand_over(self.rig.prefill.pools, worker.kv, pages, 0)
        routed = {layer: ids[layer, None].long().numpy() for layer in g.sparse_layers}
        worker.run(self.program, StepInput([keys], [token], pages.table, routed))
        self.schedule_hash = worker.executed_hash()
        return torch.from_numpy(worker.memory.logits[0, : g.vocab].copy())
