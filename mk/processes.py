"""Processes that write to a log and end, a command with all that it started; and what a log says last."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mk.errors import MkError

LOOK_S = 0.05  # between two looks at a process that runs
TRIES = 100  # at ending what keeps starting others
LINES, CHARACTERS = 5, 600  # of the end of a log that an error quotes
SET_CHILD_SUBREAPER, GET_CHILD_SUBREAPER = 36, 37  # of prctl
TAIL = 1 << 16  # bytes that are looked at for them


@contextlib.contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str], log: Path, stop_s: float = 0.0, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `log`, with `stop_s` seconds to end by itself. What it started in its process group
    ends with it.

    folder: that it works in, this process's by default. Raises MkError for a command that cannot be executed.
    """
    with log.open("w") as file:
        try:
            process = subprocess.Popen(
                command,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:  # of a script, its interpreter may be what is missing
            raise MkError(f"{command[0]} cannot be executed: {error.strerror}") from error
    try:
        yield process
    finally:
        try:
            if stop_s:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(stop_s)
        finally:  # also where a second interrupt ends the wait
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # vLLM's engine has a process of its own
            process.wait()


def log_end(log: Path) -> str:
    """Names the log and quotes its last lines."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"its log {log} cannot be read: {error.strerror}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return f"its log {log} is empty"
    return f"its log {log} ends: {' | '.join(lines[-LINES:])[-CHARACTERS:]}"


def run_within(
    limit_s: float,
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    folder: Path,
    look: Callable[[], None] = lambda: None,
) -> tuple[str, float]:
    """(how it ended, seconds it took) of a command, of which nothing is left then.

    How: "status N", "signal N" or "time limit". look: called while it runs; what it raises ends the command too.
    """
    begun = time.monotonic()
    with ending_all(), started(command, env, log, folder=folder) as process:
        while process.poll() is None and time.monotonic() - begun < limit_s:
            look()
            time.sleep(LOOK_S)
        wall_s, code = time.monotonic() - begun, process.poll()
    if code is None:
        return "time limit", wall_s
    return (f"status {code}" if code >= 0 else f"signal {-code}"), wall_s


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """Ends what a command that is started inside has left, in whatever session and environment, and whoever's child.

    Orphans below this process become its children meanwhile (Linux: PR_SET_CHILD_SUBREAPER). Its other children and
    what they started go on. Raises MkError where something remains. Finds nothing on a system without /proc.
    """
    others, before = children(processes()), subreaper(None)
    subreaper(True)
    try:
        yield
    finally:
        try:
            end_but(others)
        finally:
            subreaper(before)


def end_but(others: Collection[int]) -> None:
    """Kills and reaps all below this process that is neither below `others`, its children, nor in a session of theirs
    or of its own: there are only those that somebody else in this process has started, or orphans of the others."""
    for _ in range(TRIES):
        found = processes()
        theirs = below(others, found)
        sessions = {os.getsid(0), *(found[pid].session for pid in theirs)}
        roots = [pid for pid in children(found) if pid not in theirs and found[pid].session not in sessions]
        left = below(roots, found)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in roots:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    raise MkError(f"processes {', '.join(map(str, sorted(left)))} do not end")


@dataclass(frozen=True, slots=True)
class Process:
    parent: int
    session: int


def processes() -> dict[int, Process]:
    """All there are, by pid, those that nobody has reaped among them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            _, parent, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            found[int(path.parent.name)] = Process(int(parent), int(session))
    return found


def children(found: Mapping[int, Process]) -> set[int]:
    return {pid for pid, process in found.items() if process.parent == os.getpid()}


def below(pids: Collection[int], found: Mapping[int, Process]) -> set[int]:
    """Those of the processes that are there, and all that they started."""
    inside = {pid for pid in pids if pid in found}
    new = inside
    while new:
        new = {pid for pid, process in found.items() if process.parent in new} - inside
        inside = inside | new
    return inside


def subreaper(on: bool | None) -> bool | None:
    """Whether orphans below this process become its children; None where no kernel says. on: sets it, None does not."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:
        return None
    value = ctypes.c_int()
    prctl(GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    if on is not None:
        prctl(SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0)
    return bool(value.value)
