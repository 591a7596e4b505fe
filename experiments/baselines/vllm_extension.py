"""What vLLM's worker process is made to do besides: our random weights, uniform routing, and counting experts.

vLLM imports this module into its worker (`worker_extension_cls`) and adds the methods of `Extension` to the worker, so
that the engine that is timed is the one that is counted. Nothing here needs more of this project than `mk/model`.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

UNIFORM = "mk_uniform_distinct"  # a value of VLLM_MOE_ROUTING_SIMULATION_STRATEGY


def uniform_distinct(rows: int, experts: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, ids int64) [rows, top_k]: distinct in a row, uniform, fresh at every call and graph replay.

    Every weight is 1 / top_k: looking up each id's own sigmoid would cost the baseline two kernels more a layer. Its
    cost beyond vLLM's own router, which is skipped, is a random and a top-k kernel.
    """
    ids = torch.rand(rows, experts, device=device).topk(top_k, dim=-1, sorted=False).indices
    return torch.full((rows, top_k), 1 / top_k, dtype=torch.float32, device=device), ids


def register_uniform() -> None:
    """Makes `UNIFORM` known to vLLM's routing simulator. vLLM's own uniform strategy draws with replacement."""
    from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulator

    class UniformDistinct(simulator.RoutingStrategy):  # type: ignore[name-defined,misc]
        def route_tokens(self, hidden_states: Any, router_logits: Any, top_k: int, indices_type: Any = None) -> Any:
            weights, ids = uniform_distinct(*router_logits.shape, top_k, hidden_states.device)
            return weights, ids.to(indices_type or torch.int32)

    simulator.RoutingSimulator.register_strategy(UNIFORM, UniformDistinct())


class Extension:
    """Methods of the worker, called by name; `self` is vLLM's worker."""

    def mk_load_weights(self, folder: str, seed: int, qk_scale: float) -> str:
        """Overwrites the weights in place, so that captured graphs stay right. "same": value by value the harness's;
        otherwise why not, and they are normal with the same deviation."""
        from mk.model.geometry import Geometry
        from mk.model.random_weights import MATRIX_STD, RandomWeights
        from mk.model.tensors import tensor_shapes

        model = self.get_model()  # type: ignore[attr-defined]
        device = next(model.parameters()).device
        geometry = Geometry.from_hf_config(folder)
        source = RandomWeights(geometry, seed, device, qk_scale=qk_scale)
        with torch.inference_mode():
            try:
                model.load_weights((name, source.tensor(name)) for name in tensor_shapes(geometry))
                return "same"
            except Exception as error:  # any other release may load otherwise; the bytes are the same
                generator = torch.Generator(device=device).manual_seed(seed)
                for name, weight in model.named_parameters():
                    if torch.is_floating_point(weight):
                        weight.fill_(1.0) if "norm" in name else weight.normal_(0, MATRIX_STD, generator=generator)
                return f"alike: {type(error).__name__}: {error}"[:300]

    def mk_count_begin(self) -> int:
        """From here on steps run without CUDA graphs and leave every layer's ids behind; returns the layers."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self.mk_ids: dict[int, list[torch.Tensor]] = {}
        runner.cudagraph_dispatcher.keys_initialized = False  # then no batch has a graph
        return len(self._mk_hook(lambda layer: lambda ids: self.mk_ids.setdefault(layer, []).append(ids.clone())))

    def mk_count_end(self, batch: int) -> list[float]:
        """Distinct experts of each layer, mean over the steps that had `batch` tokens; graphs are used again."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        self._mk_hook(lambda layer: None)
        runner.cudagraph_dispatcher.keys_initialized = True
        return distinct_by_layer(self.mk_ids, batch)

    def mk_info(self) -> dict[str, str]:
        """What the engine settled on."""
        compilation: Any = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        implementations = [getattr(layer, "impl", None) for layer in compilation.static_forward_context.values()]
        versions = {str(getattr(each, "vllm_flash_attn_version", None)) for each in implementations} - {"None"}
        return {
            "graph_mode": str(getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)),
            "compile_mode": str(getattr(compilation.mode, "name", compilation.mode)),
            "flash_attention": ", ".join(sorted(versions)),
        }

    def _mk_hook(self, make: Any) -> list[int]:
        """Gives each expert layer's router a function of its ids, or None; the layers."""
        found = []
        for module in self.get_model().modules():  # type: ignore[attr-defined]
            router = getattr(module, "router", None)
            if hasattr(router, "set_capture_fn"):
                router.set_capture_fn(make(module.layer_id))
                found.append(module.layer_id)
        return found


def distinct_by_layer(ids: dict[int, list[torch.Tensor]], batch: int) -> list[float]:
    """ids: by layer, of every step [tokens, top_k]; steps of other than `batch` tokens are none of a decode."""
    means = []
    for layer in sorted(ids):
        counts = [len(step.unique()) for step in ids[layer] if len(step) == batch]
        means.append(math.fsum(counts) / len(counts) if counts else 0.0)
    return means if all(means) else []


with contextlib.suppress(ImportError):  # vLLM's: in this project's own interpreter there is none
    register_uniform()
