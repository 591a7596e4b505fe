"""Operations alone: which parts they are, their bytes, torch's counterparts, and a run on a stand-in for the card."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from experiments import op_bench, op_torch
from mk.compose import load_config
from mk.errors import MkError
from mk.isa import ISA, Word
from mk.model.geometry import PRESETS
from mk.recompute import different
from mk.roofline import operation_bytes, step_bytes
from mk.rows import Row, read_raw, read_rows
from mk.runtime import Runtime
from mk.schedule.cut import waves_of
from tests.device_rig import FakeLibrary, fake_device
from tests.interpreter_rig import GEOMETRY, NANO_GEOMETRY, program
from tests.test_decode_throughput import stand_in

__all__ = ["fake_device", "stand_in"]

FULL = PRESETS["north_mini_code"]
RUN = ["experiment=op_bench", "model=nano", "weights=checkpoint", "experiment.context=300", "experiment.steps=6",
       "experiment.warmup=2", "experiment.batches=[2]", "gpu.l2_mb=1"]  # fmt: skip


def test_operations_are_the_waves_that_run_alone() -> None:
    for placement in ("round_robin", "row_owner"):
        whole = program(2, placement=placement)
        found, parts = op_bench.operations_of(whole), waves_of(whole)
        assert sum(map(len, found.values())) <= len(parts)
        assert len(found["qkv"]) == GEOMETRY.layers and len(found["moe_up"]) == len(GEOMETRY.sparse_layers)
        assert len(found["attn_full"]) + len(found["attn_sliding"]) == GEOMETRY.layers
        assert len(found["lm_head"]) == 1
        assert ("rmsnorm" in found) == ("moe_combine" in found) == (placement == "round_robin")
        for name, numbers in found.items():
            ops = {ISA.rows[code].name for n in numbers for code in parts[n].words[:, Word.OPCODE].tolist()}
            assert len(ops - {"topk"}) <= (2 if name == "lm_head" else 1), (name, ops)
        layers = {parts[n].words[0, Word.LAYER] for n in found["attn_sliding"]}
        assert layers == set(GEOMETRY.sliding_layers)


@pytest.mark.parametrize("rows", [1, 8])
def test_bytes_of_all_operations_are_those_of_the_step(rows: int) -> None:
    g, experts = FULL, 8.0 if rows == 1 else 51.6
    contexts = [8192.0] * rows
    runs = {"attn_full": len(g.full_layers), "attn_sliding": len(g.sliding_layers), "lm_head": 1}
    runs |= dict.fromkeys(("qkv", "oproj", "rmsnorm", "attn_combine"), g.layers)
    runs |= dict.fromkeys(("router", "topk", "moe_up", "moe_down", "moe_combine"), len(g.sparse_layers))
    runs |= dict.fromkeys(("dense_up", "dense_down"), len(g.dense_layers))
    total = sum(n * operation_bytes(g, name, contexts, experts) for name, n in runs.items())
    assert total == pytest.approx(step_bytes(g, contexts, experts).total, rel=1e-12)
    assert operation_bytes(g, "qkv", contexts, experts) == 5120 * 2048 * 2
    assert operation_bytes(g, "attn_combine", contexts, experts) == operation_bytes(g, "topk", contexts, experts) == 0


# ---- torch's side, on a CPU ----
def inputs(rows: int = 3) -> op_torch.Inputs:
    torch.manual_seed(0)
    g = NANO_GEOMETRY
    ids = torch.stack([torch.randperm(g.experts)[: g.top_k] for _ in range(g.layers * 8)]).int()
    return op_torch.Inputs(g, [300] * rows, ids.reshape(g.layers, 8, g.top_k), torch.device("cpu"))


def test_every_operation_has_its_layers() -> None:
    g, of = NANO_GEOMETRY, inputs()
    for name, layers in (("qkv", g.layers), ("oproj", g.layers), ("router", len(g.sparse_layers)), ("lm_head", 1),
                         ("topk", len(g.sparse_layers)), ("rmsnorm", g.layers),
                         ("dense_down", len(g.dense_layers))):  # fmt: skip
        (method,) = op_torch.methods(name)
        runs = op_torch.runs(name, method, of)
        assert len(runs) == layers and all(run().shape[0] == 3 for run in runs), name
    assert op_torch.methods("moe_combine") == op_torch.methods("attn_combine") == op_torch.methods("embed") == []


@pytest.mark.parametrize("name", ["up", "down"])
def test_experts_multiply_the_rows_that_chose_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g, of = NANO_GEOMETRY, inputs()
    drawn: list[torch.Tensor] = []
    noise = op_torch.Inputs.noise

    def kept(self: op_torch.Inputs, *shape: int, std: float = 1.0) -> torch.Tensor:
        drawn.append(noise(self, *shape, std=std))
        return drawn[-1]

    monkeypatch.setattr(op_torch.Inputs, "noise", kept)
    found = op_torch.runs(f"moe_{name}", "loop", of)
    x, *weights = drawn
    assert len(found) == len(weights) == len(g.sparse_layers)
    for layer, run, w in zip(g.sparse_layers, found, weights, strict=True):
        pairs = sorted((int(e), n // g.top_k, n) for n, e in enumerate(of.ids[layer, :3].flatten()))
        expected = []
        for place, (expert, row, _) in enumerate(pairs):
            out = linear(x[row if name == "up" else place].float(), w[expert].float())
            expected.append(silu(out[: len(out) // 2]) * out[len(out) // 2 :] if name == "up" else out)
        torch.testing.assert_close(run().float(), torch.stack(expected), rtol=2e-2, atol=2e-3)


def test_attention_sees_the_keys_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, torch.Size]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
        seen.append((q.shape, k.shape))
        return scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

    monkeypatch.setattr(op_torch, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(op_torch, "SDPA", {"flash": torch.nn.attention.SDPBackend.MATH})
    g = NANO_GEOMETRY
    for kind, keys in (("full", 300), ("sliding", g.window_keys)):
        runs = op_torch.runs(f"attn_{kind}", "flash", inputs())
        assert runs[0]().shape == (3, g.q_heads, 1, g.head_dim)
        assert seen[-1] == ((3, g.q_heads, 1, g.head_dim), (3, g.kv_heads, keys, g.head_dim))


# ---- on a stand-in for the card ----
@pytest.fixture
def bench(stand_in: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    def plainly(work: list[Callable[[], object]]) -> Callable[[], object]:
        return lambda: [run() for run in work]

    monkeypatch.setattr(op_bench, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(op_bench, "graphed", plainly)
    monkeypatch.setattr(op_torch, "SDPA", dict.fromkeys(op_torch.SDPA, torch.nn.attention.SDPBackend.MATH))
    return stand_in


def run(folder: Path, *more: str) -> tuple[list[Row], dict[str, dict]]:
    assert op_bench.main(load_config([*RUN, f"run_dir={folder}", *more])) == 0
    (path,) = folder.iterdir()
    return read_rows(path / "rows.jsonl"), read_raw(path / "raw.jsonl")


def test_every_operation_has_a_row_of_each_engine(
    bench: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, raw = run(tmp_path, "experiment.batches=[1,2]")
    out = capsys.readouterr().out
    for batch in (1, 2):
        own = {row.kernel: row for row in rows if row.batch == batch and row.engine == "cuda"}
        first, *others, last = own
        assert (first, last) == ("embed", "lm_head") and {"router", "moe_up", "rmsnorm"} <= set(others)
        assert own["qkv"].p50_ms == pytest.approx(1 / NANO_GEOMETRY.layers)
        assert own["topk"].gb_s is None and own["topk"].pct_nominal is None
        by_torch = [row for row in rows if row.batch == batch and row.engine == "torch"]
        assert {(row.kernel, row.method) for row in by_torch} >= {("qkv", "linear"), ("moe_up", "loop")}
        for row in by_torch:
            assert row.ratio_to == own[row.kernel].digest and row.ratio == 1.0 and not row.checks
    for row in rows:
        assert list(different(row, raw[row.raw_sha256 or ""])) == []
        assert row.engine == "torch" or row.checks == {"schedule_verified": True, "bits_of_the_step": True}
    assert "to the kernel" in out and "lm_head" in out and not bench.graphs


def test_some_operations_and_those_that_are_not(bench: FakeLibrary, tmp_path: Path) -> None:
    rows, _ = run(tmp_path / "some", "experiment.operations=[router,oproj]")
    assert [(row.kernel, row.engine) for row in rows] == [*itertools.product(("router", "oproj"), ("cuda", "torch"))]
    with pytest.raises(MkError, match=r"experiment.operations=qvk is not one of .* qkv,"):
        run(tmp_path / "none", "experiment.operations=[qvk]")
    with pytest.raises(MkError, match="needs to know the experts, not routing=checkpoint"):
        run(tmp_path / "ids", "routing=checkpoint")
    with pytest.raises(MkError, match=r"experiment.operations is empty"):
        load_config([*RUN, "experiment.operations=[]"])


def test_parts_that_leave_other_bits_than_the_step_are_not_timed(bench: FakeLibrary, tmp_path: Path) -> None:
    def breaks(rt: Runtime, step: int) -> None:
        assert rt.program is not None
        if rt.program.cut is None:
            rt["logits"].mul_(1 + 2**-20)

    bench.fault = breaks
    with pytest.raises(MkError, match="batch 2: part by part, a step leaves other logits"):
        run(tmp_path)


def test_what_torch_cannot_do_is_named(
    bench: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*args: object, **more: object) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(op_torch, "scaled_dot_product_attention", missing)
    rows, _ = run(tmp_path, "experiment.operations=[attn_full]")
    assert [row.engine for row in rows] == ["cuda"]
    assert capsys.readouterr().out.count("not measured: attn_full by torch") == 2
