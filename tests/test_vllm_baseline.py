"""vLLM as a baseline: a stand-in for it in a site folder of its own; its script and worker methods for real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.served import fetch
from experiments import accuracy_vllm, decode_throughput, server_process, vllm_decode, vllm_rows, vllm_serve
from experiments.baselines import vllm_process as vllm
from experiments.baselines.vllm_extension import distinct_by_layer, register_uniform, uniform_distinct
from experiments.server_process import vllm_server
from mk.compose import load_config, stored_config
from mk.config import Config, config_hash
from mk.errors import MkError
from mk.model.geometry import PRESETS, Geometry
from mk.model.opening import NANO
from mk.results.kept import read_configs
from mk.results.rows import Row, read_raw, read_rows
from mk.results.runs import RunFolder
from mk.results.step_figures import median_ratio, raw_steps, step_figures
from mk.roofline import uniform_experts
from tests.interpreter_rig import NANO_GEOMETRY
from tests.promotion import committed, repository, require_kept

__all__ = ["committed", "repository"]

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "tests" / "fake_vllm"
SMALL = ["experiment.batches=[1,2]", "experiment.context=64", "experiment.steps=24", "experiment.warmup=4"]


def config(*more: str) -> Config:
    nano = ["model=nano", "weights=random", "experiment.check_tokens=20", f"baseline.vllm.site={SITE}"]
    return load_config(["experiment=vllm_decode", *nano, *SMALL, *more])


def measured(tmp_path: Path, *more: str, cases: Sequence[tuple[int, int]] = ((64, 1), (64, 2))) -> vllm.Measured:
    """cases: (context, batch) each."""
    options = config(*more).baseline.vllm
    assert options is not None
    spec = vllm.Spec(NANO_GEOMETRY, "uniform", list(cases), 24, 4, seed=0, qk_scale=1.0, kv_std=0.01)
    return vllm.measure(options, spec, tmp_path / "vllm", "triton")


def test_the_script_times_every_batch_and_counts_its_experts(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert (found.version, found.errors, found.same_weights) == ("0.0.1", [], True)
    repeats = 3
    steps = [(case.batch, case.context, len(case.step_ms)) for case in found.cases]
    assert steps == [(1, 64, repeats * 24), (2, 64, repeats * 24)]
    for case in found.cases:
        assert case.batch <= np.median(case.step_ms)  # a step of the stand-in sleeps that long
        assert case.tpot_ms >= 0.5 * case.batch  # the difference of two lengths: other work beside it may shrink it
        expected = uniform_experts(NANO_GEOMETRY, case.batch)
        assert len(case.experts_by_layer) == len(NANO_GEOMETRY.sparse_layers)
        assert np.mean(case.experts_by_layer) == pytest.approx(expected, rel=0.06)


def test_what_the_engine_resolved_is_read_from_its_log(tmp_path: Path) -> None:
    found = measured(tmp_path)
    assert found.resolved == {
        "attention_backend": "FLASH_ATTN 3",
        "moe_backend": "TRITON",
        "moe_table": "E=128,N=768,device_name=NVIDIA_H200.json",
        "graph_mode": "FULL_AND_PIECEWISE",
        "compile_mode": "VLLM_COMPILE",
    }
    assert len(found.lines) == 3 and all("INFO" in line for line in found.lines)
    assert found.lines[2].endswith("Using configuration from E=128,N=768,device_name=NVIDIA_H200.json for MoE layer.")


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("INFO Using AttentionBackendEnum.TRITON_ATTN backend.", "attention_backend", "TRITON_ATTN"),
        ("WARNING Using default MoE config. Performance might be", "moe_table", "default MoE config"),
        ("'cudagraph_mode': <CUDAGraphMode.FULL_DECODE_ONLY: (2, 0)>", "graph_mode", "FULL_DECODE_ONLY"),
        ("config: {'mode': <CompilationMode.VLLM_COMPILE: 3>,", "compile_mode", "VLLM_COMPILE"),
        ("INFO Using FlashInfer backend for sampling", "attention_backend", None),
    ],
)
def test_other_spellings_of_the_log(line: str, field: str, value: str | None) -> None:
    assert vllm.parse_log([line])[0].get(field) == value


def test_the_folder_that_is_served_is_our_geometry(tmp_path: Path) -> None:
    full = PRESETS["north_mini_code"]
    (tmp_path / "config.json").write_text(json.dumps(full.to_hf_config() | {"bos_token_id": 2}))
    assert Geometry.from_hf_config(tmp_path) == full


def test_weights_that_vllm_does_not_take_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "other_names")
    found = measured(tmp_path)
    assert not found.same_weights and len(found.cases) == 2
    assert found.errors == ["weights alike: ValueError: no tensor model.embed_tokens.weight"]


def test_an_engine_that_does_not_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    log = re.escape(str(tmp_path / "vllm" / "log.txt"))
    said = rf"vLLM 0\.0\.1 measured nothing: exit status 1, its log {log} ends: .*no kernel image is available"
    with pytest.raises(MkError, match=said):
        measured(tmp_path)


def test_one_that_dies_on_the_way_keeps_what_it_measured_and_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "falls")
    found = measured(tmp_path)
    assert [case.batch for case in found.cases] == [1]
    (error,) = found.errors
    assert error.startswith(f"exit status 3, its log {tmp_path / 'vllm' / 'log.txt'} ends: ")
    assert error.endswith("CUDA error: an illegal memory access")


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(MkError, match="stopped after 1 s"):
        measured(tmp_path, "baseline.vllm.timeout_s=1", "baseline.vllm.python=" + str(slow_python(tmp_path)))


def slow_python(folder: Path) -> Path:
    path = folder / "python"
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] || sleep 60\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["baseline.vllm.site=null", "baseline.vllm.python=/no/such/python"], "python=/no/such/python: No such file"),
        (["baseline.vllm.site=null", f"baseline.vllm.python={SITE}"], "python=.*fake_vllm: Permission denied"),
        (["baseline.vllm.site=null", "baseline.vllm.python=/bin/echo"], "python=/bin/echo says .* where vLLM's"),
        (["baseline.vllm.site=/no/such/folder"], "site=/no/such/folder is no folder"),
        ([f"baseline.vllm.site={SITE.parent}"], "site=.*tests has no vLLM"),
    ],
)
@pytest.mark.usefixtures("said_to_have_a_card")
def test_a_vllm_that_is_not_where_it_is_configured_is_an_error_before_anything_runs(
    overrides: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(MkError, match=rf"baseline\.vllm\.{message}"):
        vllm_decode.main(config(*overrides, f"run_dir={tmp_path}/runs"))
    assert not (tmp_path / "runs").exists()


def test_an_interpreter_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "FIND_TIMEOUT_S", 0.2)
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 20\n")
    silent.chmod(0o755)
    options = config(f"baseline.vllm.python={silent}").baseline.vllm
    assert options is not None
    with pytest.raises(MkError, match=r"baseline\.vllm\.python=.* does not answer: .*timed out"):
        vllm.find(options)


def test_only_without_a_configured_one_vllm_is_missing() -> None:
    options = config("baseline.vllm.site=null").baseline.vllm
    assert options is not None
    with pytest.raises(vllm.Missing, match="no vLLM is configured") as missing:
        vllm.find(options)
    assert missing.value.hint is not None and "pip install vllm" in missing.value.hint


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("stalls", "batch 2, context 64: ValueError: a sequence of 2 sat out a step after 7 of all"),
        ("stops", "batch 2, context 64: ValueError: 11 timed steps of all 2 sequences, not 24"),
    ],
)
def test_steps_that_are_not_those_asked_for_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_VLLM", mode)
    found = measured(tmp_path)
    assert [(case.batch, len(case.step_ms)) for case in found.cases] == [(1, 72)]
    assert message in found.errors


def test_an_engine_that_begins_with_the_first_sequence_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where prompts are so long that the first one is far ahead before the last is there."""
    monkeypatch.setenv("FAKE_VLLM", "begins")
    found = measured(tmp_path, "baseline=vllm_synthetic", cases=[(64, 1), (64, 2), (17_000, 2)])
    assert not found.errors and [len(case.step_ms) for case in found.cases] == [72, 72, 72]


@pytest.mark.parametrize("kv", ["vllm", "vllm_synthetic"])
def test_one_started_engine_measures_every_context_and_batch(kv: str, tmp_path: Path) -> None:
    cases = [(40, 1), (40, 3), (90, 2)]
    found = measured(tmp_path, f"baseline={kv}", cases=cases)
    assert not found.errors and not found.absent
    assert [(case.context, case.batch) for case in found.cases] == cases
    assert all(len(case.step_ms) == 72 and case.experts_by_layer for case in found.cases)
    lines = (tmp_path / "vllm" / "results.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["case"] == "started" for line in lines) == 1


def test_a_case_that_the_engine_has_no_room_for_is_absent_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "small")  # room for 200 keys: two sequences of 86, neither three nor two of 126
    found = measured(tmp_path, cases=[(64, 2), (64, 3), (104, 1), (104, 2), (64, 1)])
    assert not found.errors and [(case.context, case.batch) for case in found.cases] == [(64, 2), (104, 1), (64, 1)]
    (three, long) = found.absent
    assert three.startswith("batch 3, context 64: never all 3 sequences at a time")
    assert long.startswith("batch 2, context 104: never all 2")
    assert all(case.experts_by_layer for case in found.cases)


def test_where_there_is_room_for_no_case_that_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "small")
    with pytest.raises(MkError, match="measured nothing: batch 3, context 64: never all 3 sequences at a time"):
        measured(tmp_path, cases=[(64, 3)])


def test_uniform_ids_are_distinct_in_a_row_and_fresh() -> None:
    weights, ids = uniform_distinct(8, 128, 8, torch.device("cpu"))
    assert all(len(row.unique()) == 8 for row in ids) and (weights == 0.125).all()
    draws = torch.stack([uniform_distinct(8, 128, 8, torch.device("cpu"))[1] for _ in range(400)])
    distinct = np.mean([len(step.unique()) for step in draws])
    assert distinct == pytest.approx(uniform_experts(PRESETS["north_mini_code"], 8), rel=0.02)


def test_the_strategy_is_registered_under_the_name_that_the_environment_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SITE))
    register_uniform()
    simulator = sys.modules["vllm.model_executor.layers.fused_moe.router.routing_simulator_router"]
    strategy = simulator.RoutingSimulator.strategies[vllm.STRATEGIES["uniform"]]
    weights, ids = strategy.route_tokens(torch.zeros(3, 16), torch.zeros(3, 24), 4, torch.int32)
    assert weights.shape == ids.shape == (3, 4) and ids.dtype == torch.int32
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        monkeypatch.delitem(sys.modules, name)


def test_only_steps_of_the_batch_are_counted() -> None:
    same, apart, prefill = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0, 1], [2, 3]]), torch.zeros(7, 2)
    assert distinct_by_layer({1: [prefill, same, apart], 2: [same, same]}, 2) == [3.0, 2.0]
    assert distinct_by_layer({1: [prefill]}, 2) == [] and distinct_by_layer({}, 2) == []


# ---- the experiment, with the kernel's rows made up ----
def kernel_rows(cfg: Config, within: RunFolder) -> list[Row]:
    """Steps of half a millisecond and as many experts as uniform routing has."""
    run = within.under(cfg)
    rows = []
    for batch in cfg.experiment.batches:
        experts = uniform_experts(NANO_GEOMETRY, batch)
        raw = raw_steps([0.5 + 0.001 * (i % 5) for i in range(24)], [experts] * len(NANO_GEOMETRY.sparse_layers))
        context = [cfg.experiment.context] * batch
        figures = step_figures(NANO_GEOMETRY, cfg.gpu, context, raw)
        row = run.row(engine="cuda", dtype="bfloat16", batch=batch, context=context, checks={"equal": True}, **figures)
        rows.append(run.append_row(row, raw))
    return rows


@pytest.fixture
def rows_of_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's rows are `kernel_rows`, with or without a card."""
    monkeypatch.setattr(decode_throughput, "check", lambda *_: None)
    monkeypatch.setattr(decode_throughput, "run", kernel_rows)
    monkeypatch.setattr("mk.results.step_figures.EXPERTS_AGREE", 0.1)  # nano has 4 expert layers: 32 steps say little


@pytest.fixture
def said_to_have_a_card(rows_of_no_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch says that there is a card; for tests in which nothing of torch would then be put on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def run_of(folder: Path) -> list[Row]:
    (path,) = folder.glob("*-vllm_decode-*/rows.jsonl")
    return read_rows(path)


@pytest.mark.usefixtures("said_to_have_a_card")
def test_rows_of_both_engines_for_both_routings_and_their_ratio(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vllm_decode.main(config(f"run_dir={tmp_path}")) == 0
    rows = run_of(tmp_path)
    engines = [("cuda", 1), ("cuda", 2), ("vllm", 1), ("vllm", 2)]
    for routing in ("uniform", "checkpoint"):
        found = sorted((row.engine, row.batch) for row in rows if row.routing == routing)
        assert found == engines
    theirs = [row for row in rows if row.engine == "vllm"]
    (raw_path,) = tmp_path.glob("*/raw.jsonl")
    raw = read_raw(raw_path)
    for row in theirs:
        mine = next(r for r in rows if (r.engine, r.routing, r.batch) == ("cuda", row.routing, row.batch))
        assert row.ratio_to == mine.digest and row.p50_ms and mine.p50_ms
        assert row.ratio == pytest.approx(row.p50_ms / mine.p50_ms)
        own = raw[row.raw_sha256 or ""]
        again = median_ratio(own["step_ms"], own["kernel_step_ms"])
        assert (row.ratio, row.ratio_low, row.ratio_high) == (again.ratio, again.low, again.high)
        assert own["kernel_step_ms"] == raw[mine.raw_sha256 or ""]["step_ms"] and own["log"]
        assert (row.version, row.moe_backend, row.kv, row.same_weights) == ("0.0.1", "TRITON", "prefilled", True)
    out = capsys.readouterr().out
    assert out.count("[") >= 4 and "missing" not in out and "attention_backend FLASH_ATTN 3" in out


@pytest.mark.usefixtures("said_to_have_a_card")
def test_no_ratio_where_experts_were_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "no_count")
    assert vllm_decode.main(config(f"run_dir={tmp_path}", "experiment.routings=[uniform]")) == 0
    theirs = [row for row in run_of(tmp_path) if row.engine == "vllm"]
    assert [row.ratio for row in theirs] == [None, None] == [row.bytes_per_step for row in theirs]
    assert all(row.checks == {"experts_counted": False} for row in theirs)
    assert capsys.readouterr().out.count("no ratio: experts not counted") == 2


@pytest.mark.usefixtures("said_to_have_a_card")
def test_no_ratio_where_experts_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mk.results.step_figures.EXPERTS_AGREE", 1e-9)
    assert vllm_decode.main(config(f"run_dir={tmp_path}", "experiment.routings=[uniform]")) == 0
    two = next(row for row in run_of(tmp_path) if row.engine == "vllm" and row.batch == 2)
    assert two.ratio is None and two.distinct_experts is not None


@pytest.mark.usefixtures("said_to_have_a_card")
def test_without_vllm_the_kernel_is_measured_and_the_table_says_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vllm_decode.main(config(f"run_dir={tmp_path}", "baseline.vllm.site=null")) == 0
    assert {row.engine for row in run_of(tmp_path)} == {"cuda"}
    out = capsys.readouterr().out
    assert "vLLM is missing" in out and "pip install vllm" in out and out.count("missing") == 5


@pytest.mark.usefixtures("said_to_have_a_card")
def test_a_vllm_that_fails_fails_the_run_but_not_the_kernels_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    assert vllm_decode.main(config(f"run_dir={tmp_path}", "experiment.routings=[uniform]")) == 1
    assert len(run_of(tmp_path)) == 2 and "no kernel image" in capsys.readouterr().out


def test_a_row_that_two_ways_of_timing_disagree_on_is_unstable() -> None:
    steady = [1.0] * 9 + [1.01]
    assert vllm_rows.unstable(steady, 1.02) is None
    assert vllm_rows.unstable(steady, 0.5) == "TPOT by difference is -50% off p50"
    assert vllm_rows.unstable([1.0] * 8 + [1.5] * 2, 1.02) == "p90 is 1.50 x p10"


def test_its_server_is_started_with_what_ours_would_have(tmp_path: Path) -> None:
    """In a process that becomes vLLM's: the stand-in says what it was given, and its exit is the command's."""
    given = ["experiment=vllm_serve", f"baseline.vllm.site={SITE}", "server.slots=3", "server.port=1",
             "baseline.vllm.arguments=[--enforce-eager]"]  # fmt: skip
    done = subprocess.run([sys.executable, "run.py", *given], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    options = dict(argument.split("=", 1) for argument in said["arguments"] if "=" in argument)
    assert Path(options.pop("--model")) == NANO and said["offline"] == "1"
    assert said["arguments"][-2:] == ["--enable-auto-tool-choice", "--enforce-eager"]
    assert options == {
        "--served-model-name": "nano",
        "--host": "127.0.0.1",
        "--port": "1",
        "--max-model-len": "8192",
        "--max-num-seqs": "3",
        "--dtype": "bfloat16",
        "--gpu-memory-utilization": "0.85",
        "--attention-backend": "FLASH_ATTN",
        "--moe-backend": "triton",
        "--generation-config": "vllm",
        "--reasoning-parser": "cohere_command4",
        "--tool-call-parser": "cohere_command4",
    }
    with pytest.raises(MkError, match="no checkpoint to serve"):
        vllm_serve.checkpoint(load_config(["experiment=vllm_serve", "weights=random"]))


def test_both_servers_are_asked_the_same(committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["experiment=accuracy_vllm", f"baseline.vllm.site={SITE}", f"run_dir={tmp_path / 'runs'}",
                 "experiment.limit=4", "benchmark.max_tokens=6", "sampling=top_p", "experiment.runs=2"]  # fmt: skip
    cfg = load_config(overrides)
    assert accuracy_vllm.main(cfg) == 0
    folders = sorted((tmp_path / "runs").iterdir(), key=lambda folder: (folder / "rows.jsonl").stat().st_mtime_ns)
    rows = [read_rows(folder / "rows.jsonl")[0] for folder in folders]
    assert [row.engine for row in rows] == ["interpreter", "vllm"] and rows[0].requests_hash == rows[1].requests_hash
    assert [row.experiment for row in rows] == ["accuracy", "accuracy_vllm"]
    theirs, raw = rows[1], read_raw(folders[1] / "raw.jsonl")[rows[1].raw_sha256 or ""]
    assert (theirs.dtype, theirs.version, theirs.moe_backend) == ("bfloat16", "0.0.1", "TRITON")
    assert theirs.schedule == theirs.wave_order == theirs.placement == "vllm" and theirs.model == "nano" and raw["log"]
    assert (rows[0].schedule, rows[0].placement, rows[0].version) == ("static", "row_owner", None)
    # a rerun looks for the one new folder of the run's configuration, which names no server that has ended
    (config,) = read_configs(folders[1]).values()
    assert stored_config(config) == cfg
    assert [*folders[1].parent.glob(f"*-accuracy_vllm-{config_hash(cfg)[:8]}*")] == [folders[1]]
    assert all(row.checks["metrics_are_requests"] and row.answers == 8 for row in rows)
    assert rows[0].score_difference is None and rows[1].score_difference is not None
    assert "vLLM's server answers after" in capsys.readouterr().out
    for folder in folders:
        require_kept(committed, folder, score=lambda score: score + 0.5)


def test_a_server_that_does_not_start_is_told_by_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VLLM", "dies")
    job = load_config(["experiment=vllm_serve", f"baseline.vllm.site={SITE}"])
    with pytest.raises(MkError, match=rf"ended with status 1: its log {tmp_path / 'log'} ends: .* no card"):  # noqa: SIM117
        with vllm_server(job, tmp_path / "log"):
            pass


@pytest.mark.parametrize("falls", [True, False])
def test_a_server_that_dies_while_it_is_asked_is_told_by_its_log_and_one_that_lives_is_not(
    falls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "falls" if falls else "")
    monkeypatch.setattr(server_process, "DYING_S", 10.0 if falls else 0.1)
    job = load_config(["experiment=vllm_serve", f"baseline.vllm.site={SITE}"])
    with pytest.raises(MkError) as caught, vllm_server(job, tmp_path / "log") as running:
        fetch(f"{running.base_url}/completions", {"seed": 1} if falls else {}, 20)
    died = f"vLLM's server ended with status 3 while it was asked: its log {tmp_path / 'log'} ends: "
    assert str(caught.value).startswith(died) == falls
    assert ("an illegal memory access" if falls else "does not answer") in str(caught.value)
