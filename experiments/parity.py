"""Compare an engine with float32 on logits, teacher-forced: KL, top-1 and NLL, beside what bfloat16 alone costs.

Rows of several contexts decode together, on real text where the weights are a checkpoint, else on random tokens. On a
card the kernel is compared, on a CPU the interpreter (engine.numerics=kernel rounds as the kernel does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from experiments.device_weights import open_weights, pack
from experiments.opening import machine_under_test, plan_for
from experiments.parity_checks import forced_logits, positions, reference_logits
from experiments.prompts import sample_prompts
from experiments.unread import require_greedy, require_router
from mk.config import Config
from mk.engines.cuda import CudaEngine
from mk.engines.interpreted import MachineEngine
from mk.engines.protocol import Engine
from mk.errors import MkError
from mk.kernel.build import build_for
from mk.model.hub import resolve_folder
from mk.model.opening import NANO
from mk.model.tensors import WeightSource
from mk.model.tokenizer import load_tokenizer
from mk.results.rows import Row, dtype_of
from mk.results.runs import RunFolder


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a distance exceeds its bar."""
    settings = cfg.experiment
    require_router(cfg)
    require_greedy(cfg)
    name = machine_under_test(cfg, len(settings.contexts))
    device = torch.device("cuda" if name == "cuda" else "cpu")
    source = open_weights(cfg, device)
    sequences = _sequences(cfg, source, [context + settings.steps for context in settings.contexts])
    references = []
    for tokens in sequences:  # the last token is only what the one before it should have given
        exact, rounded = reference_logits(source, torch.tensor(tokens[:-1]), settings.steps, device)
        references.append((exact.cpu(), rounded.cpu()))
        print(f"reference of {len(tokens) - 1} tokens done", flush=True)
    engine, build_hash = _engine(cfg, source, name, max(map(len, sequences)))
    found = forced_logits(engine, [tokens[:-1] for tokens in sequences], settings.steps)
    with RunFolder.create(cfg) as run:
        rows = []
        for tokens, (exact, rounded), logits in zip(sequences, references, found, strict=True):
            following = torch.tensor(tokens[-settings.steps :])
            tested, floor = (positions(each, exact, following).raw for each in (logits, rounded))
            raw = {"kind": "logits", "tested": tested, "rounded": floor}
            row = run.measured(
                raw,
                engine=engine.name,
                dtype=dtype_of(engine.name, cfg.engine.numerics),
                batch=len(settings.contexts),
                context=[len(tokens) - settings.steps],
                build_hash=build_hash,
            )
            rows.append(run.append_row(row, raw))
        print(f"{table(rows)}\nrun folder: {run.path}")
    return 0 if all(all(row.checks.values()) for row in rows) else 1


def _sequences(cfg: Config, source: WeightSource, lengths: Sequence[int]) -> list[list[int]]:
    """One row's tokens for each length."""
    if source.label == "checkpoint":
        folder = NANO if cfg.model.path is None else resolve_folder(cfg.model.path, cfg.model.revision)
        return sample_prompts(load_tokenizer(folder), lengths)
    generator = torch.Generator().manual_seed(cfg.experiment.seed)
    return [torch.randint(source.geometry.vocab, (length,), generator=generator).tolist() for length in lengths]


def _engine(cfg: Config, source: WeightSource, name: str, context: int) -> tuple[Engine, str | None]:
    """The machine under test with a row for each context, and its library's hash."""
    device = torch.device("cuda" if name == "cuda" else "cpu")
    rows, plan, weights = len(cfg.experiment.contexts), plan_for(cfg, name), pack(source, device)
    if name == "interpreter":
        machine = MachineEngine(
            weights, plan, rows, context, cfg.engine.numerics, cfg.prefill.chunk, prefill=cfg.prefill.name
        )
        return machine, None
    if cfg.prefill.products is None:
        raise MkError("experiment=parity on a card prefills there", hint="prefill=triton")
    library = build_for(cfg, source.geometry, plan.splits)
    windows, products = cfg.engine.ring.windows, cfg.prefill.products
    engine = CudaEngine(weights, library, plan, rows, context, cfg.prefill.chunk, windows=windows, products=products)
    return engine, library.build_hash


def table(rows: Sequence[Row]) -> str:
    columns = (
        ("KL p50", 9),
        ("bf16", 9),
        ("top-1", 6),
        ("bf16", 6),
        ("NLL", 7),
        ("fp32", 7),
        ("dNLL p50", 9),
        ("bf16", 9),
    )
    head = " ".join(["context".rjust(8), *(name.rjust(width) for name, width in columns)])
    lines = [f"{head}  verdict"]
    for row in rows:
        failed = ", ".join(name for name, passed in row.checks.items() if not passed)

        def cell(name: str, form: str, of: Row = row) -> str:
            value = getattr(of, name)
            return format(math.nan if value is None else value, form)

        cells = [f"{row.context[0]:>8}", cell("kl_median", "9.2e"), cell("kl_median_bf16", "9.2e")]
        cells += [cell("top1_agreement", "6.3f"), cell("top1_agreement_bf16", "6.3f"), cell("nll", "7.4f")]
        cells += [cell("nll_float32", "7.4f"), cell("nll_error", "9.2e"), cell("nll_error_bf16", "9.2e")]
        lines.append(" ".join(cells) + f"  {'FAILED ' + failed if failed else 'ok'}")
    return "\n".join(lines)
