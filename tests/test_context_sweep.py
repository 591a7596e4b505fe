"""The sweep over contexts: the kernel on a stand-in for the card, beside one start of a stand-in for vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments import context_sweep, simulated_variants, vllm_rows
from experiments.baselines.vllm_bench import REPEATS
from experiments.baselines.vllm_process import RESOLVED
from mk.compose import load_config
from mk.config import Config
from mk.errors import MkError
from mk.results.promote import RAW_BYTES
from mk.results.recompute import different
from mk.results.rows import Row, read_raw, read_rows
from mk.results.step_figures import raw_steps
from tests.device_rig import FakeLibrary, fake_device
from tests.promotion import committed, repository, require_kept
from tests.test_decode_throughput import stand_in
from tests.test_vllm_baseline import SITE

__all__ = ["committed", "fake_device", "repository", "stand_in"]

VLLM = f"baseline.vllm.site={SITE}"
SMALL = ["model=nano", "weights=random", "experiment.batches=[1,2]", "experiment.steps=24", "experiment.warmup=4",
         "experiment.check_tokens=20", "experiment.variants=['experiment.context=64,80,104']",
         "experiment.baseline_contexts=[64,104]"]  # fmt: skip


def config(folder: Path, *more: str) -> Config:
    return load_config(["experiment=context_sweep", *SMALL, f"run_dir={folder}", *more])


def run(folder: Path, *more: str) -> tuple[int, list[Row]]:
    status = context_sweep.main(config(folder, *more))
    (path,) = folder.glob("*/rows.jsonl")
    return status, read_rows(path)


def cases_of(rows: list[Row], engine: str) -> list[tuple[int, int]]:
    return sorted((row.context[0], row.batch) for row in rows if row.engine == engine)


@pytest.fixture
def few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano has 4 expert layers: so few steps say little of a mean."""
    monkeypatch.setattr("mk.results.step_figures.EXPERTS_AGREE", 0.1)


@pytest.mark.usefixtures("few_experts")
def test_one_start_of_vllm_stands_beside_every_batch_of_its_contexts(
    stand_in: FakeLibrary, committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path / "runs", VLLM)
    assert status == 0
    assert cases_of(rows, "cuda") == [(64, 1), (64, 2), (80, 1), (80, 2), (104, 1), (104, 2)]
    assert cases_of(rows, "vllm") == [(64, 1), (64, 2), (104, 1), (104, 2)]
    (results,) = tmp_path.glob("runs/*/vllm-*/results.jsonl")
    said = [json.loads(line) for line in results.read_text().splitlines()]
    assert sum(one["case"] == "started" for one in said) == 1
    keys = [one["context"] * one["batch"] for one in said if one["case"] == "decode"]
    assert keys == sorted(keys)  # what may have no room comes last
    raw = read_raw(results.parent.parent / "raw.jsonl")
    kernel = {row.digest: row for row in rows if row.engine == "cuda"}
    for row in rows:
        assert row.experiment == "context_sweep" and row.arm == f"experiment.context={row.context[0]}"
        assert list(different(row, raw[row.raw_sha256 or ""])) == []
        if row.engine == "vllm":
            mine = kernel[row.ratio_to]
            assert (mine.batch, mine.context, mine.config_hash) == (row.batch, row.context, row.config_hash)
            assert row.kv == "synthetic" and row.p50_ms and mine.p50_ms
            assert row.ratio == pytest.approx(row.p50_ms / mine.p50_ms)
    out = capsys.readouterr().out
    assert "missing" not in out and "vLLM / kernel" in out and out.count("[") >= 4
    require_kept(committed, results.parent.parent, **dict.fromkeys(("p50_ms", "ratio", "tpot_ms"), lambda ms: ms + 1))


@pytest.mark.usefixtures("few_experts")
def test_arms_in_turn_have_vllm_beside_them_once_each(stand_in: FakeLibrary, tmp_path: Path) -> None:
    status, rows = run(tmp_path, VLLM, "experiment.rounds=2", "experiment.batches=[1]")
    assert status == 0 and "experiment.context=64 (again)" in {row.arm for row in rows}
    assert cases_of(rows, "vllm") == [(64, 1), (104, 1)]


def test_a_whole_sweep_with_vllm_is_small_enough_to_keep() -> None:
    """Its raw data, with times of a slow card."""
    cfg = load_config(["experiment=context_sweep"])
    jobs = context_sweep.timed_variants(cfg)
    steps, experts = cfg.experiment.steps, [51.789062] * 48
    kernel = raw_steps([19.12345] * steps, experts)
    lines, card = ["x" * 250] * len(RESOLVED), {"before": "x" * 40, "after": "x" * 40}
    more = {"kernel_step_ms": kernel["step_ms"], "log": lines, "card": card, "tpot_ms": 19.123456789012345}
    theirs = raw_steps([19.12345] * steps * REPEATS, experts) | more
    rows = len(jobs) * len(cfg.experiment.batches), len(context_sweep.beside(cfg, jobs))
    sizes = [len(json.dumps(raw, separators=(",", ":"))) for raw in (kernel, theirs)]
    assert sum(count * size for count, size in zip(rows, sizes, strict=True)) < RAW_BYTES


@pytest.mark.usefixtures("few_experts")
def test_a_case_without_room_is_missing_by_name_and_fails_nothing(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "small")
    status, rows = run(tmp_path, VLLM)
    assert status == 0 and cases_of(rows, "vllm") == [(64, 1), (64, 2), (104, 1)] and len(cases_of(rows, "cuda")) == 6
    assert "vLLM is missing, batch 2, context 104: never all 2 sequences at a time" in capsys.readouterr().out


def test_experts_that_were_not_counted_make_no_ratio(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "no_count")
    status, rows = run(tmp_path, VLLM, "experiment.batches=[2]")
    theirs = [row for row in rows if row.engine == "vllm"]
    assert status == 0 and len(theirs) == 2 and all(row.p50_ms and row.ratio is None for row in theirs)


def test_a_vllm_that_fails_fails_the_run_but_not_the_kernels_rows(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    status, rows = run(tmp_path, VLLM)
    assert status == 1 and len(rows) == 6 and "no kernel image" in capsys.readouterr().out


def test_figures_of_vllm_that_cannot_be_cost_no_row_of_the_kernel(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise MkError("p50 is under what the bytes take")

    monkeypatch.setattr("experiments.vllm_rows.append_beside", refused)
    status, rows = run(tmp_path, VLLM)
    assert status == 1 and len(cases_of(rows, "cuda")) == len(rows) == 6
    assert capsys.readouterr().out.count("failed: vLLM, experiment.context=") == 4


@pytest.mark.parametrize(("baseline", "said"), [("vllm", True), ("none", False)])
def test_without_vllm_the_kernel_is_swept_and_what_is_missing_is_said(
    baseline: str, said: bool, stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path, f"baseline={baseline}")
    assert status == 0 and {row.engine for row in rows} == {"cuda"} and len(rows) == 6
    assert ("vLLM is missing: no vLLM is configured; to install it: " in capsys.readouterr().out) == said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["baseline.vllm.site=/no/such/folder"], "site=/no/such/folder is no folder"),
        ([VLLM, "weights=checkpoint"], "not weights=checkpoint routing=uniform"),
        ([VLLM, "routing=adversarial"], "not weights=random routing=adversarial"),
        ([VLLM, "experiment.axes=[experiment.context,wave_order]"], "vLLM stands beside contexts, not"),
        ([VLLM, "experiment.baseline_contexts=[64,65]"], "65 is none of the variants' contexts"),
        ([VLLM, "experiment.variants=['experiment.context=64,80']"], "104 is none of the variants' contexts"),
        (["experiment.baseline_contexts=[64,104,64]"], "experiment.baseline_contexts names 64 twice"),
        ([VLLM, "experiment.baseline_contexts=[64,64]"], "experiment.baseline_contexts names 64 twice"),
        (["experiment.variants=['experiment.context=64,65525']"], "experiment.context=65525, and 24 steps around it"),
    ],
)
@pytest.mark.parametrize("card", [False, True])
def test_what_vllm_cannot_stand_beside_is_refused_before_anything_runs(
    overrides: list[str], message: str, card: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    monkeypatch.setattr(simulated_variants, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(MkError) as caught:
        context_sweep.main(config(tmp_path / "runs", *overrides))
    assert message in str(caught.value) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("overrides", "said"), [([], "vLLM is missing"), ([VLLM], vllm_rows.NO_CARD)])
def test_without_a_card_the_sweep_is_simulated_and_says_that_vllm_is_not_measured(
    overrides: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path, "gpu.sms=16", "experiment.batches=[2]", *overrides)
    assert status == 0 and {row.clock for row in rows} == {"simulated"}
    assert [(row.context, row.ratio) for row in rows] == [([n, n], None) for n in (64, 80, 104)]
    assert said in capsys.readouterr().out


def test_other_variants_need_no_other_contexts_of_a_vllm_that_is_not_configured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = "experiment.variants=['experiment.context=72,80']"
    status, rows = run(tmp_path, "gpu.sms=16", "experiment.batches=[2]", variants)
    assert status == 0 and [row.context for row in rows] == [[72, 72], [80, 80]]
    assert "vLLM is missing" in capsys.readouterr().out


def test_the_default_asks_for_what_it_is_named_for() -> None:
    cfg = load_config(["experiment=context_sweep"])
    cases = context_sweep.beside(cfg, context_sweep.timed_variants(cfg))
    assert sorted(cases) == [(n, b) for n in (1024, 8192, 65536, 262_000) for b in (1, 4, 8)]
    assert cases[-1] == (262_000, 8) and cfg.baseline.vllm and cfg.baseline.vllm.kv == "synthetic"
