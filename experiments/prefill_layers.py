"""Prefill's layers, fed a residual from outside, and how far they are from float32 beside transformers' own.

Contributions are compared before they are added to the residual, keys and values as they lie in their pages. A prompt's
distance is taken twice: over all of its tokens, and at its worst token, which a sum over thousands would hide.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from experiments.kernel_checks import differing_sets
from experiments.layer_arms import LayerTokens
from experiments.prefill_figures import PARTS, Distance, Flips
from experiments.prefill_rig import Rig, poison
from prefill.chunks import Prompt, cut
from prefill.triton_prefill import Place


class PrefillArm:
    """Triton's prefill, one layer of one prompt at a time: NaN in every page and activation before."""

    def __init__(self, rig: Rig) -> None:
        """rig: of one slot."""
        self.rig, self.prefill = rig, rig.prefill

    def chunks(self, layer: int, x: Tensor) -> Iterator[tuple[slice, Place]]:
        """The chunks of a prompt whose residual is x bf16 [tokens, hidden], each entered: its tokens, and their place.

        Its pages are there until the next one is asked for.
        """
        pages, launch = self.rig.pages, self.prefill.launch
        self.rig.clear_pages()
        for (piece,) in cut([Prompt(0, range(len(x)))], self.prefill.chunk):
            pages.reserve(0, piece.hi, since=piece.lo)
            poison(launch.acts, self.rig.geometry)
            launch.enter(layer, x[piece.lo : piece.hi])
            yield slice(piece.lo, piece.hi), self.prefill.place(pages, [piece])
            pages.release_window(0, piece.hi)
        pages.free(0)

    def run(self, layer: int, x: Tensor, ids: Tensor | None) -> LayerTokens:
        """A prompt's layer; ids int64 [tokens, top_k], None in a dense layer."""
        launch, parts = self.prefill.launch, []
        for rows, where in self.chunks(layer, x):
            self.prefill.attention(layer, where)
            self.prefill.ffn(layer, None if ids is None else ids[rows].int())
            attention, ffn = launch.acts.attention[: launch.tokens].clone(), launch.ffn_sum(layer)
            choice = None if ids is None else launch.route(layer, None).clone()
            parts.append((attention, ffn, *self.rig.held(0, layer, rows.start, rows.stop), choice))
        attention, ffn, keys, values, choice = zip(*parts, strict=True)
        return LayerTokens(
            torch.cat(attention),
            torch.cat(ffn),
            torch.cat(keys, dim=1),
            torch.cat(values, dim=1),
            None if ids is None else torch.cat(choice),
        )


class Yardstick:
    """One part of a layer over a long sequence, exact and in bfloat16; prompts are its beginnings."""

    def __init__(self, exact: Tensor, rounded: Tensor) -> None:
        """Both [tokens, width]."""
        self.exact = exact
        self.size = _squares(exact)
        self.rounded = _squares(rounded.float() - exact)

    def measure(self, found: Tensor) -> Distance:
        """Of a prompt's [tokens, width]."""
        n = len(found)
        wrong, size, rounded = _squares(found.float() - self.exact[:n]), self.size[:n], self.rounded[:n]
        whole = [float((part.sum() / size.sum()).sqrt()) for part in (wrong, rounded)]
        worst = [float((part / size).max().sqrt()) for part in (wrong, rounded)]
        return Distance((whole[0], whole[1]), (worst[0], worst[1]), int((wrong / size).argmax()))


def _squares(x: Tensor) -> Tensor:
    """float64 [tokens]."""
    return x.float().square().sum(-1, dtype=torch.float64)


class LayerMeasure:
    """Exact and bfloat16 results of one layer, against which prompts of any length are measured."""

    def __init__(self, exact: LayerTokens, logits: Tensor | None, rounded: LayerTokens) -> None:
        """logits: the router's, float32 [tokens, experts]."""
        self._parts = {name: Yardstick(_rows(exact, name), _rows(rounded, name)) for name in PARTS}
        self._exact, self._rounded, self._logits = exact.choice, rounded.choice, logits

    def distances(self, found: LayerTokens) -> dict[str, Distance]:
        return {name: part.measure(_rows(found, name)) for name, part in self._parts.items()}

    def flips(self, found: LayerTokens) -> Flips | None:
        """None of a dense layer."""
        if self._exact is None or self._rounded is None or self._logits is None or found.choice is None:
            return None
        n = len(found.choice)
        exact, logits = self._exact[:n], self._logits[:n]
        last = logits.gather(1, exact[:, -1:])[:, 0]
        below = last - logits.gather(1, found.choice.long()).amin(-1)
        # with few experts the last logit may be near zero, which is no scale
        scale = torch.maximum(last.abs(), logits.square().mean(-1).sqrt())
        return Flips(
            differing_sets(found.choice.long(), exact),
            differing_sets(self._rounded[:n], exact),
            float((below / scale).max()),
        )


def _rows(of: LayerTokens, part: str) -> Tensor:
    """[tokens, width]; K and V have their heads side by side."""
    values: Tensor = getattr(of, part)
    return values if values.ndim == 2 else values.transpose(0, 1).flatten(1)
