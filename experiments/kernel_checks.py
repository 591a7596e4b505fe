"""Checks of the kernel on the model, library and program that are about to be timed.

A sequence of tokens is decoded, teacher-forced, from an empty context, in every row of the program; the rows start at
different steps, so that rows are active beside inactive ones. Expert ids are replayed from the float32 reference, so
that a choice between two almost equal experts is not taken for an error. As every row decodes the same tokens, every
row must give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mk.errors import MkError
from mk.kernel.runtime import Runtime
from mk.kernel.step_params import MAX_ROWS
from mk.kv import KINDS, PAGE, PageAllocator, blocks_of
from mk.model import tensors
from mk.model.geometry import Geometry
from mk.model.reference import LayerOutput, Reference, ReferenceCache, rms_norm, top_k
from mk.model.tensors import WeightSource
from mk.schedule.lower import Program

Starts = tuple[int | None, ...]
"""Step at which each row of a batch begins; None = it stays inactive."""


def starts_of(rows: int) -> Starts:
    """Of a batch of `rows`: no two rows of at most 20 begin together, and from 4 rows on, row 1 stays inactive."""
    return tuple(None if rows >= 4 and row == 1 else 7 * row % 20 for row in range(rows))


STARTS = starts_of(4)
NOISE_RATIO = 1.5  # of the reference's own error in bfloat16 that the kernel may have
SLACK = 5  # positions whose expert set may differ from the reference's more often than bfloat16's
POISONED = {  # activations, and the geometry's width where a row's padding behind it must stay zero
    "x": "hidden",
    "sumsq": None,
    "qkv": None,
    "partial_o": None,
    "partial_ml": None,
    "attn_out": "q_width",
    "router_part": None,
    "hidden": "expert_ffn",
    "dense_hidden": "dense_ffn",
    "oproj_out": None,
    "ffn_part": None,
    "ffn_out": None,
    "logits": None,
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a program of `rows`: verdicts by name; relative distance of the logits from float32, median and largest."""

    rows: int
    checks: dict[str, bool]
    error: tuple[float, float]
    error_bf16: tuple[float, float]

    def require(self) -> None:
        """Raises MkError naming the checks that failed."""
        failed = [name for name, passed in self.checks.items() if not passed]
        if failed:
            raise MkError(
                f"batch {self.rows}: the kernel failed {', '.join(failed)}: logits are {self.error[0]:.2e} (at most "
                f"{self.error[1]:.2e}) off float32, bfloat16 {self.error_bf16[0]:.2e} (at most "
                f"{self.error_bf16[1]:.2e})",
                hint="no row is written for a kernel that is wrong",
            )


@dataclass(frozen=True, slots=True)
class Oracle:
    """What the reference says of a sequence of T tokens."""

    tokens: Tensor  # int64 [T], on the CPU
    logits: Tensor  # float32 [T, vocab]
    logits_bf16: Tensor  # the same computed in bfloat16 with the ids of float32
    ids: Tensor  # int32 [T, layers, top_k] of float32; a dense layer's are 0
    ids_bf16: Tensor  # the choice of bfloat16 on the first sparse layer, int32 [T, top_k]


class Bfloat16Reference(Reference):
    """The reference rounded to bfloat16 where transformers rounds: products, residual, experts; not inside of norms."""

    def __init__(self, geometry: Geometry, weights: tensors.Weights) -> None:
        super().__init__(geometry, weights)
        self.dtype = torch.bfloat16

    def layer(
        self, layer: int, x: Tensor, start: int, cache: ReferenceCache, expert_ids: Tensor | None = None
    ) -> LayerOutput:
        h = self._norm(x, tensors.norm(layer))
        attention = self._attention(layer, h, start, cache)
        if self.geometry.mlp_kinds[layer] == "dense":
            gate, up, down = (self.weight(tensors.dense(layer, p)) for p in ("gate", "up", "down"))
            ffn = (torch.nn.functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
            return LayerOutput(attention, ffn, None, None)
        logits = h @ self.weight(tensors.router(layer)).T
        ids = top_k(logits, self.geometry.top_k) if expert_ids is None else expert_ids
        return LayerOutput(attention, self._experts(layer, h, logits, ids), logits, ids)

    def logits(self, x: Tensor) -> Tensor:
        h = self._norm(x, tensors.FINAL_NORM)
        return (h @ self.weight(tensors.EMBED).T).float() * self.geometry.logit_scale

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x.float(), self.weight(name).float(), self.geometry.rms_eps).to(self.dtype)


@dataclass(slots=True)
class OneLayer:
    """A source's tensors on the device, each kept until `forget`: a layer is made once for all who read it."""

    source: WeightSource
    device: torch.device
    held: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str) -> Tensor:
        if name not in self.held:
            self.held[name] = self.source.tensor(name).to(self.device)
        return self.held[name]

    def forget(self) -> None:
        self.held.clear()


@torch.no_grad()
def consult(source: WeightSource, tokens: Tensor, device: torch.device) -> Oracle:
    """Run both references over `tokens` int64 [T], layer by layer."""
    g, layers = source.geometry, OneLayer(source, device)
    exact, rounded = Reference(g, layers.get), Bfloat16Reference(g, layers.get)
    caches = ReferenceCache(), ReferenceCache()
    x, y = exact.embed(tokens), rounded.embed(tokens)
    ids = torch.zeros(len(tokens), g.layers, max(1, g.top_k), dtype=torch.int32, device=device)
    ids_bf16 = ids[:, 0].clone()
    for layer in range(g.layers):
        layers.forget()
        out = exact.layer(layer, x, 0, caches[0])
        noisy = rounded.layer(layer, y, 0, caches[1], out.expert_ids)
        x, y = x + (out.attention + out.ffn), y + (noisy.attention + noisy.ffn)
        if out.expert_ids is not None:
            ids[:, layer] = out.expert_ids.int()
        if g.sparse_layers and layer == g.sparse_layers[0] and noisy.router_logits is not None:
            ids_bf16 = top_k(noisy.router_logits, g.top_k).int()
    layers.forget()
    return Oracle(tokens, exact.logits(x), rounded.logits(y), ids, ids_bf16)


def decode(
    runtime: Runtime,
    program: Program,
    pages: PageAllocator,
    oracle: Oracle,
    starts: Sequence[int | None],
    replay: bool = True,
    idle_token: int = 0,
    epoch: int = 0,
) -> tuple[dict[int, Tensor], Tensor]:
    """Decode the oracle's tokens, teacher-forced, in every row that has a start; pages come and go as in an engine.

    Gives each such row's logits float32 [T, vocab], and the expert ids the kernel took in the first of them, int32
    [T, layers, top_k]. `idle_token` stands in rows that are inactive at a step; steps count from `epoch`. Raises
    StepAborted, and MkError for a status.
    """
    g, length = runtime.geometry, len(oracle.tokens)
    active = {row: start for row, start in enumerate(starts) if start is not None}
    first = min(active)
    logits = {row: torch.empty(length, g.vocab, device=runtime.device) for row in active}
    shape = (max(active.values()) + length, g.layers, MAX_ROWS, oracle.ids.shape[-1])
    ids = torch.zeros(shape, dtype=torch.int32, device=runtime.device)
    taken = torch.zeros_like(ids)
    for row, start in active.items():
        ids[start : start + length, :, row] = oracle.ids
    runtime.load(program, epoch)
    tokens = oracle.tokens.tolist()
    runtime.stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(runtime.stream):
        for step in range(shape[0]):
            places = [-1 if start is None or not 0 <= step - start < length else step - start for start in starts]
            for row, place in enumerate(places):
                if place >= 0:
                    pages.release_window(row, place)
                    pages.reserve(row, place + 1)
            if any(place % PAGE == 0 for place in places):
                runtime.set_tables(pages.table.table)
            runtime.set_sequences(
                [place + 1 for place in places], [tokens[place] if place >= 0 else idle_token for place in places]
            )
            runtime.force_routing(ids[step] if replay else None)
            runtime.publish_routing(taken[step])
            runtime.launch()
            runtime.finish()
            runtime.require_healthy(f"step {step}")
            for row, place in enumerate(places):
                if place >= 0:
                    logits[row][place] = runtime.logits(row)
    runtime.stream.synchronize()
    runtime.force_routing(None)
    for row in active:
        pages.free(row)
    return logits, taken[active[first] : active[first] + length, :, first]


def run_checks(runtime: Runtime, batch: Program, alone: Program, oracle: Oracle, seed: int = 0) -> Outcome:
    """Check `batch`, a program of any number of rows; `alone` is the one-row program of the same plan.

    Row 0 is compared with the oracle, all rows with row 0 bit by bit. Verdicts that a batch of one cannot fail are left
    out. Fills pools and pages.
    """
    counts = {kind: len(runtime[f"pool_{kind}"]) for kind in KINDS}
    g, rows, blocks = runtime.geometry, batch.shape.rows, blocks_of(len(oracle.tokens))
    starts = starts_of(rows)
    mirrored = tuple(start or 0 for start in reversed(starts))  # here the idle row works too

    def pages(rows: int, order: int) -> PageAllocator:
        return PageAllocator(g, counts, rows, blocks, seed=seed + order)

    def agree(order: int, starts: Starts, idle_token: int = 0) -> bool:
        """Every active row gives the bits of `base`, whatever pages it got."""
        logits, _ = decode(runtime, batch, pages(rows, order), oracle, starts, idle_token=idle_token)
        return all(same_bits(base, row) for row in logits.values())

    fill(runtime, 0.01)
    plain, _ = decode(runtime, batch, pages(rows, 0), oracle, starts)
    base = plain.pop(min(plain))
    error, noise = relative_error(base, oracle.logits), relative_error(oracle.logits_bf16, oracle.logits)
    checks = {"logits_within_noise": all(a <= NOISE_RATIO * b for a, b in zip(error, noise, strict=True))}
    if rows > 1:
        checks["bits_rows"] = all(same_bits(base, row) for row in plain.values())
        single, _ = decode(runtime, alone, pages(1, 2), oracle, (0,))
        checks["bits_alone"] = same_bits(base, single[0])
        del single
    del plain
    checks["bits_repeat"] = agree(0, starts)
    checks["bits_permuted"] = agree(1, mirrored)
    poison(runtime)
    checks["bits_poisoned"] = agree(3, starts, idle_token=0x7FFFFFFF)
    if g.sparse_layers:
        _, taken = decode(runtime, batch, pages(rows, 4), oracle, starts, replay=False)
        layer = g.sparse_layers[0]  # later ones see what an earlier choice has changed
        exact = oracle.ids[:, layer]
        allowed = NOISE_RATIO * differing_sets(oracle.ids_bf16, exact) + SLACK
        checks["router_within_noise"] = differing_sets(taken[:, layer], exact) <= allowed
    return Outcome(rows, checks, error, noise)


def fill(runtime: Runtime, std: float, seed: int = 0) -> None:
    """A seed's normal noise in every page: the packing of a page permutes its elements, which noise does not mind."""
    generator = torch.Generator(runtime.device).manual_seed(seed)
    with torch.cuda.stream(runtime.stream):
        for kind in KINDS:
            runtime[f"pool_{kind}"].normal_(0, std, generator=generator)


def poison(runtime: Runtime) -> None:
    """NaN in every page and in every activation that a step must write before it reads."""
    with torch.cuda.stream(runtime.stream):
        for kind in KINDS:
            runtime[f"pool_{kind}"].fill_(float("nan"))
    poison_activations(runtime)


def poison_activations(runtime: Runtime) -> None:
    """NaN in every activation that a step must write before it reads."""
    g = runtime.geometry
    with torch.cuda.stream(runtime.stream):
        for name, width in POISONED.items():
            buffer = runtime[name]
            buffer[..., : buffer.shape[-1] if width is None else getattr(g, width)] = float("nan")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def relative_error(logits: Tensor, exact: Tensor) -> tuple[float, float]:
    """Median and largest |y - y*| / |y*| of the positions of [T, vocab]. NaN stays NaN, which passes no bound."""
    distance = (logits - exact).norm(dim=-1) / exact.norm(dim=-1)
    return distance.median().item(), distance.max().item()


def differing_sets(ids: Tensor, exact: Tensor) -> int:
    """Positions [T, top_k] whose sets of ids differ."""
    return int((ids.sort(-1).values != exact.sort(-1).values).any(-1).sum())
