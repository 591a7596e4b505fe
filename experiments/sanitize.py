"""Run compute-sanitizer's memcheck and racecheck over steps of nano, and racecheck over a build with a planted race.

memcheck must find nothing, racecheck must find the planted race: a word of shared memory that two warps write at
once. What racecheck says of the kernel itself is printed source line by source line, and fails the run unless the
reason stands in `EXPLAINED`. It watches shared memory alone: what SMs tell each other through global memory is the
verifier's to check.

The roles of a block never share a block-wide barrier after the first: a word passes from one warp to another through
an mbarrier (`Barrier`, ptx.cuh), whose arrive releases and whose wait acquires, and a bulk copy through the mbarrier
that it completes. racecheck does not follow an arrive of one lane, behind `__syncwarp`, for what the others of its warp
did, so it reports all that passes between roles that way. Of those objects it can say nothing; `kernel_bits`, which
holds claims, waits and signals up at random, can. What else lies in shared memory it does watch.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.sanitized_step import SMS, library
from experiments.unread import STEP, require_untouched
from mk.config import Config
from mk.device import DeviceFacts
from mk.errors import MkError
from mk.results.rows import Row
from mk.results.runs import ROOT, RunFolder

ARM = f"static lists, then work stealing, on {SMS} SMs"
PLANTED = "MK_PLANTED_RACE"
PLANTED_FILE = "delay.cuh"
_ROUTE = "read behind {0} and, two layers on, written by the storer, which has then stored all that was read with it"
EXPLAINED = {  # of a write and a read
    "bulk_copy": "a slot's copy is issued when all its readers gave the slot back (ring_empty), and read when it has "
    "landed (ring_full)",
    "Attention::scores": "the newest key goes into its slot by the one warp that reads that strip, between ring_full "
    "and ring_empty",
    "Streams::put": "a tile is written behind tile_empty and read behind tile_full",
    "Controller::put": "an entry of the task ring is written behind entry_empty and read behind entry_full",
    "TopK::list": _ROUTE.format("route_ready"),
    "TopK::announce": _ROUTE.format("route_ready"),
    "TopK::run": _ROUTE.format("route_weighed"),
    # of two writes
    "Attention::scores + bulk_copy": "the newest key goes into its slot between ring_full and ring_empty",
    "Guard::at + Guard::at": "where a role is, for a stall's report: of the eight consumer warps, any will do",
}
"""Function that writes, or two that do -> why what they write comes in order, or need not."""

_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed)")
_FINDING = re.compile(r"=+\s+(?:Error|Warning|Info)\b")
_ACCESS = re.compile(r"(Write|Read|Atomic) access at ([\w:]+).*? in (?:.*/)?([\w.]+):(\d+)")
_TIMES = re.compile(r"\[(\d+) hazards?\]")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a tool said. count: its own total. hazards: `function file:line (Write) + function file:line (Read)` -> how
    often. complete: the steps ran to their end."""

    tool: str
    count: int
    hazards: dict[str, int]
    complete: bool


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a tool found what is not explained, or did not find what was planted."""
    require_untouched(cfg, STEP)
    if torch.cuda.is_available():
        DeviceFacts.read().require(cfg.gpu)
    sanitizer = find_sanitizer()
    with RunFolder.create(cfg) as run:
        found = {}
        for name, tool, defines in (
            ("memcheck", "memcheck", ()),
            ("racecheck", "racecheck", ()),
            ("planted race", "racecheck", (PLANTED,)),
        ):
            library(defines)
            output = watch(sanitizer, tool, defines, cfg.experiment.timeout_s)
            (run.path / f"{name.replace(' ', '-')}.txt").write_text(output)
            found[name] = parse(tool, output)
            print("\n".join(report(name, found[name])), flush=True)
        raw = {"kind": "findings", **{name: dataclasses.asdict(of) for name, of in found.items()}}
        contexts = list(cfg.batch.contexts or ())
        row = run.append_row(run.measured(raw, engine="cuda", dtype="bfloat16", context=contexts, arm=ARM), raw)
        print(", ".join(name if passed else f"{name} FAILED" for name, passed in row.checks.items()))
        print(f"run folder: {run.path}")
    return 0 if all(row.checks.values()) else 1


def figures(row: Row, raw: dict[str, Any]) -> dict[str, Any]:
    """The row's verdicts, from what the tools said."""
    return {"checks": verdicts(*(Finding(**raw[name]) for name in ("memcheck", "racecheck", "planted race")))}


def find_sanitizer() -> Path:
    """compute-sanitizer from CUDA_HOME or PATH. Raises MkError when there is none."""
    candidates = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    if home := os.environ.get("CUDA_HOME"):
        candidates.insert(0, str(Path(home) / "bin" / "compute-sanitizer"))
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    raise MkError("no compute-sanitizer found", hint="set CUDA_HOME to a CUDA toolkit, or put it on PATH")


def watch(sanitizer: Path, tool: str, defines: tuple[str, ...], timeout_s: int) -> str:
    """All that a tool printed over `experiments.sanitized_step`. Raises MkError when it takes too long."""
    command = [str(sanitizer), "--tool", tool, "--print-limit", "1000"]
    if tool == "racecheck":
        command += ["--racecheck-report", "analysis"]
    command += [sys.executable, "-m", "experiments.sanitized_step", *defines]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MkError(f"{tool} took more than {timeout_s} s", hint=f"experiment.timeout_s={2 * timeout_s}") from error
    return done.stdout + done.stderr


def parse(tool: str, output: str) -> Finding:
    """A tool's report. Raises MkError where it has no summary: the tool did not watch anything."""
    summary = _SUMMARY.search(output)
    if summary is None:
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "nothing")
        raise MkError(f"{tool} gave no summary; its last line is: {last.strip()}")
    hazards: Counter[str] = Counter()
    first = None  # an access, and after it come those that it races with
    for line in output.splitlines():
        if _FINDING.match(line):
            first = None
        if match := _ACCESS.search(line):
            kind, function, file, number = match.groups()
            access = f"{function} {file}:{number} ({kind})"
            if first is None:
                first = access
            else:
                times = _TIMES.search(line)
                hazards[" + ".join(sorted((first, access)))] += int(times[1]) if times else 1
    count = int(summary[1] or summary[2] or 0)
    return Finding(tool, count, dict(hazards), "decoded" in output)


def reason(hazard: str) -> str | None:
    """Why a hazard is none; None where it has no reason. A reason for what is read is none for two writes."""
    return EXPLAINED.get(" + ".join(sorted(re.findall(r"([\w:]+) [\w.]+:\d+ \((?:Write|Atomic)\)", hazard))))


def verdicts(memory: Finding, races: Finding, planted: Finding) -> dict[str, bool]:
    unexplained = [hazard for hazard in races.hazards if reason(hazard) is None]
    return {
        "memcheck_clean": memory.complete and memory.count == 0,
        "races_explained": races.complete and not unexplained and (races.count == 0 or bool(races.hazards)),
        "planted_race_found": planted.complete
        and any(PLANTED_FILE in hazard for hazard in planted.hazards)
        and not any(PLANTED_FILE in hazard for hazard in races.hazards),
    }


def report(name: str, found: Finding) -> list[str]:
    """A line for the tool, and one for each pair of source lines, the most frequent first."""
    ended = "" if found.complete else "; the steps did NOT run to their end"
    lines = [f"{name}: {found.count} findings at {len(found.hazards)} pairs of source lines{ended}"]
    for hazard, times in sorted(found.hazards.items(), key=lambda item: -item[1]):
        why = reason(hazard) or ("planted" if PLANTED_FILE in hazard else "NOT explained")
        lines.append(f"  {times:>6} x {hazard}: {why}")
    return lines
