"""A sequence through all layers: in float32, and in bfloat16 by transformers, with float32's experts and freely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.distances import distance
from experiments.kernel_checks import Bfloat16Reference, differing_sets
from experiments.layer_arms import History, ReferenceArm, TransformersArm
from mk.model.geometry import Geometry
from mk.model.reference import Reference


@dataclass(frozen=True, slots=True)
class Told:
    """What the references say of a sequence. Logits are those after some of its positions, float32 [vocab] each."""

    tokens: list[int]
    ids: Tensor  # int32 [layers, tokens, top_k] of float32; a dense layer's are 0
    free_ids: Tensor  # of transformers, which all that it chose before has led there
    exact: dict[int, Tensor]
    rounded: dict[int, Tensor]  # with float32's ids

    def noise(self, position: int) -> float:
        """How far bfloat16 is from float32."""
        return distance(self.rounded[position], self.exact[position])

    def flips(self, ids: Tensor) -> tuple[int, int]:
        """Layers and tokens that have another set of experts than float32: in `ids`, of the first tokens, and in
        transformers'."""
        n = ids.shape[1]
        exact = self.ids[:, :n].flatten(0, 1)
        return differing_sets(ids.flatten(0, 1), exact), differing_sets(self.free_ids[:, :n].flatten(0, 1), exact)


class Streams:
    """Residuals of all tokens at once, layer by layer."""

    def __init__(self, g: Geometry, get: Callable[[str], Tensor], tokens: Sequence[int], device: torch.device) -> None:
        """get: a tensor by its name, on the device."""
        self.geometry, self.tokens = g, list(tokens)
        self._get, self._none = get, History.none(g, device)
        self.x = Reference(g, get).embed(torch.tensor(self.tokens))  # float32
        self._forced = self._free = self.x.bfloat16()
        self._ids = torch.zeros(g.layers, len(self.tokens), max(1, g.top_k), dtype=torch.int32, device=device)
        self._free_ids = self._ids.clone()

    def layer(self, layer: int, exact: ReferenceArm, rounded: TransformersArm) -> None:
        """Take all residuals through the next layer."""
        out, _ = exact.run(layer, self.x)
        forced = rounded.run(self._forced, self._none, out.choice)
        free = rounded.run(self._free, self._none, None)
        self.x = self.x + (out.attention + out.ffn)
        # in the order of transformers' decoder layer
        self._forced = self._forced + forced.attention + forced.ffn
        self._free = self._free + free.attention + free.ffn
        if out.choice is not None and free.choice is not None:
            self._ids[layer], self._free_ids[layer] = out.choice.int(), free.choice.int()

    def told(self, positions: Sequence[int]) -> Told:
        """After the last layer, with the logits after the tokens at `positions`."""
        wanted = sorted(set(positions))
        exact = Reference(self.geometry, self._get).logits(self.x[wanted])
        rounded = Bfloat16Reference(self.geometry, self._get).logits(self._forced[wanted])
        return Told(
            self.tokens,
            self._ids,
            self._free_ids,
            dict(zip(wanted, exact, strict=True)),
            dict(zip(wanted, rounded, strict=True)),
        )
