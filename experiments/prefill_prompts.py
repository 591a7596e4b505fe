"""Whole prompts through Triton's prefill: distance of the last logits, the step that follows, and bits.

A prompt's bits are compared with its own alone when all prompts are packed into one call, cut into small chunks, and
continued from a cached beginning. No two prompts have the same tokens, so that one cannot pass for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.distances import distance
from experiments.kernel_checks import same_bits
from experiments.prefill_rig import Rig, poison, same_pages
from experiments.prefill_steps import NextStep
from experiments.prefill_streams import Told
from mk.config import Config
from mk.model.packing import PackedWeights
from prefill.chunks import Prompt


def replay(step: NextStep, told: Told, length: int) -> tuple[float, float]:
    """Distances from float32 with its expert ids: of the logits after the first `length` tokens, and of those that
    decoding the next one gives."""
    rig, tokens = step.rig, told.tokens
    rig.clear_pages()
    poison(rig.prefill.launch.acts, rig.geometry)
    ids = told.ids[:, :length].contiguous()
    logits = rig.prefill.forward(rig.pages, [Prompt(0, tokens[:length])], ids)[0]
    following = step.run(length + 1, tokens[length], told.ids[:, length])
    rig.pages.free(0)
    return distance(logits, told.exact[length - 1]), distance(following, told.exact[length])


@dataclass(frozen=True, slots=True)
class Left:
    """What a prefill left of a prompt: its last logits, and all K and V that the next token sees."""

    logits: Tensor
    pages: list[tuple[Tensor, Tensor]]

    def same(self, other: Left) -> bool:
        """Bit by bit, and finite."""
        finite = bool(self.logits.isfinite().all())
        return finite and same_bits(self.logits, other.logits) and same_pages(self.pages, other.pages)


@dataclass(slots=True)
class Bits:
    """Verdicts on prompts by their length, and the experts that the longest one's tokens chose."""

    taken: Tensor  # int32 [layers, tokens, top_k]
    checks: dict[int, dict[str, bool]] = field(default_factory=dict)


def compare_bits(cfg: Config, weights: PackedWeights, tokens: Sequence[int]) -> Bits:
    """The longest of `experiment.lengths` has `tokens`, the others tokens of their own.

    products=torch does not promise bits, and gets no verdict.
    """
    settings, products = cfg.experiment, cfg.prefill.products or "packed"
    lengths, longest = settings.lengths, max(settings.lengths)
    prompts = {length: _tokens(weights.geometry.vocab, length, settings.seed) for length in lengths}
    prompts[longest] = list(tokens[:longest])

    def rig(slots: int, chunk: int, page_seed: int) -> Rig:
        made = Rig.for_prompts(weights, slots, longest, chunk, page_seed, products)
        poison(made.prefill.launch.acts, made.geometry)
        return made

    single, g = rig(1, cfg.prefill.chunk, 0), weights.geometry
    bits = Bits(torch.zeros(g.layers, longest, max(1, g.top_k), dtype=torch.int32, device=weights.slots.device))
    alone: dict[int, Left] = {}
    for length, own in prompts.items():
        taken = bits.taken if length == longest else None
        alone[length] = _left(single, [[Prompt(0, own)]], taken)[0]
        bits.checks[length] = {}
    if products != "packed":
        return bits
    crowd = [Prompt(len(lengths) - 1 - i, own) for i, own in enumerate(prompts.values())]
    for name, chunk in (("bits_packed", cfg.prefill.chunk), ("bits_chunked", settings.small_chunk)):
        found = _left(rig(len(lengths), chunk, 1), [crowd])
        for length, left in zip(prompts, found, strict=True):
            bits.checks[length][name] = left.same(alone[length])
    own = prompts[longest]
    continued = [
        _left(rig(1, cfg.prefill.chunk, 2), [[Prompt(0, own[:at])], [Prompt(0, own[at:], at)]])[0]
        for at in settings.cuts
    ]
    if continued:
        bits.checks[longest]["bits_continued"] = all(left.same(alone[longest]) for left in continued)
    return bits


def _left(rig: Rig, calls: list[list[Prompt]], taken: Tensor | None = None) -> list[Left]:
    """What the last of these calls left of its prompts."""
    rig.clear_pages()
    for prompts in calls:
        logits = rig.prefill.forward(rig.pages, prompts, taken=taken)
    found = [Left(logits[i], rig.visible(prompt.slot, prompt.end)) for i, prompt in enumerate(prompts)]
    for prompt in prompts:
        rig.pages.free(prompt.slot)
    return found


def _tokens(vocab: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed + length)
    tokens: list[int] = torch.randint(vocab, (length,), generator=generator).tolist()
    return tokens
