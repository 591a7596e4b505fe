"""transformers' own model as a baseline: a greedy decode step of it, captured as a CUDA graph where there is a card.

Its modules do the work as they are. What stands around them is what a graph needs: K and V in tensors that stay where
they are, of which a sliding layer's are overwritten in turn, a position that the device counts, and the sampled token
fed back. Expert ids come from a table or from its own router, and are recorded.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from mk.errors import MkError
from mk.model import tensors
from mk.model.geometry import Geometry
from mk.model.greedy_oracle import layer_state
from mk.model.tensors import WeightSource

WARM_UP = 3  # steps before one is captured
EXPERTS = ("grouped_mm", "batched_mm", "eager")  # implementations of transformers; eager asks the host, so no graph


def load(source: WeightSource, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """`Cohere2MoeForCausalLM` with a source's weights, held once, layer by layer on the device."""
    from transformers.models.cohere2_moe.configuration_cohere2_moe import Cohere2MoeConfig
    from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeForCausalLM, Cohere2MoeRotaryEmbedding

    g = source.geometry
    config = Cohere2MoeConfig(**g.to_hf_config())
    config.sliding_window = g.window_keys  # transformers counts the query's own key
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = Cohere2MoeForCausalLM(config)
    for number, layer in enumerate(model.model.layers):
        state = layer_state(g, source.tensor, number)
        layer.load_state_dict({name: w.to(device, dtype) for name, w in state.items()}, assign=True)
    embedding = source.tensor(tensors.EMBED).to(device, dtype)
    model.model.embed_tokens.weight = model.lm_head.weight = torch.nn.Parameter(embedding, requires_grad=False)
    model.model.norm.load_state_dict({"weight": source.tensor(tensors.FINAL_NORM).to(device, dtype)}, assign=True)
    model.model.rotary_emb = Cohere2MoeRotaryEmbedding(config).to(device)
    return model.eval().requires_grad_(False)


class StaticKV:
    """What transformers' attention asks of a cache. Keys lie at their position, in a sliding layer modulo the window:
    softmax does not mind the order. `place` moves all layers to a position, on the device."""

    def __init__(self, g: Geometry, rows: int, longest: int, like: Tensor) -> None:
        """longest: keys of a row at most. like: a tensor of the dtype and device."""
        self.sizes = {"full": longest, "sliding": min(longest, g.window_keys)}
        self.kinds = g.layer_kinds
        shapes = [(rows, g.kv_heads, self.sizes[kind], g.head_dim) for kind in self.kinds]
        self.keys, self.values = ([like.new_zeros(shape) for shape in shapes] for _ in range(2))
        self.slot = {kind: torch.zeros(1, dtype=torch.long, device=like.device) for kind in self.sizes}
        self.masks = {
            kind: torch.zeros(1, 1, 1, size, dtype=torch.bool, device=like.device) for kind, size in self.sizes.items()
        }

    def place(self, position: Tensor) -> None:
        """position: int64 [1], of the token that comes now."""
        for kind, size in self.sizes.items():
            self.slot[kind].copy_(position % size)
            self.masks[kind].copy_(torch.arange(size, device=position.device) <= position)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        slot = self.slot[self.kinds[layer]]
        self.keys[layer].index_copy_(2, slot, keys)
        self.values[layer].index_copy_(2, slot, values)
        return self.keys[layer], self.values[layer]

    def get_seq_length(self, *_: Any) -> int:
        """Never asked for what matters: positions and masks are given."""
        return 0

    def fill(self, std: float, seed: int) -> None:
        """Synthetic K and V."""
        generator = torch.Generator(self.keys[0].device).manual_seed(seed)
        for pool in (*self.keys, *self.values):
            pool.normal_(0, std, generator=generator)


class TransformersSteps:
    """Greedy steps of `rows` sequences of one length, one after the other."""

    def __init__(
        self,
        model: Any,
        g: Geometry,
        rows: int,
        longest: int,
        experts: str,
        forced: Tensor | None = None,
        steps: int = 0,
    ) -> None:
        """experts: of `EXPERTS`. forced: ids int [steps, layers, >= rows, top_k], None the router's own, which are
        recorded for `steps`."""
        self.model, self.g, self.rows = model, g, rows
        model.config._experts_implementation = experts
        weight = model.lm_head.weight
        device = weight.device
        self.cache = StaticKV(g, rows, longest, weight)
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        count = max(WARM_UP + 1, steps if forced is None else len(forced))
        self.taken = torch.zeros(count, g.layers, rows, g.top_k, dtype=torch.long, device=device)
        self.forced = None if forced is None else forced[:, :, :rows].to(device, torch.long)
        # a kind of layer whose whole window is behind every query needs no mask
        self.masks: dict[str, Tensor | None] = {f"{kind}_attention": mask for kind, mask in self.cache.masks.items()}
        for layer in g.sparse_layers:
            gate = model.model.layers[layer].mlp.gate
            gate.forward = self._router(gate, layer)
        # the argument's name has changed between releases
        parameters = inspect.signature(model.model.layers[0].self_attn.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._graph: torch.cuda.CUDAGraph | None = None

    def _router(self, gate: Any, layer: int) -> Any:
        """A router's forward that takes the ids of a table, where there is one, and records what it took."""

        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(hidden, gate.weight)
            if self.forced is None:
                ids = logits.topk(self.g.top_k, dim=-1).indices
            else:
                ids = self.forced[:, layer].index_select(0, self.step)[0]
            self.taken[:, layer].index_copy_(0, self.step, ids[None])
            return logits, logits.gather(1, ids).sigmoid().to(hidden.dtype), ids

        return forward

    def begin(self, tokens: Tensor, position: int) -> None:
        """The next step is of `tokens` int64 [rows] at `position`; steps are counted from 0 again."""
        self.tokens.copy_(tokens[:, None])
        self.position.fill_(position)
        self.step.zero_()
        if position >= self.cache.sizes["sliding"]:
            self.masks["sliding_attention"] = None

    @torch.no_grad()
    def _one(self) -> None:
        self.cache.place(self.position)
        logits = self.model(
            input_ids=self.tokens,
            position_ids=self.position.expand(self.rows, 1),
            attention_mask=self.masks,
            use_cache=True,
            **{self._cache_argument: self.cache},
        ).logits
        self.tokens.copy_(logits.argmax(-1))
        self.position += 1
        self.step += 1

    def capture(self) -> None:
        """One step as a CUDA graph, after some that warm up. Moves the state on: `begin` comes next.

        Raises MkError where the implementation cannot be captured.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    self._one()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._one()
        except Exception as error:  # whatever torch makes of what a graph may not do
            raise MkError(f"transformers' step cannot be captured: {type(error).__name__}: {error}"[:300]) from error
        self._graph = graph

    def run(self) -> None:
        """Queues one step."""
        if self._graph is None:
            self._one()
        else:
            self._graph.replay()
