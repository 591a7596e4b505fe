"""Time the prefill's heavy kernels one by one, each with several tile sizes, beside a plain product by torch.

With gpu=cpu they run in Triton's interpreter, by the host's clock: that every tile works, and nothing of its speed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from experiments.device_clock import one_by_one
from experiments.device_weights import open_weights, pack
from experiments.prefill_rates import Matrix
from experiments.prefill_rig import device_of, engine_on
from experiments.unread import PLANNED, require_greedy, require_router, require_untouched
from mk.config import Config
from mk.kernel.step_params import KV_BLOCK
from mk.kv import KINDS, PageAllocator, blocks_of, kv_layers
from mk.model.geometry import Geometry
from mk.model.packing import PackedWeights
from mk.results.runs import RunFolder
from mk.validation import require_one_of
from prefill.chunks import Piece, Prompt, token_tiles
from prefill.tiles import HOPPER, AttentionTile, ProductTile, Tiles
from prefill.triton_prefill import TritonPrefill

PLAIN = (
    ProductTile(128, 256, 64, warps=8, stages=4),
    ProductTile(128, 256, 64, warps=8, stages=3),
    ProductTile(128, 256, 64, warps=8, stages=4, group=16),
    ProductTile(128, 128, 64, warps=4, stages=3),
    ProductTile(256, 128, 64, warps=8, stages=4),
    None,  # unpacked for torch's product
)
EXPERTS = (
    ProductTile(128, 256, 64, warps=8, stages=4, tail=64),
    ProductTile(128, 256, 64, warps=8, stages=4),
    ProductTile(128, 256, 64, warps=8, stages=3, tail=64),
    ProductTile(128, 256, 64, warps=8, stages=4, group=16, tail=64),
    ProductTile(128, 128, 64, warps=4, stages=3, tail=64),
    ProductTile(128, 128, 64, warps=8, stages=3, tail=64),
    ProductTile(64, 256, 64, warps=4, stages=3),
)
ATTENTIONS = (
    AttentionTile(16, 64, warps=8, stages=3),
    AttentionTile(16, 64, warps=8, stages=2),
    AttentionTile(16, 128, warps=8, stages=2),
    AttentionTile(8, 64, warps=4, stages=2),
    AttentionTile(16, 64, warps=4, stages=3),
    AttentionTile(32, 64, warps=8, stages=2),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel to be timed, and the tiles it can have."""

    kernel: str
    tiles: Sequence[ProductTile | AttentionTile | None]
    field: tuple[str, ...]  # of `Tiles` that the tile goes to
    launch: Callable[[], None]


def main(cfg: Config) -> int:
    """Exit status 0; whatever is wrong is an MkError."""
    for kernel in cfg.experiment.kernels:
        require_one_of("experiment.kernels", kernel, ("qkv", "o", "up", "down", "attention_full", "attention_sliding"))
    require_router(cfg)
    require_greedy(cfg)
    require_untouched(cfg, PLANNED)
    device = device_of(cfg)
    weights = pack(open_weights(cfg, device), device)
    matrix = Matrix.measure(device)
    print(f"{matrix.told}\n{_line(*COLUMNS)}", flush=True)
    with RunFolder.create(cfg) as run:
        for kernel, tile, times in sweep(cfg, weights):
            raw = {"kind": "kernel_launches", "launch_ms": times, **matrix.raw}
            axes = {"batch": 1, "context": [cfg.experiment.tokens], "kernel": kernel, "tile": tile}
            row = run.append_row(run.measured(raw, engine=engine_on(device), dtype="bfloat16", **axes), raw)
            us = (row.p50_ms or 0.0) * 1e3
            print(_line(kernel, tile, f"{us:.1f}", f"{row.tflop_s:.3g}", f"{row.pct_matrix:.1f}"), flush=True)
        print(f"run folder: {run.path}")
    return 0


def sweep(cfg: Config, weights: PackedWeights) -> Iterator[tuple[str, str, list[float]]]:
    """(kernel, tile, milliseconds of its launches), until the time is up."""
    settings, g, device = cfg.experiment, weights.geometry, weights.slots.device
    tokens, blocks, started = settings.tokens, blocks_of(settings.tokens), time.perf_counter()
    shape = {kind: (blocks, max(1, len(kv_layers(g, kind))), g.kv_heads, 2, KV_BLOCK) for kind in KINDS}
    pools = {kind: torch.zeros(shape[kind], dtype=torch.bfloat16, device=device) for kind in KINDS}
    prefill = TritonPrefill(weights, pools, tokens, tokens, products="torch")  # which brings the scratch for that
    ids = torch.randint(g.vocab, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    pages = PageAllocator(g, dict.fromkeys(KINDS, blocks), 1, blocks, seed=0)
    pages.reserve(0, tokens, since=0)
    tables = {kind: torch.from_numpy(pages.table[kind]).short().to(device) for kind in KINDS}
    prefill.forward(pages, [Prompt(0, ids)])  # real activations, and a routing
    for case in _cases(g, tokens, prefill, tables):
        if case.kernel not in settings.kernels:
            continue
        for tile in case.tiles:
            if time.perf_counter() - started > settings.time_limit_s:
                print("the time is up", flush=True)
                return
            prefill.launch.products = "torch" if tile is None else "packed"
            prefill.launch.tiles = _with(case, tile)
            if case.kernel in ("up", "down"):
                prefill.launch.route(g.sparse_layers[0], None)
            try:
                times = one_by_one(case.launch, settings.repeats, device)
            except Exception as error:  # a tile that does not fit says so, and the next one is tried
                print(f"{case.kernel} {_name(tile)}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                continue
            yield case.kernel, _name(tile), times
        prefill.launch.tiles = HOPPER


def _with(case: Case, tile: ProductTile | AttentionTile | None) -> Tiles:
    """The tiles with the case's own exchanged. The row tiles of up and down have one height."""
    if tile is None:
        return HOPPER
    tiles = dataclasses.replace(HOPPER, **dict.fromkeys(case.field, tile))
    if isinstance(tile, ProductTile) and case.kernel in ("up", "down"):
        up, down = (dataclasses.replace(t, m=tile.m, tail=min(t.tail, tile.m // 2)) for t in (tiles.up, tiles.down))
        tiles = dataclasses.replace(tiles, up=up, down=down, large_rows=0)
    return tiles


def _cases(g: Geometry, tokens: int, prefill: TritonPrefill, tables: dict[str, torch.Tensor]) -> list[Case]:
    launch = prefill.launch
    sparse = g.sparse_layers[0]

    def plain(kernel: str, launched: Callable[[], None]) -> Case:
        return Case(kernel, PLAIN, ("large", "small"), launched)

    def experts(kernel: str, launched: Callable[[], None]) -> Case:
        return Case(kernel, EXPERTS, (kernel,), launched)

    def attention(kind: str) -> Case:
        layer = next(i for i in reversed(range(g.layers)) if g.layer_kinds[i] == kind)

        def launched() -> None:
            tiles = rows_of[launch.tiles.attention.tokens]
            launch.attention(layer, prefill.rope, prefill.pools[kind], tables[kind], tiles)

        return Case(f"attention_{kind}", ATTENTIONS, ("attention",), launched)

    pieces = [Piece(0, 0, 0, tokens, True)]
    heights = {tile.tokens for tile in ATTENTIONS}
    rows_of = {n: torch.from_numpy(token_tiles(pieces, n)).to(prefill.device) for n in heights}
    return [
        experts("up", lambda: launch.up(sparse)),
        experts("down", lambda: launch.down(sparse)),
        attention("full"),
        attention("sliding"),
        plain("qkv", lambda: launch.qkv(sparse)),
        plain("o", lambda: launch.o(sparse)),
    ]


COLUMNS = ("kernel", "tile", "p50 us", "TFLOP/s", "% of torch")


def _line(kernel: str, tile: str, *figures: str) -> str:
    return f"{kernel:18}{tile:32}" + "".join(figure.rjust(12) for figure in figures)


def _name(tile: ProductTile | AttentionTile | None) -> str:
    if tile is None:
        return "unpacked, torch"
    if isinstance(tile, AttentionTile):
        return f"{tile.tokens} tokens x {tile.keys} keys, {tile.warps}w {tile.stages}s"
    return f"{tile.m}x{tile.n}x{tile.k}, {tile.warps}w {tile.stages}s g{tile.group} t{tile.tail}"
