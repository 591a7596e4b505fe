"""Parity on logits: its arithmetic against closed forms, then nano's engines, then engines that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import parity
from experiments.parity_checks import Distance, Positions, positions, reference_logits, verdicts
from mk.compose import load_config
from mk.engines.cuda import CudaEngine
from mk.engines.interpreted import MachineEngine
from mk.model.checkpoint import load_checkpoint
from mk.model.opening import NANO
from mk.model.packing import PackedWeights
from mk.results.rows import Row, read_rows
from tests.device_rig import FakeLibrary, fake_build, fake_device
from tests.promotion import committed, folder_of, no, repository, require_kept

__all__ = ["committed", "fake_device", "repository"]


def distance(logits: torch.Tensor, exact: torch.Tensor, following: torch.Tensor) -> Distance:
    """As a row has it: through raw data."""
    return Positions.read(positions(logits, exact, following).raw).distance


def test_distances_are_what_they_say() -> None:
    """Against float64 sums written out, and torch's own KL divergence."""
    generator = torch.Generator().manual_seed(0)
    exact, other = (torch.randn(5, 11, generator=generator) for _ in range(2))
    following = torch.tensor([0, 3, 10, 5, 5])
    found = distance(other, exact, following)
    p, q = (x.double().softmax(-1) for x in (exact, other))
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
    kl = torch.nn.functional.kl_div(q.log(), p, reduction="batchmean")
    assert found.kl == pytest.approx(float(kl))
    nll = [-float(q[row, token].log()) for row, token in enumerate(following)]
    assert found.nll == pytest.approx(np.mean(nll))
    own = [-float(p[row, token].log()) for row, token in enumerate(following)]
    assert found.nll_error == pytest.approx(np.median(np.abs(np.subtract(nll, own))))
    assert found.kl_median == pytest.approx(np.median((p * (p / q).log()).sum(-1)))
    assert found.disagreements == int((p.argmax(-1) != q.argmax(-1)).sum())
    same = distance(exact + 3.0, exact, following)  # a constant changes no distribution
    assert same.kl < 1e-12 and same.disagreements == 0 and same.nll_error < 1e-6


def test_the_bars_refuse_what_is_beyond_them_and_nan() -> None:
    floor = Distance(100, 1e-3, 1e-4, 2, 2.0, 1e-2)
    assert all(verdicts(Distance(100, 9e-3, 1.4e-4, 8, 2.0, 1.4e-2), floor).values())
    for worse, name in (
        (Distance(100, 1e-3, 1.6e-4, 2, 2.0, 1e-2), "kl_within_bar"),
        (Distance(100, 1e-3, 1e-4, 9, 2.0, 1e-2), "top1_within_bar"),
        (Distance(100, 1e-3, 1e-4, 2, 2.0, 1.6e-2), "nll_within_bar"),
        (Distance(100, float("nan"), float("nan"), 2, 2.0, 1e-2), "kl_within_bar"),
    ):
        assert [key for key, passed in verdicts(worse, floor).items() if not passed] == [name]


@torch.no_grad()
def test_the_references_are_transformers_in_either_precision() -> None:
    """float32 to rounding; bfloat16 typically as far from float32 as transformers' own bfloat16 is."""
    from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeForCausalLM

    tokens = torch.tensor(parity._sequences(load_config(["experiment=parity"]), load_checkpoint(NANO), [300])[0])
    exact, rounded = reference_logits(load_checkpoint(NANO), tokens, 200, torch.device("cpu"))
    theirs = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Cohere2MoeForCausalLM.from_pretrained(NANO, dtype=dtype, attn_implementation="eager").eval()
        theirs[dtype] = model(tokens[None]).logits[0, -200:].float()
    following = torch.zeros(200, dtype=torch.int64)
    assert distance(exact, theirs[torch.float32], following).kl < 1e-8
    ours = distance(rounded, theirs[torch.float32], following).kl_median
    assert ours == pytest.approx(distance(theirs[torch.bfloat16], theirs[torch.float32], following).kl_median, rel=0.25)


def run(tmp_path: Path, *overrides: str) -> tuple[int, list[Row]]:
    config = load_config(["experiment=parity", "engine=interpreter", f"run_dir={tmp_path}", *overrides])
    status = parity.main(config)
    return status, read_rows(folder_of(tmp_path) / "rows.jsonl")


@pytest.mark.parametrize("numerics", ["float32", "kernel"])
def test_the_interpreter_is_within_the_noise_floor(
    numerics: str, committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"engine.numerics={numerics}", "experiment.contexts=[40,252]", "experiment.steps=24"]
    status, rows = run(tmp_path, *overrides)
    assert status == 0 and [row.context for row in rows] == [[40], [252]]
    names = ("kl", "kl_bf16", "kl_median", "top1_agreement", "nll", "nll_float32", "nll_error", "nll_error_bf16")
    require_kept(committed, folder_of(tmp_path), **dict.fromkeys(names, lambda value: value + 1), checks=no)
    for row in rows:
        assert (
            row.kl_median is not None
            and row.kl_median_bf16 is not None
            and row.nll is not None
            and row.nll_float32 is not None
        )
        assert row.kl_median < 1e-9 if numerics == "float32" else 1e-9 < row.kl_median <= 1.5 * row.kl_median_bf16
        assert abs(row.nll - row.nll_float32) < 0.05 and row.positions == 24
    assert "ok" in capsys.readouterr().out


def test_an_engine_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits a fifth too large: every likeliest token stays, KL and NLL do not."""
    step = MachineEngine.step

    def wrong(self: MachineEngine, *arguments: Any) -> Any:
        out = step(self, *arguments)
        out.logits *= np.float32(1.2)
        return out

    monkeypatch.setattr(MachineEngine, "step", wrong)
    status, (row,) = run(tmp_path, "experiment.contexts=[40]", "experiment.steps=24")
    assert status == 1 and row.checks == {"kl_within_bar": False, "nll_within_bar": False, "top1_within_bar": True}


def test_the_kernel_has_its_configurations_windows(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[CudaEngine] = []

    def engine(*args: Any, **more: Any) -> CudaEngine:
        engines.append(CudaEngine(*args, **more | {"products": None}, device="cpu"))  # Triton's prefill wants a card
        return engines[-1]

    source = load_checkpoint(NANO)
    monkeypatch.setattr("mk.kernel.build.build", fake_build)
    monkeypatch.setattr(parity, "CudaEngine", engine)
    monkeypatch.setattr(parity, "pack", lambda source, device: PackedWeights.from_state(source.tensor, source.geometry))
    for overrides, windows in (([], (7, 8)), (["engine.ring.window_kb=40"], (5,))):
        cfg = load_config(["experiment=parity", "engine=cuda", "prefill=triton", *overrides])
        parity._engine(cfg, source, "cuda", 300)
        assert engines[-1].runtime.windows == windows


@pytest.mark.gpu
def test_the_kernel_is_within_the_noise_floor(tmp_path: Path, figure: Any) -> None:
    """nano on a card: 64 positions behind each of five contexts, prefilled by Triton."""
    config = load_config(
        ["experiment=parity", "engine=cuda", "prefill=triton", f"run_dir={tmp_path}",
         "experiment.contexts=[1,64,250,600,2000]", "experiment.steps=64"]
    )  # fmt: skip
    status = parity.main(config)
    (folder,) = tmp_path.iterdir()
    rows = read_rows(folder / "rows.jsonl")
    for line in parity.table(rows).splitlines():
        figure(line)
    assert status == 0 and {row.engine for row in rows} == {"cuda"}
