"""Greedy decode by somebody else's code: transformers' own model, or where that is too large our PyTorch reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mk.model import tensors
from mk.model.geometry import Geometry
from mk.model.memory import free_memory
from mk.model.opening import Model
from mk.model.reference import greedy_decode, reference_forward
from mk.threads import threads_for

TRANSFORMERS = "transformers"
REFERENCE = "reference"
_LARGEST = 4 << 30  # bytes of float32 weights that transformers is given


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token of a row that the oracle chose otherwise."""

    row: int
    index: int  # among the new tokens
    got: int | None  # None: the row ended before the oracle's
    expected: int | None
    oracle: list[int]  # its tokens, as many as the row has at most
    margin: float  # that the oracle's token there is above the other, in float32 logits; above its second, at an end


class GreedyOracle:
    """float32, eager attention, greedy; each row alone, so no padding enters. `name` says whose code decodes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._nbytes = 4 * tensors.parameter_count(model.geometry)
        # twice: the source's tensors stand beside the copy while it is filled
        fits = self._nbytes <= _LARGEST and 2 * self._nbytes < free_memory(torch.device("cpu"))
        self.name = TRANSFORMERS if fits else REFERENCE
        self._theirs = _transformers_model(model) if fits else None
        self._rounding: Any = None  # the same in bfloat16, made when it is asked for

    @torch.no_grad()
    def decode(self, prompt: Sequence[int], new_tokens: int, eos: Sequence[int]) -> list[int]:
        """Up to `new_tokens` tokens after the prompt; the first of `eos` ends it and is kept."""
        with threads_for(self._nbytes):
            if self._theirs is None:
                source = self._model.source
                return greedy_decode(source.geometry, source.tensor, prompt, new_tokens, eos=eos)
            ids = torch.tensor([list(prompt)])
            out = self._theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=list(eos) or None,
                pad_token_id=0,
            )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    def compare(self, row: int, prompt: Sequence[int], tokens: Sequence[int], eos: Sequence[int]) -> Divergence | None:
        """Where `tokens`, decoded after `prompt`, leave the oracle's; None if nowhere."""
        expected = self.decode(prompt, len(tokens), eos)
        for index in range(max(len(tokens), len(expected))):
            got = tokens[index] if index < len(tokens) else None
            wanted = expected[index] if index < len(expected) else None
            if got != wanted:
                return Divergence(
                    row, index, got, wanted, expected, self._margin([*prompt, *expected[:index]], got, wanted)
                )
        return None

    @torch.no_grad()
    def noise(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """What bfloat16 does at most to the margin between the two largest logits, before any of `tokens`.

        By transformers' own model in bfloat16 and float32; there has to be one.
        """
        assert self._theirs is not None
        if self._rounding is None:
            self._rounding = copy.deepcopy(self._theirs).to(torch.bfloat16)
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        exact, rounded = (each(ids).logits[0, len(prompt) - 1 :].float() for each in (self._theirs, self._rounding))
        first, second = exact.topk(2).indices.unsqueeze(-1).unbind(1)
        margins = [(logits.gather(1, first) - logits.gather(1, second)) for logits in (exact, rounded)]
        return float((margins[0] - margins[1]).abs().max())

    @torch.no_grad()
    def _margin(self, context: list[int], got: int | None, wanted: int | None) -> float:
        if self._theirs is not None:
            logits = self._theirs(torch.tensor([context])).logits[0, -1]
        else:
            source = self._model.source
            logits = reference_forward(source.geometry, source.tensor, torch.tensor(context), keep=1)[0]
        logits = logits.float()
        if got is not None and wanted is not None:
            return float(logits[wanted] - logits[got])
        first, second = logits.topk(2).values.tolist()
        return float(first - second)


def _transformers_model(model: Model) -> Any:
    """`Cohere2MoeForCausalLM`, float32, eager attention; a checkpoint is read by transformers' own loader."""
    from transformers import AutoConfig
    from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model.folder)
    config.sliding_window = model.geometry.window_keys  # transformers counts the query's own key
    if model.weights_label == "checkpoint":
        theirs = Cohere2MoeForCausalLM.from_pretrained(
            model.folder, config=config, dtype=torch.float32, attn_implementation="eager"
        )
    else:
        config._attn_implementation = "eager"
        theirs = Cohere2MoeForCausalLM(config).float()
        theirs.load_state_dict(transformers_state(model.geometry, model.source.tensor))
    theirs.generation_config = type(theirs.generation_config)()  # the folder's may sample
    return theirs.eval()


def transformers_state(geometry: Geometry, get: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """A source's tensors in float32, under the names of transformers' modules."""
    state = {name: get(name).float() for name in (tensors.EMBED, tensors.FINAL_NORM)}
    state["lm_head.weight"] = state[tensors.EMBED]  # tied
    for layer in range(geometry.layers):
        state |= {f"model.layers.{layer}.{name}": w.float() for name, w in layer_state(geometry, get, layer).items()}
    return state


def layer_state(geometry: Geometry, get: Callable[[str], torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """One layer's tensors under the names of transformers' decoder layer, which stacks its experts."""
    prefix = f"model.layers.{layer}."
    names = [name for name in tensors.tensor_shapes(geometry) if name.startswith(prefix) and ".experts." not in name]
    state = {name.removeprefix(prefix): get(name) for name in names}
    if layer in geometry.sparse_layers:
        gate, up, down = (
            [get(tensors.expert(layer, e, p)) for e in range(geometry.experts)] for p in ("gate", "up", "down")
        )
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        state["mlp.experts.down_proj"] = torch.stack(down)
    return state
