"""Weights & Biases for real, offline: what it wrote is read back by its own tool; its failures cost no run."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mk.compose import load_config
from mk.config import resolved
from mk.results import loggers
from mk.results.rows import read_rows
from mk.results.runs import RunFolder

WANDB = Path(sys.executable).with_name("wandb")


@pytest.fixture(autouse=True)
def a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of a user's account, and nothing left beside the run folder: both can be seen here."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(loggers, "_sweep", None)
    yield
    for name in loggers.FOLDERS:
        os.environ.pop(name, None)  # the logger's, of this test's folder


def run_of(tmp_path: Path, *overrides: str) -> RunFolder:
    with RunFolder.create(load_config(["logger=wandb", *overrides]), root=tmp_path / "runs") as run:
        for batch, speed in ((1, 20.5), (2, 31.25)):
            run.append_row(run.row(engine="interpreter", dtype="float32", context=[3] * batch, checks={"equal": True},
                                   batch=batch, tok_s=speed), {"new_tokens": [64], "decode_s": 3.0})  # fmt: skip
        (run.path / "schedule.png").write_bytes(png())
        (run.path / "samples.jsonl").write_text("{}\n")  # an evaluation's; what it does not have is not missed
    return run


def png() -> bytes:
    """A picture of one pixel."""
    data = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    return base64.b64decode(data)


def records(run: RunFolder) -> list[dict[str, Any]]:
    (log,) = run.path.glob("wandb/offline-run-*/*.wandb")
    said = subprocess.run([WANDB, "leet", "inspect", "--json", log], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """As W&B names what is nested: `env.python`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def test_offline_rows_configuration_and_files_are_read_back(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    found = records(run)
    (started,) = (record["run"] for record in found if record["type"] == "run")
    assert started["job_type"] == "quickstart" and started["display_name"] == run.path.name
    assert not started.get("host") and not started.get("run_group")
    assert {k: v for k, v in started["config"]["update"].items() if k != "_wandb"} == resolved(run.config)
    history = [record["history"]["item"] for record in found if record["type"] == "history"]
    rows = read_rows(run.path / "rows.jsonl")
    assert len(history) == len(rows) + 1  # and one with the table and the figure
    for step, (item, row) in enumerate(zip(history, rows, strict=False)):
        assert item["_step"] == step
        assert {k: v for k, v in item.items() if not k.startswith("_")} == flat(row.to_json())
    assert (history[-1]["rows.nrows"], history[-1]["figures/schedule._type"]) == (2, "image-file")
    (artifact,) = (r["artifact"] for r in found if r["type"] == "artifact" and r["artifact"]["type"] == "rows")
    hashes = {entry["path"]: entry["digest"] for entry in artifact["manifest"]["contents"]}
    assert set(hashes) == {*loggers.KEPT, "samples.jsonl", "schedule.png"}
    for name, digest in hashes.items():
        assert base64.b64encode(hashlib.md5((run.path / name).read_bytes()).digest()).decode() == digest
    assert next(record["exit"]["exit_code"] for record in found if record["type"] == "exit") == 0


def test_all_its_files_lie_in_the_run_folder(tmp_path: Path) -> None:
    first, second = run_of(tmp_path), run_of(tmp_path)
    assert first.path != second.path and all(any(run.path.glob("wandb/data/**/*")) for run in (first, second))
    assert not list((tmp_path / "here").iterdir()) and not (tmp_path / "home").exists()


def test_a_run_that_breaks_off_is_finished_as_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        RunFolder.create(load_config(["logger=wandb"]), root=tmp_path / "runs") as run,
    ):
        raise KeyboardInterrupt
    assert next(record["exit"]["exit_code"] for record in records(run) if record["type"] == "exit") == 1


def test_runs_of_a_sweep_are_a_group(tmp_path: Path) -> None:
    jobs = [["placement=row_owner", "gpu.sms=4"], ["placement=row_owner", "gpu.sms=8"]]
    loggers.begin_sweep(loggers.sweep_name(jobs))
    (started,) = (record["run"] for record in records(run_of(tmp_path)) if record["type"] == "run")
    assert started["run_group"] == "2 x gpu.sms"


@pytest.mark.parametrize("key", ["0" * 40, None])
def test_without_a_network_an_online_run_goes_on_offline(
    key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    assert loggers.ONLINE_S < 20
    monkeypatch.setattr(loggers, "ONLINE_S", 3)
    started = time.monotonic()
    run = run_of(tmp_path, "logger.mode=online")
    assert time.monotonic() - started < 20
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "W&B" in line)
    (folder,) = run.path.glob("wandb/offline-run-*")
    assert line.startswith("W&B is not reached") and line.endswith(f"wandb sync {folder}")
    assert sum(record["type"] == "history" for record in records(run)) == 3


@pytest.mark.parametrize("method", ["init", "Table"])
def test_a_tracker_that_fails_is_told_once_and_costs_no_row(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def fails(*args: Any, **more: Any) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(wandb, method, fails)
    run = run_of(tmp_path)
    assert len(read_rows(run.path / "rows.jsonl")) == 2 and (run.path / "rows.csv").exists()
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("wandb: ")]  # its own advice
    assert said == ["W&B failed and is left out: RuntimeError: disk full"]
    if wandb.run is not None:
        wandb.run.finish()
