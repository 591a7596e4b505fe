"""A stand-in for vLLM on a CPU: what `vllm_bench.py` and `vllm_extension.py` touch of it, and no model.

A step takes a millisecond times the batch. `FAKE_VLLM=no_count` has routers that call nobody, `other_names` a model
that loads other tensors, `dies` an engine that does not start, `small` one whose KV holds `ROOM` keys; with more than
one sequence `begins` has the first one some steps ahead, one more for each 8,192 tokens of a prompt, `stalls` has the
last one sit out a step in the midst, `stops` ends it early, `falls` ends the process.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

__version__ = "0.0.1"
MODE = os.environ.get("FAKE_VLLM", "")
ROOM = 200


@dataclass
class Output:
    request_id: str
    finished: bool


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool
    output_kind: Any = None

    def clone(self) -> SamplingParams:
        return replace(self)


class Router:
    capture = None

    def set_capture_fn(self, function: Any) -> None:
        self.capture = function


class Experts(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_id, self.router = layer, Router()


class Model(nn.Module):
    """As many expert layers as the geometry has, and one weight."""

    def __init__(self, geometry: Any) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(geometry.vocab, geometry.hidden, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(geometry.hidden, dtype=torch.bfloat16))
        self.layers = nn.ModuleList(Experts(layer) for layer in geometry.sparse_layers)

    def load_weights(self, weights: Any) -> None:
        for name, weight in weights:
            if name == "model.embed_tokens.weight":
                if MODE == "other_names":
                    raise ValueError("no tensor model.embed_tokens.weight")
                self.embed.copy_(weight)


class LLM:
    def __init__(self, **arguments: Any) -> None:
        from experiments.baselines import vllm_extension
        from mk.model.geometry import Geometry

        if MODE == "dies":
            raise RuntimeError("no kernel image is available")
        self.geometry = Geometry.from_hf_config(arguments["model"])
        self.longest = arguments["max_model_len"]
        self.sizes = arguments["compilation_config"]["cudagraph_capture_sizes"]
        connector = arguments.get("kv_transfer_config", {}).get("kv_connector")
        assert connector == (None if arguments["enable_prefix_caching"] else "DecodeBenchConnector")
        compilation = SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name="FULL_AND_PIECEWISE"),
            mode=SimpleNamespace(name="VLLM_COMPILE"),
            static_forward_context={"0": SimpleNamespace(impl=SimpleNamespace(vllm_flash_attn_version=3))},
        )
        self.model = Model(self.geometry)
        self.dispatcher = SimpleNamespace(keys_initialized=True)
        worker = type("Worker", (vllm_extension.Extension,), {"get_model": lambda _: self.model})()
        worker.model_runner = SimpleNamespace(cudagraph_dispatcher=self.dispatcher)
        worker.vllm_config = SimpleNamespace(compilation_config=compilation)
        self.worker, self.waiting, self.keys = worker, {}, {}
        self.llm_engine = self
        backends = "out of potential backends: (...)."
        for line in (
            f"[cuda.py:483] Using {arguments['attention_backend']} attention backend {backends}",
            f"[unquantized.py:302] Using TRITON Unquantized MoE backend {backends}",
            "[fused_moe.py:1095] Using configuration from /a/E=128,N=768,device_name=NVIDIA_H200.json for MoE layer.",
        ):
            print(f"(EngineCore pid=7) INFO 11-30 06:00:00 {line}", flush=True)

    def collective_rpc(self, method: str, args: tuple = ()) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def reset_prefix_cache(self) -> None: ...

    # ---- the engine ----
    def add_request(self, name: str, prompt: dict, sampling: SamplingParams) -> None:
        ids = prompt["prompt_token_ids"]
        assert all(0 <= token < self.geometry.vocab for token in ids)
        assert len(ids) + sampling.max_tokens <= self.longest
        self.waiting[name], self.paired = sampling.max_tokens, 0
        assert len(self.waiting) <= max(self.sizes)
        self.keys[name], self.ahead = len(ids) + sampling.max_tokens, 7 + len(ids) // 8192

    def abort_request(self, names: list[str]) -> None:
        self.waiting = {name: left for name, left in self.waiting.items() if name not in names}

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Output]:
        names, keys = [], 0
        for name in self.waiting:
            keys += self.keys[name]
            if MODE == "small" and keys > ROOM:
                break
            names.append(name)
        batch = len(names)
        time.sleep(0.001 * batch)
        if not self.dispatcher.keys_initialized and MODE != "no_count":
            for layer in self.model.layers:
                g = self.geometry
                layer.router.capture(torch.rand(batch, g.experts).topk(g.top_k).indices)
        stopped = None
        if batch > 1:
            self.paired += 1
            if MODE == "falls":
                print("CUDA error: an illegal memory access", flush=True)
                os._exit(3)
            if MODE == "begins" and self.paired <= self.ahead:
                names = names[:1]
            if MODE == "stalls" and self.paired == 8:
                names = names[:-1]
            if MODE == "stops" and self.paired == 16:
                stopped = names[-1]
        left = {name: 0 if name == stopped else left - (name in names) for name, left in self.waiting.items()}
        self.waiting = {name: count for name, count in left.items() if count > 0}
        return [Output(name, name not in self.waiting) for name in names]
