"""Prefill's operations, and the two experiments that time it: of nano, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import prefill_throughput, prefill_tiles
from experiments.kernel_checks import Oracle
from mk.compose import load_config
from mk.errors import MkError
from mk.model.geometry import PRESETS, Geometry
from mk.model.opening import NANO as FOLDER
from mk.results.rows import Row, read_rows
from mk.roofline import active_parameters, prefill_flop, visible_pairs
from prefill.tiles import INTERPRETED, AttentionTile, ProductTile
from prefill.triton_prefill import TritonPrefill
from tests.prefill_rig import needs_interpreter
from tests.promotion import committed, folder_of, repository, require_kept

__all__ = ["committed", "repository"]

FULL = PRESETS["north_mini_code"]
NANO = Geometry.from_hf_config(FOLDER)
CPU = ["gpu=cpu", "model=nano", "weights=checkpoint"]


def test_pairs_and_operations_of_the_full_model() -> None:
    for keys, window in ((1, None), (9, None), (9, 4), (4, 4), (9, 100)):
        seen = sum(min(position + 1, window or keys) for position in range(keys))
        assert visible_pairs(keys, window) == seen
    assert round(active_parameters(FULL) / 1e9, 2) == 2.77
    at_8k = 13 * 8192 * 8193 / 2 + 36 * (4096 * 4097 / 2 + 4096 * 4096)
    flop = 2 * (active_parameters(FULL) * 8192 + FULL.vocab * 2048) + 4 * 4096 * at_8k
    assert prefill_flop(FULL, [8192]) == flop
    assert prefill_flop(FULL, [8192, 8192]) == 2 * flop


def rows_of(folder: Path) -> list[Row]:
    return [row for path in folder.glob("*/rows.jsonl") for row in read_rows(path)]


@needs_interpreter
def test_prefill_is_checked_and_a_row_written_for_each_shape(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["lengths=[5]", "packed=[3]", "packed_rows=2", "repeats=1", "check_tokens=6"]
    axes = ["experiment=prefill_throughput", *CPU, *(f"experiment.{key}" for key in keys), f"run_dir={tmp_path}"]
    assert prefill_throughput.main(load_config(axes)) == 0
    alone, packed = rows_of(tmp_path)
    assert (alone.batch, alone.prompt_tokens, alone.context) == (1, 5, [5])
    assert (packed.batch, packed.prompt_tokens, packed.context) == (2, 6, [3, 3])
    assert {(row.engine, row.gpu, row.steps) for row in (alone, packed)} == {("interpreter", "cpu", 1)}
    seconds = (alone.p50_ms or 0) / 1e3
    assert alone.ttft_ms is not None and alone.ttft_ms >= alone.p50_ms > 0
    assert alone.prefill_tok_s == pytest.approx(5 / seconds)
    assert alone.tflop_s == pytest.approx(prefill_flop(NANO, [5]) / seconds / 1e12)
    assert alone.pct_matrix == pytest.approx(100 * alone.tflop_s / alone.matrix_tflop_s)
    names = ("p50_ms", "ttft_ms", "prefill_tok_s", "tflop_s", "matrix_tflop_s", "pct_matrix", "steps")
    require_kept(committed, folder_of(tmp_path), **dict.fromkeys(names, lambda value: value + 1))
    assert set(alone.checks) == {"logits_within_noise", "bits_packed", "bits_continued"} and all(alone.checks.values())
    assert "TTFT ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (lambda prompts, logits: logits * 1.5, "logits_within_noise"),
        (lambda prompts, logits: logits + 2**-16 * (len(prompts) > 1), "bits_packed"),
        (lambda prompts, logits: logits + 2**-16 * (prompts[0].start > 0), "bits_continued"),
    ],
)
def test_a_prefill_that_fails_a_check_gets_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong, check: str
) -> None:
    """Of a prefill that only draws numbers, wrong in one way."""

    def forward(self, pages, prompts, expert_ids=None):
        noise = torch.randn(len(prompts), self.geometry.vocab, generator=torch.Generator().manual_seed(0))
        return wrong(prompts, noise[:1].expand(len(prompts), -1))

    right = torch.randn(1, 1408, generator=torch.Generator().manual_seed(0)).expand(9, -1)
    ids = torch.zeros(9, 5, 4, dtype=torch.int32)
    oracle = Oracle(torch.zeros(9), right, right * 1.01, ids, ids[:, 1])
    monkeypatch.setattr(prefill_throughput, "consult", lambda *args: oracle)
    monkeypatch.setattr(TritonPrefill, "forward", forward)
    axes = ["experiment=prefill_throughput", *CPU, "experiment.check_tokens=9", f"run_dir={tmp_path}"]
    with pytest.raises(MkError, match=f"prefill failed {check}$"):
        prefill_throughput.main(load_config(axes))
    assert not rows_of(tmp_path)


@needs_interpreter
def test_kernels_are_timed_with_each_tile(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small, odd = ProductTile(32, 64, 256, 1, 1), ProductTile(16, 64, 48, 1, 1)  # 48 does not divide k: refused
    monkeypatch.setattr(prefill_tiles, "HOPPER", INTERPRETED)
    monkeypatch.setattr(prefill_tiles, "PLAIN", (small, None))
    monkeypatch.setattr(prefill_tiles, "EXPERTS", (small, odd))
    monkeypatch.setattr(prefill_tiles, "ATTENTIONS", (AttentionTile(64, 64, 1, 1), AttentionTile(16, 128, 1, 1)))
    axes = ["experiment=prefill_tiles", *CPU, "experiment.tokens=17", "experiment.repeats=1"]
    axes += [f"run_dir={tmp_path / 'runs'}"]
    assert prefill_tiles.main(load_config(axes)) == 0
    rows = require_kept(
        committed,
        folder_of(tmp_path / "runs"),
        **dict.fromkeys(("p10_ms", "tflop_s", "pct_matrix"), lambda value: value + 1),
    )
    flop = 2 * 17 * NANO.top_k * 2 * NANO.expert_ffn * NANO.hidden
    assert rows[0].tflop_s == pytest.approx(flop / (rows[0].p50_ms or 0) / 1e9)
    found = [(row.kernel, row.tile) for row in rows]
    assert [kernel for kernel, _ in found] == [
        "up", "down", "attention_full", "attention_full", "attention_sliding", "attention_sliding",
        "qkv", "qkv", "o", "o",
    ]  # fmt: skip
    assert len(set(found)) == len(found)
    assert "up 16x64x48" in capsys.readouterr().out
    axes += ["experiment.time_limit_s=0.0", f"run_dir={tmp_path / 'late'}"]
    assert prefill_tiles.main(load_config(axes)) == 0 and not rows_of(tmp_path / "late")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=prefill_throughput", "prefill=torch"], "not prefill=torch"),
        (["experiment=prefill_throughput", "experiment.lengths=[0]"], r"experiment.lengths=\[0\]"),
        (["experiment=prefill_throughput", "experiment.lengths=[]", "experiment.packed=[]"], "are empty"),
        (["experiment=prefill_throughput", "experiment.check_tokens=1"], "check_tokens=1 must be at least 2"),
        (["experiment=prefill_throughput"], "prefill_throughput on gpu=h200 needs a GPU"),
        (["experiment=prefill_tiles"], "prefill_tiles on gpu=h200 needs a GPU"),
        (["experiment=prefill_tiles", "gpu=cpu"], r"gpu=cpu: model=slice has [\d,]+ M parameters"),
        (["experiment=prefill_throughput", "gpu=cpu"], r"gpu=cpu: model=north_mini_code has 30,\d+ M parameters"),
        (["experiment=prefill_tiles", "experiment.kernels=[upp]"], "experiment.kernels=upp"),
    ],
)
def test_what_cannot_be_timed_is_refused(overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = prefill_tiles.main if "tiles" in overrides[0] else prefill_throughput.main
    with pytest.raises(MkError, match=message):
        main(load_config(overrides))
