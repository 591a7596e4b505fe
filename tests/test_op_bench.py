"""Operations alone: which parts they are, their bytes, torch's counterparts, and a run on a stand-in for the card."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from experiments import op_bench, op_parts, op_torch
from mk.compose import load_config
from mk.errors import MkError
from mk.isa import ISA, Word
from mk.kernel.runtime import Runtime
from mk.model.geometry import PRESETS
from mk.programs import Plan, bucket_for
from mk.results.recompute import different
from mk.results.rows import Row, read_raw, read_rows
from mk.roofline import operation_bytes, step_bytes
from mk.schedule.cut import waves_of
from mk.schedule.simulate import costs_of, ring_of, simulate
from mk.schedule.simulator.expand import Sample
from tests.device_rig import FakeLibrary, fake_device
from tests.interpreter_rig import GEOMETRY, NANO_GEOMETRY, program
from tests.test_decode_throughput import stand_in

__all__ = ["fake_device", "stand_in"]

FULL, SLICE = PRESETS["north_mini_code"], PRESETS["slice"]
RUN = ["experiment=op_bench", "model=nano", "weights=checkpoint", "experiment.context=300", "experiment.steps=6",
       "experiment.warmup=2", "experiment.batches=[2]", "gpu.l2_mb=1"]  # fmt: skip


def test_operations_are_the_waves_that_run_alone() -> None:
    for placement in ("round_robin", "row_owner"):
        whole = program(2, placement=placement)
        found, parts = op_parts.operations_of(whole), waves_of(whole)
        alone = [part for name in found.keys() - op_parts.TOGETHER.keys() for (part,) in found[name]]
        assert len(set(alone)) == len(alone) <= len(parts)
        assert len(found["qkv"]) == GEOMETRY.layers and len(found["moe_up"]) == len(GEOMETRY.sparse_layers)
        assert len(found["attn_full"]) + len(found["attn_sliding"]) == GEOMETRY.layers
        assert len(found["lm_head"]) == 1
        assert ("rmsnorm" in found) == ("moe_combine" in found) == (placement == "round_robin")
        for name, numbers in found.items():
            if name not in op_parts.TOGETHER:
                ops = {ISA.rows[code].name for (n,) in numbers for code in parts[n].words[:, Word.OPCODE].tolist()}
                assert len(ops - {"topk"}) <= (2 if name == "lm_head" else 1), (name, ops)
        layers = {parts[n].words[0, Word.LAYER] for (n,) in found["attn_sliding"]}
        assert layers == set(GEOMETRY.sliding_layers)


@pytest.mark.parametrize("placement", ["round_robin", "row_owner"])
def test_waves_that_torch_does_in_one_are_timed_as_one_layer_by_layer(placement: str) -> None:
    whole = program(2, placement=placement)
    found, parts = op_parts.operations_of(whole), waves_of(whole)
    for name, waves in op_parts.TOGETHER.items():
        here = [wave for wave in waves if wave in found]
        assert len(here) == len(waves) or (placement, here) == ("row_owner", ["moe_down"])
        assert len(found[name]) == len(found[waves[0]])
        for layer in found[name]:
            cuts = [part.cut for part in (parts[n] for n in layer)]
            assert [cut and cut.name.split(".")[1] for cut in cuts] == [
                w.removesuffix("_full").removesuffix("_sliding") for w in here
            ]
            assert len({cut and cut.name.split(".")[0] for cut in cuts}) == 1 and layer == sorted(layer)
    both = [part for kind in ("full", "sliding") for _, part in found[f"attention_{kind}"]]
    assert sorted(both) == sorted(part for (part,) in found["attn_combine"])


def test_only_what_does_the_same_as_the_kernel_has_a_ratio() -> None:
    """No wave that leaves a part of its work to the next has one, nor what torch does with less."""
    compared = {name for name, methods in op_torch.METHODS.items() if any(methods.values())}
    whole = {"qkv", "oproj", "dense_up", "dense_down", "lm_head", "moe_up"}
    assert compared == whole | op_parts.TOGETHER.keys()
    assert not {wave for waves in op_parts.TOGETHER.values() for wave in waves} & op_torch.METHODS.keys()
    assert not op_torch.METHODS["qkv"]["linear"] and not op_torch.METHODS["moe_up"]["loop"]


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
    for name, waves in op_parts.TOGETHER.items():
        assert operation_bytes(g, name, contexts, experts) == sum(
            operation_bytes(g, wave, contexts, experts) for wave in waves
        )


# ---- torch's side, on a CPU ----
def inputs(rows: int = 3) -> op_torch.Inputs:
    torch.manual_seed(0)
    g = NANO_GEOMETRY
    ids = torch.stack([torch.randperm(g.experts)[: g.top_k] for _ in range(g.layers * 8)]).int()
    return op_torch.Inputs(g, [300] * rows, ids.reshape(g.layers, 8, g.top_k), torch.device("cpu"))


def test_every_operation_has_its_layers() -> None:
    g, of = NANO_GEOMETRY, inputs()
    for name, layers in (("qkv", g.layers), ("oproj", g.layers), ("routing", len(g.sparse_layers)), ("lm_head", 1),
                         ("rmsnorm", g.layers), ("dense_down", len(g.dense_layers))):  # fmt: skip
        for method in op_torch.METHODS[name]:
            runs = op_torch.runs(name, method, of)
            assert len(runs) == layers and all(run().shape[0] == 3 for run in runs), name


def test_qkv_rotates_neighbouring_dims_where_the_layer_does_and_keeps_k_and_v(monkeypatch: pytest.MonkeyPatch) -> None:
    g, of = NANO_GEOMETRY, inputs()
    drawn = record(monkeypatch)
    runs = op_torch.runs("qkv", "linear_rope", of)
    x, weights, pages = drawn[0], drawn[1 : 1 + g.layers], drawn[1 + g.layers :]
    assert len(pages) == g.layers and len(set(g.rope)) == 2  # layers of both kinds
    for run, w, page, rotates in zip(runs, weights, pages, g.rope, strict=True):
        q = run().float()
        plain = linear(x, w).float().view(3, -1, g.head_dim)
        heads = (plain[:, : g.q_heads], plain[:, g.q_heads : -g.kv_heads], plain[:, -g.kv_heads :])
        for got, of_heads, turned in zip(
            (q, page[0, :, :, 0].float(), page[1, :, :, 0].float()), heads, (1, 1, 0), strict=True
        ):
            lengths = [pair.unflatten(-1, (-1, 2)).norm(dim=-1) for pair in (got, of_heads)]
            torch.testing.assert_close(*lengths, rtol=2e-2, atol=1e-3)
            assert torch.equal(got, of_heads) != bool(turned and rotates)


@pytest.mark.parametrize("method", ["loop", "grouped"])
@pytest.mark.parametrize("name", ["moe_up", "moe_output"])
def test_experts_multiply_the_rows_that_chose_them(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    g, of = NANO_GEOMETRY, inputs()
    drawn = record(monkeypatch)

    def grouped(taken: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """As the card's, which a CPU may lack."""
        spans = list(itertools.pairwise([0, *offs.tolist()]))
        assert spans[-1][1] == len(taken)
        return torch.cat([taken[a:b] @ weights[e] for e, (a, b) in enumerate(spans)])

    monkeypatch.setattr(torch, "_grouped_mm", grouped)
    found = op_torch.runs(name, method, of)
    sparse = len(g.sparse_layers)
    x, weights, logits = drawn[0], drawn[1 : 1 + sparse], drawn[1 + sparse :]
    assert len(found) == len(weights) == len(logits) == sparse
    for layer, run, w, scores in zip(g.sparse_layers, found, weights, logits, strict=True):
        pairs = sorted((int(e), n // g.top_k) for n, e in enumerate(of.ids[layer, :3].flatten()))
        expected = []
        for place, (expert, row) in enumerate(pairs):
            out = linear(x[row if name == "moe_up" else place].float(), w[expert].float())
            expected.append(silu(out[: len(out) // 2]) * out[len(out) // 2 :] if name == "moe_up" else out)
        if name == "moe_output":
            shares = [(scores[row, expert].float() + 20).sigmoid() for expert, row in pairs]
            by_row = [
                [out * share for out, share, (_, of_row) in zip(expected, shares, pairs, strict=True) if of_row == row]
                for row in range(3)
            ]
            expected = [torch.stack(outs).sum(0) for outs in by_row]
        torch.testing.assert_close(run().float(), torch.stack(expected), rtol=2e-2, atol=2e-3)


def record(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every noise that is drawn from here on."""
    drawn: list[torch.Tensor] = []
    noise = op_torch.Inputs.noise

    def kept(self: op_torch.Inputs, *shape: int, std: float = 1.0) -> torch.Tensor:
        drawn.append(noise(self, *shape, std=std))
        return drawn[-1]

    monkeypatch.setattr(op_torch.Inputs, "noise", kept)
    return drawn


def test_attention_sees_the_keys_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Size, torch.Size]] = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool) -> torch.Tensor:
        seen.append((q.shape, k.shape))
        return scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)

    monkeypatch.setattr(op_torch, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(op_torch, "SDPA", {"flash": torch.nn.attention.SDPBackend.MATH})
    g = NANO_GEOMETRY
    for kind, keys in (("full", 300), ("sliding", g.window_keys)):
        runs = op_torch.runs(f"attention_{kind}", "flash", inputs())
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
    return rows_and_raw(folder)


def rows_and_raw(folder: Path) -> tuple[list[Row], dict[str, dict]]:
    (path,) = folder.iterdir()
    return read_rows(path / "rows.jsonl"), read_raw(path / "raw.jsonl")


def test_every_operation_has_a_row_of_each_engine(
    bench: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, raw = run(tmp_path, "experiment.batches=[1,2]")
    out = capsys.readouterr().out
    for batch in (1, 2):
        own = {row.kernel: row for row in rows if row.batch == batch and row.engine == "cuda"}
        first, *others = own
        assert first == "embed" and {"router", "moe_up", "rmsnorm", "lm_head", *op_parts.TOGETHER} <= set(others)
        assert own["qkv"].p50_ms == pytest.approx(1 / NANO_GEOMETRY.layers)
        assert own["routing"].p50_ms == pytest.approx(1 / len(NANO_GEOMETRY.sparse_layers))  # a layer, not a part
        assert own["topk"].gb_s is None and own["topk"].pct_nominal is None
        by_torch = [row for row in rows if row.batch == batch and row.engine == "torch"]
        assert {(row.kernel, row.method) for row in by_torch} >= {("qkv", "linear"), ("moe_up", "loop")}
        for row in by_torch:
            alike = op_torch.METHODS[row.kernel or ""][row.method or ""]
            assert (row.ratio_to, row.ratio) == ((own[row.kernel].digest, 1.0) if alike else (None, None))
            assert not row.checks
    for row in rows:
        assert list(different(row, raw[row.raw_sha256 or ""])) == []
        assert row.engine == "torch" or row.checks == {"schedule_verified": True, "bits_of_the_step": True}
    assert "to the kernel" in out and "lm_head" in out and not bench.graphs


def test_some_operations_and_those_that_are_not(bench: FakeLibrary, tmp_path: Path) -> None:
    rows, _ = run(tmp_path / "some", "experiment.operations=[routing,router,oproj]")
    found = [(row.kernel, row.engine) for row in rows]
    assert found == [
        ("routing", "cuda"),
        ("routing", "torch"),
        ("router", "cuda"),
        ("oproj", "cuda"),
        ("oproj", "torch"),
    ]
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
    rows, _ = run(tmp_path, "experiment.operations=[attention_full]")
    assert [row.engine for row in rows] == ["cuda"]
    assert capsys.readouterr().out.count("not measured: attention_full by torch") == 2


# ---- without a card ----
def test_without_a_card_every_operation_is_simulated_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Together they take longer than the step, in which they overlap and are launched once."""
    axes = ["experiment=op_bench", "model=slice", "experiment.batches=[1,8]", f"run_dir={tmp_path / 'ops'}"]
    cfg = load_config(axes)
    assert op_bench.main(cfg) == 0
    rows, raw = rows_and_raw(tmp_path / "ops")
    assert {(row.engine, row.clock, row.routing) for row in rows} == {("simulator", "simulated", "uniform")}
    out = capsys.readouterr().out
    assert out.startswith("simulated for h200: torch sees no GPU here") and out.count("simulator") == len(rows)
    for batch in (1, 8):
        program, g = Plan.from_config(cfg).lower(SLICE, batch, bucket_for(8192 + 40)), SLICE
        own = {row.kernel: row for row in rows if row.batch == batch}
        assert own.keys() == op_parts.operations_of(program).keys()
        assert {row.schedule_hash for row in own.values()} == {program.schedule_hash}
        alone = [own[name] for name in own.keys() - op_parts.TOGETHER.keys()]
        runs = {name: len(layers) for name, layers in op_parts.operations_of(program).items()}
        sample = Sample.draw(g, cfg.routing, [8192] * batch)
        step = simulate(program, sample, costs_of(cfg.gpu), ring_of(cfg.engine.ring, batch))
        together = sum(runs[row.kernel or ""] * (row.p50_ms or 0) * 1e3 for row in alone)
        assert step.step_us < together
        for row in alone:
            assert row.pct_nominal is None or 0 < row.pct_nominal < 100
            assert (row.p10_ms, row.p90_ms, row.steps, row.ratio) == (None,) * 4
        both = [own[name].p50_ms or 0 for name in ("router", "topk")]
        assert own["routing"].p50_ms == pytest.approx(sum(both), rel=1e-6)
    for row in rows:
        assert list(different(row, raw[row.raw_sha256 or ""])) == []


def test_of_a_model_that_repeats_itself_each_layer_of_a_kind_takes_what_it_takes_in_the_first_period(
    tmp_path: Path,
) -> None:
    """The full model's are simulated in five layers; here in all of them."""
    cfg = load_config(["experiment=op_bench", f"run_dir={tmp_path}", "experiment.operations=[attn_sliding,moe_up]"])
    cfg = dataclasses.replace(cfg, experiment=dataclasses.replace(cfg.experiment, batches=[1]))
    assert op_bench.main(cfg) == 0
    rows, _ = rows_and_raw(tmp_path)
    program = Plan.from_config(cfg).lower(FULL, 1, bucket_for(8192 + 40))
    parts, operations = waves_of(program), op_parts.operations_of(program)
    sample = Sample.draw(FULL, cfg.routing, [8192])
    for row in rows:
        chosen = operations[row.kernel or ""][::8]
        times = [simulate(parts[n], sample, costs_of(cfg.gpu), ring_of(cfg.engine.ring, 1)).step_us for (n,) in chosen]
        assert times == pytest.approx([(row.p50_ms or 0) * 1e3] * len(times), rel=0.02)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sampling=top_p", "op_bench draws no tokens by sampling=top_p"),
        ("routing=checkpoint", "needs to know the experts, not routing=checkpoint"),
        ("engine=interpreter", "times the kernel, not engine=interpreter"),
        ("experiment.operations=[qvk]", "experiment.operations=qvk"),
    ],
)
def test_without_a_card_what_has_no_simulation_is_refused(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(MkError, match=said):
        op_bench.main(load_config([*RUN, override, f"run_dir={tmp_path / 'runs'}"]))
    assert not list(tmp_path.iterdir())
