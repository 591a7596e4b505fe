"""Time prefill in Triton: prompts alone and packed, after checking it on the same weights against the reference.

The rate counts 2 operations an active weight and token and 4 a visible (query, key) pair and dim, and stands beside
that of a large product by torch in the same run. TTFT is by the host's clock, from the call to the first tokens on the
host. With gpu=cpu the kernels run in Triton's interpreter, whose times say nothing of theirs on a card.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.device_clock import stopwatch
from experiments.device_weights import open_weights, pack
from experiments.kernel_checks import NOISE_RATIO, consult, relative_error, same_bits
from experiments.prefill_rates import Matrix
from experiments.prefill_rig import Rig, device_of, engine_on
from experiments.unread import PLANNED, require_greedy, require_router, require_untouched
from mk.config import Config
from mk.errors import MkError
from mk.model.packing import PackedWeights
from mk.model.tensors import WeightSource
from mk.results.rows import Row
from mk.results.runs import RunFolder
from prefill.chunks import Prompt

SHORT = 17  # tokens of a prompt that the checked one is packed with, and where that is cut


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of the timed calls: by device timestamps, and by the host's clock until the tokens are there."""

    device: list[float]
    host: list[float]


class Bench:
    """Prefill with pages for a number of prompts of one length, all of them NaN before."""

    def __init__(self, cfg: Config, weights: PackedWeights) -> None:
        self.cfg, self.weights, self.geometry = cfg, weights, weights.geometry

    def open(self, slots: int, length: int, chunk: int | None = None) -> Rig:
        chunk = chunk or self.cfg.prefill.chunk
        return Rig.for_prompts(self.weights, slots, length, chunk, products=self.cfg.prefill.products or "packed")

    def tokens(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        tokens: list[int] = torch.randint(self.geometry.vocab, (length,), generator=generator).tolist()
        return tokens

    def measure(self, slots: int, length: int) -> Timing:
        """Of calls with fresh pages each; the first, which compiles, is not counted."""
        settings = self.cfg.experiment
        rig, device = self.open(slots, length), self.weights.slots.device
        prompts = [Prompt(slot, self.tokens(length, slot)) for slot in range(slots)]
        timing = Timing([], [])
        for repeat in range(settings.repeats + 1):
            with stopwatch(device) as device_ms:
                started = time.perf_counter()
                logits = rig.prefill.forward(rig.pages, prompts)
            best = logits.max(-1)
            finite = best.values.isfinite().all().item()  # and so the tokens are on the host
            host = (time.perf_counter() - started) * 1e3
            for slot in range(slots):
                rig.pages.free(slot)
            if not finite:
                raise MkError(f"{slots} x {length} tokens: a logit is not finite")
            if repeat:
                timing.device.append(device_ms())
                timing.host.append(host)
            if sum(timing.host) > settings.time_limit_s * 1e3:
                break
        return timing


def main(cfg: Config) -> int:
    """Exit status 0; whatever is wrong is an MkError."""
    if cfg.prefill.name != "triton":
        raise MkError(f"prefill_throughput times Triton's, not prefill={cfg.prefill.name}", hint="prefill=triton")
    require_router(cfg)
    require_greedy(cfg)
    require_untouched(cfg, PLANNED)
    device = device_of(cfg)
    settings, source = cfg.experiment, open_weights(cfg, device)
    bench = Bench(cfg, pack(source, device))
    with RunFolder.create(cfg) as run:
        checks, error = check(bench, source, settings.check_tokens)
        matrix = Matrix.measure(device)
        print(f"{matrix.told}\n{_line(*COLUMNS)}", flush=True)
        for rows, length in [(1, n) for n in settings.lengths] + [(settings.packed_rows, n) for n in settings.packed]:
            timing = bench.measure(rows, length)
            times = {"call_ms": timing.device, "host_ms": timing.host}
            raw = {"kind": "prefill_calls", **times, **matrix.raw}
            row = run.measured(
                raw,
                engine=engine_on(device),
                dtype="bfloat16",
                batch=rows,
                context=[length] * rows,
                checks=checks,
                logits_error=error[0],
                logits_error_bf16=error[1],
            )
            run.append_row(row, raw)
            print(_cells(row), flush=True)
        print(f"run folder: {run.path}")
    return 0


def check(bench: Bench, source: WeightSource, length: int) -> tuple[dict[str, bool], tuple[float, float]]:
    """Verdicts, and the relative distance of the last logits from float32, of prefill and of bfloat16's reference.

    Expert ids are replayed for the distance. The bits must be those of the prompt alone also beside another, in other
    pages, cut elsewhere and continued; products=torch does not promise that, so its verdict is left out. Raises MkError
    when one fails.
    """
    started, tokens = time.perf_counter(), bench.tokens(length, seed=1)
    oracle = consult(source, torch.tensor(tokens), bench.weights.slots.device)
    print(f"reference of {length} tokens in {time.perf_counter() - started:.1f} s", flush=True)
    ids = oracle.ids.transpose(0, 1).contiguous()
    rig = bench.open(1, length)
    logits = rig.prefill.forward(rig.pages, [Prompt(0, tokens)], ids)
    error, noise = relative_error(logits, oracle.logits[-1:])[1], relative_error(oracle.logits_bf16, oracle.logits)[1]
    print(f"last logits off float32: prefill {error:.2e}, bfloat16 at most {noise:.2e}", flush=True)
    checks = {"logits_within_noise": error <= NOISE_RATIO * noise}
    rig.pages.free(0)
    alone = rig.prefill.forward(rig.pages, [Prompt(0, tokens)])
    if bench.cfg.prefill.products == "packed":
        checks["bits_packed"] = same_bits(_packed(bench, tokens), alone[0])
        checks["bits_continued"] = same_bits(_continued(bench, tokens), alone[0])
    failed = [name for name, passed in checks.items() if not passed]
    if failed:
        raise MkError(f"prefill failed {', '.join(failed)}", hint="no row is written for a prefill that is wrong")
    return checks, (error, noise)


def _packed(bench: Bench, tokens: list[int]) -> Tensor:
    """Logits [vocab] after the tokens beside a short prompt, chunks ending inside of both."""
    rig = bench.open(2, len(tokens), chunk=len(tokens) // 2 + 5)
    short = bench.tokens(min(SHORT, len(tokens)), seed=2)
    return rig.prefill.forward(rig.pages, [Prompt(1, short), Prompt(0, tokens)])[1]


def _continued(bench: Bench, tokens: list[int]) -> Tensor:
    """Logits [vocab] of a second call that continues a first."""
    rig = bench.open(1, len(tokens))
    cut = min(SHORT, len(tokens) - 1)
    rig.prefill.forward(rig.pages, [Prompt(0, tokens[:cut])])
    return rig.prefill.forward(rig.pages, [Prompt(0, tokens[cut:], cut)])[0]


COLUMNS = ("prompts", "tokens each", "p50 ms", "TTFT ms", "tokens/s", "TFLOP/s", "% of torch", "calls")


def _cells(row: Row) -> str:
    figures = (row.p50_ms, row.ttft_ms, row.prefill_tok_s, row.tflop_s, row.pct_matrix)
    shown = [f"{figure:.1f}" if figure >= 1 else f"{figure:.2g}" for figure in figures if figure is not None]
    return _line(str(row.batch), str(row.context[0]), *shown, str(row.steps))


def _line(*cells: str) -> str:
    return "  ".join(cell.rjust(max(9, len(name))) for cell, name in zip(cells, COLUMNS, strict=True))
