"""A process that writes to a log, ended with all it started; and what its log says last."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

LINES, CHARACTERS = 5, 600  # of the end of a log that an error quotes
TAIL = 1 << 16  # bytes that are looked at for them


@contextlib.contextmanager
def started(
    command: list[str], env: Mapping[str, str], log: Path, stop_s: float = 0.0
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `log`, with `stop_s` seconds to end by itself. Whatever it started ends with it."""
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
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
