"""Processes that write to a log and end with all that they started; and what a log says last."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mk.errors import MkError

LOOK_S = 0.05  # between two looks at a process that runs
TRIES = 100  # at ending what keeps starting others
LINES, CHARACTERS = 5, 600  # of the end of a log that an error quotes
TAIL = 1 << 16  # bytes that are looked at for them


@contextlib.contextmanager
def started(
    command: Sequence[str], env: Mapping[str, str], log: Path, stop_s: float = 0.0, folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `log`, with `stop_s` seconds to end by itself. Whatever it started ends with it.

    folder: that it works in, this process's by default.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            env=env,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
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
    """(how it ended, seconds it took) of a command with a HOME of its own, of which nothing is left then.

    How: "status N", "signal N" or "time limit". look: called while it runs; what it raises ends the command too.
    """
    begun = time.monotonic()
    try:
        with started(command, env, log, folder=folder) as process:
            while process.poll() is None and time.monotonic() - begun < limit_s:
                look()
                time.sleep(LOOK_S)
            wall_s, code = time.monotonic() - begun, process.poll()
    finally:
        end_all_at_home(env["HOME"])
    if code is None:
        return "time limit", wall_s
    return (f"status {code}" if code >= 0 else f"signal {-code}"), wall_s


def end_all_at_home(home: str) -> None:
    """Kills every process whose HOME is this one: agents put commands into sessions of their own, out of the group.

    Raises MkError where some remain. Finds none on a system without /proc.
    """
    for _ in range(TRIES):
        left = at_home(home)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    raise MkError(f"processes {', '.join(map(str, left))} do not end", hint=f"their HOME is {home}")


def at_home(home: str) -> list[int]:
    """Processes that run with this HOME."""
    wanted = f"HOME={home}".encode()
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of somebody else, or ended meanwhile
            if wanted in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found
