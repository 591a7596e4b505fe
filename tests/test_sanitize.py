"""What compute-sanitizer prints is read right, and no verdict passes on silence. The reports are cut from ones that it
printed."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from experiments import sanitize, sanitized_step
from experiments.sanitize import EXPLAINED, Finding, find_sanitizer, parse, reason, report, verdicts
from mk.compose import load_config
from mk.errors import MkError
from mk.kernel.build import CSRC
from mk.kernel.runtime import Runtime
from mk.programs import Plan
from mk.results.rows import read_rows
from mk.splits import SplitPolicy
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
========= Error: Race reported between Write access at planted_race(Shared &)+0xd00 in delay.cuh:39
=========     and Write access at planted_race(Shared &)+0xd00 in /src/mk/csrc/delay.cuh:39 [24 hazards]
=========
========= Warning: Race reported between Write access at Streams::keep(const float (&)[4])+0x90 in gemm.cuh:42
=========     and Read access at Storer::take(float (&)[4])+0xa0 in storer.cuh:81 [508 hazards]
=========     and Write access at down_owned(int)::[lambda(int)]::operator ()(int)+0xb0 in experts.cuh:40 [4 hazards]
=========
{STEPS}========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_reports_are_read() -> None:
    assert parse("memcheck", CLEAN) == Finding("memcheck", 0, {}, True)
    assert parse("memcheck", INVALID) == Finding("memcheck", 1, {}, False)
    races = parse("racecheck", RACES)
    assert races.count == 2 and races.complete
    assert races.hazards == {
        "planted_race delay.cuh:39 (Write) + planted_race delay.cuh:39 (Write)": 24,
        "Storer::take storer.cuh:81 (Read) + Streams::keep gemm.cuh:42 (Write)": 508,
        "Streams::keep gemm.cuh:42 (Write) + down_owned experts.cuh:40 (Write)": 4,
    }
    lines = report("racecheck", races)
    assert lines[1].startswith("     508 x Storer::take") and "NOT explained" in lines[1] and "planted" in lines[2]


def test_a_hazard_is_explained_by_what_writes_and_two_writes_only_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "EXPLAINED", {"Streams::keep": "an mbarrier", "Guard::at + Streams::keep": "a note"})
    keep = "Streams::keep gemm.cuh:42 (Write)"
    assert reason(f"Storer::take storer.cuh:81 (Read) + {keep}") == "an mbarrier"
    assert reason(f"{keep} + Guard::at wait.cuh:57 (Write)") == "a note"
    assert reason(f"{keep} + {keep}") is None
    assert reason(f"down_owned experts.cuh:40 (Write) + {keep}") is None
    assert reason(f"down_owned experts.cuh:40 (Atomic) + {keep}") is None
    assert reason("Streams::keep gemm.cuh:42 (Read) + Guard::at wait.cuh:57 (Read)") is None


def test_what_is_explained_is_a_function_of_the_kernel() -> None:
    sources = [path.read_text() for path in CSRC.rglob("*.cuh")]
    for function in {each for writers in EXPLAINED for each in writers.split(" + ")}:
        *of, name = function.split("::")
        declared = rf"{rf'^class {of[0]} .*?' if of else '^'}(?:  )?DEVICE [\w ]*\b{name}\("
        assert any(re.search(declared, text, re.M | re.S) for text in sources), function


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
    other = Finding("racecheck", 1, {"Storer::take storer.cuh:81 (Read) + Streams::keep gemm.cuh:42 (Write)": 1}, True)
    assert not verdicts(clean, other, found)["races_explained"]
    monkeypatch.setitem(EXPLAINED, "Streams::keep", "an mbarrier orders them")
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
    assert (row.batch, row.context, row.arm) == (3, [320, 0, 64], "static lists, then work stealing, on 6 SMs")
    assert not any(row.checks.values()) and "memcheck_clean FAILED" in capsys.readouterr().out


def test_the_watched_steps_decode(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """On a stand-in for the card: static lists, then stealing, two queued steps each."""

    def runtime(*args: object, **more: object) -> Runtime:
        fake_device.runtime = Runtime(*args, **more)
        return fake_device.runtime

    monkeypatch.setattr(sanitized_step, "Runtime", runtime)
    monkeypatch.setattr("mk.kernel.build.build", fake_build)
    monkeypatch.setattr(sanitized_step, "DEVICE", torch.device("cpu"))
    sanitized_step.main([sanitize.PLANTED])
    assert fake_device.launches == 4 and capsys.readouterr().out.startswith("decoded 2 steps twice")
    assert fake_device.runtime.defines == ("MK_PLANTED_RACE",)
    program, cfg = fake_device.runtime.program, load_config(["experiment=sanitize"])
    assert program is not None and (program.shape.rows, program.shape.n_sm) == (cfg.batch.size, sanitized_step.SMS)
    assert program.shape.splits == Plan.from_config(cfg).splits == SplitPolicy(128, 2)


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
