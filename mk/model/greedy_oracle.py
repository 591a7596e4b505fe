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
    """A token of a row that the oracle chooses otherwise after the row's own tokens before it."""

    row: int
    index: int  # among the new tokens
    got: int
    expected: int | None  # None: the oracle's ended before
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

    def compare(self, row: int, prompt: Sequence[int], tokens: Sequence[int], eos: Sequence[int]) -> list[Divergence]:
        """Where `tokens`, decoded after `prompt`, are not the oracle's, in order; nowhere if they are its decode.

        After the first difference the oracle goes on from the row's own tokens: a later one is not the first's doing.
        What stands behind an end is one difference.
        """
        expected = self.decode(prompt, len(tokens), eos)
        first = next((n for n, token in enumerate(tokens) if n >= len(expected) or token != expected[n]), None)
        if first is None:
            return []
        found: list[Divergence] = []
        for index, logits in enumerate(self._forced(prompt, tokens)[first:], first):
            got, ended = tokens[index], index > 0 and tokens[index - 1] in eos
            best = logits.topk(2)
            if ended:
                return [*found, Divergence(row, index, got, None, float(best.values[0] - best.values[1]))]
            wanted = expected[index] if index == first else int(best.indices[0])
            if got != wanted:
                found.append(Divergence(row, index, got, wanted, float(logits[wanted] - logits[got])))
        return found

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
    def _forced(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """float32 logits [tokens, vocab] that each of `tokens` was to be chosen from, after those before it."""
        ids = torch.tensor([*prompt, *tokens[:-1]])
        if self._theirs is not None:
            logits: torch.Tensor = self._theirs(ids[None], logits_to_keep=len(tokens)).logits[0]
        else:
            source = self._model.source
            logits = reference_forward(source.geometry, source.tensor, ids, keep=len(tokens))
        return logits.float()


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
