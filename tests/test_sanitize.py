"""What compute-sanitizer prints is read right, and no verdict passes on silence. The reports are made up after its
manual's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from experiments import sanitize, sanitized_step
from experiments.sanitize import EXPLAINED, Finding, files_of, find_sanitizer, parse, report, verdicts
from mk.compose import load_config
from mk.errors import MkError
from mk.rows import read_rows
from mk.runtime import Runtime
from tests.device_rig import FakeLibrary, fake_build, fake_device
from tests.promotion import committed, folder_of, no, repository, require_kept

__all__ = ["committed", "fake_device", "repository"]

STEPS = "decoded 2 steps twice, last tokens [1, 2, 3]\n"
CLEAN = f"========= COMPUTE-SANITIZER\n{STEPS}========= ERROR SUMMARY: 0 errors\n"
NO_RACES = f"========= COMPUTE-SANITIZER\n{STEPS}========= RACECHECK SUMMARY: 0 hazards displayed\n"
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at decode_step(StepParams)+0x1230 in ops/topk.cuh:31
========= ERROR SUMMARY: 1 error
"""
RACES = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at decode_step(StepParams)+0x200 in /src/mk/csrc/delay.cuh:38
=========     and Write access at decode_step(StepParams)+0x200 in /src/mk/csrc/delay.cuh:38 [24 hazards]
=========
========= Warning: Race reported between Write access at decode_step(StepParams)+0x90 in /src/mk/csrc/storer.cuh:70
=========     and Read access at decode_step(StepParams)+0xa0 in /src/mk/csrc/gemm.cuh:12 [508 hazards]
=========     and Read access at decode_step(StepParams)+0xb0 in /src/mk/csrc/ops/topk.cuh:40 [4 hazards]
=========
{STEPS}========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_reports_are_read() -> None:
    assert parse("memcheck", CLEAN) == Finding("memcheck", 0, {}, True)
    assert parse("memcheck", INVALID) == Finding("memcheck", 1, {}, False)
    races = parse("racecheck", RACES)
    assert races.count == 2 and races.complete
    assert races.hazards == {
        "delay.cuh:38 (Write) + delay.cuh:38 (Write)": 24,
        "gemm.cuh:12 (Read) + storer.cuh:70 (Write)": 508,
        "storer.cuh:70 (Write) + topk.cuh:40 (Read)": 4,
    }
    assert [files_of(hazard) for hazard in races.hazards][:2] == ["delay.cuh", "gemm.cuh+storer.cuh"]
    lines = report("racecheck", races)
    assert lines[1].startswith("     508 x gemm") and "NOT explained" in lines[1] and "planted" in lines[2]


def test_a_tool_that_watched_nothing_is_an_error() -> None:
    with pytest.raises(MkError, match="racecheck gave no summary; its last line is: Device not supported"):
        parse("racecheck", "========= COMPUTE-SANITIZER\nDevice not supported\n\n")


def test_verdicts_need_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    clean, none = parse("memcheck", CLEAN), Finding("racecheck", 0, {}, True)
    found = parse("racecheck", RACES)
    assert all(verdicts(clean, none, found).values())
    assert not verdicts(parse("memcheck", INVALID), none, found)["memcheck_clean"]
    assert not verdicts(Finding("memcheck", 0, {}, False), none, found)["memcheck_clean"]
    assert not verdicts(clean, none, none)["planted_race_found"]
    assert not verdicts(clean, Finding("racecheck", 3, {}, True), found)["races_explained"]  # unread findings
    other = Finding("racecheck", 1, {"gemm.cuh:12 (Read) + storer.cuh:70 (Write)": 1}, True)
    assert not verdicts(clean, other, found)["races_explained"]
    monkeypatch.setitem(EXPLAINED, "gemm.cuh+storer.cuh", "an mbarrier orders them")
    assert verdicts(clean, other, found)["races_explained"]


def test_a_run_of_the_three_tools_is_kept(
    committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def watch(sanitizer: Path, tool: str, defines: tuple[str, ...], timeout_s: int) -> str:
        return RACES if defines else CLEAN if tool == "memcheck" else NO_RACES

    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: Path("compute-sanitizer"))
    monkeypatch.setattr(sanitize, "library", lambda defines: None)
    monkeypatch.setattr(sanitize, "watch", watch)
    assert sanitize.main(load_config(["experiment=sanitize", f"run_dir={tmp_path / 'runs'}"])) == 0
    require_kept(committed, folder_of(tmp_path / "runs"), checks=no)
    monkeypatch.setattr(sanitize, "watch", lambda *args: INVALID)
    assert sanitize.main(load_config(["experiment=sanitize", f"run_dir={tmp_path / 'more'}"])) == 1
    (row,) = read_rows(folder_of(tmp_path / "more") / "rows.jsonl")
    assert not any(row.checks.values()) and "memcheck_clean FAILED" in capsys.readouterr().out


def test_the_watched_steps_decode(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On a stand-in for the card: static lists, then stealing, two queued steps each."""

    def runtime(*args: object, **more: object) -> Runtime:
        fake_device.runtime = Runtime(*args, **more)
        return fake_device.runtime

    monkeypatch.setattr(sanitized_step, "Runtime", runtime)
    monkeypatch.setattr(sanitized_step, "build", fake_build)
    monkeypatch.setattr(sanitized_step, "DEVICE", torch.device("cpu"))
    sanitized_step.main([sanitize.PLANTED])
    assert fake_device.launches == 4 and capsys.readouterr().out.startswith("decoded 2 steps twice")
    assert fake_device.runtime.defines == ("MK_PLANTED_RACE",)


def test_the_tool_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if not os.access("/usr/local/cuda/bin/compute-sanitizer", os.X_OK):
        with pytest.raises(MkError, match="no compute-sanitizer found"):
            find_sanitizer()
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert find_sanitizer() == tool
