"""Run a Python program that nobody has read, within limits, and say how it ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from mk.errors import MkError

ROOT = Path(__file__).resolve().parent.parent.parent
MAIN = "main.py"

# What a run applies, if the kernel lets it: new namespaces, an unprivileged user, no_new_privs, Landlock, seccomp.
APPLIED = ("namespaces", "user", "privileges", "files", "calls")

# Everything the program's environment holds. One thread, because numerical libraries reserve memory for each.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
_PASSES = 10  # over a folder that is removed; one does, unless something comes meanwhile
_PATIENCE_S = 10.0  # for the jail to start, and to end what it killed


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one run. `memory_mb` binds each process, so all together may hold `processes` times as much."""

    wall_s: float = 10.0
    cpu_s: int = 10  # of each process
    memory_mb: int = 1024  # of address space
    file_mb: int = 16  # of each file, and of each output stream
    processes: int = 16  # threads count


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. `why`: ok (status 0), failed, timeout (wall or CPU), killed (by another signal)."""

    why: str
    code: int | None  # exit status; None where a signal ended it
    stdout: str
    stderr: str
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.why == "ok"


class RefusedError(MkError):
    """The kernel refused a mechanism; `failed` has its reason by its name in `APPLIED`, or of `limits` or `start`."""

    def __init__(self, failed: Mapping[str, str]) -> None:
        super().__init__("sandbox: " + "; ".join(f"{name} is refused: {reason}" for name, reason in failed.items()))
        self.failed = dict(failed)


class Sandbox:
    """Runs programs with every protection of `APPLIED` but those in `missing`. `open_sandbox` (probes.py) makes one."""

    def __init__(self, missing: Collection[str] = (), scratch: Path | None = None) -> None:
        self._skip = [name for name in APPLIED if name in missing]
        self._scratch = scratch

    def run(
        self, program: str, stdin: str = "", limits: Limits | None = None, files: Mapping[str, bytes] | None = None
    ) -> Outcome:
        """Run a Python program with this interpreter, its packages, and `files` beside it.

        Nothing of it is left when this returns. Raises MkError where a protection that should be there was refused, or
        a process survives.
        """
        limits = limits or Limits()
        with _fresh_folder(self._scratch) as folder, _streams(stdin) as (read, out, err):
            (folder / MAIN).write_bytes(program.encode(errors="surrogatepass"))  # Python refuses what is not UTF-8
            for name, data in (files or {}).items():
                (folder / name).write_bytes(data)
            return self._run(folder, limits, read, out, err)

    def _run(self, folder: Path, limits: Limits, stdin: IO[bytes], out: IO[bytes], err: IO[bytes]) -> Outcome:
        reader, writer = os.pipe()
        order = {
            "argv": [sys.executable, "-I", "-B", MAIN],
            "folder": str(folder),
            "readable": [*_SYSTEM, sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent)],
            "limits": asdict(limits),
            "wall_s": limits.wall_s,
            "skip": self._skip,
            "report": writer,
        }
        started = time.monotonic()
        jail = subprocess.Popen(
            [sys.executable, "-E", "-s", "-S", "-B", "-m", "evals.sandbox.jail", json.dumps(order)],
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=ROOT,
            env=ENVIRONMENT,
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        try:
            jail.wait(limits.wall_s + _PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise MkError("sandbox: the jail outlives its time limit") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(jail.pid, signal.SIGKILL)
            jail.wait()
            with open(reader, "rb") as pipe:
                report = _parse_report(pipe.read())
        wall = time.monotonic() - started
        stdout, stderr = (_text(stream, limits) for stream in (out, err))
        if "failed" not in report:
            raise MkError(f"sandbox: the jail did not start: {stderr.strip()[-300:]}")
        if report["failed"]:
            raise RefusedError(report["failed"])
        if "ended" not in report:  # without namespaces, a program may reach the jail
            return Outcome("killed", None, stdout, stderr, wall)
        return _outcome(report["ended"], report["late"], stdout, stderr, wall)


def _outcome(ended: int, late: bool, stdout: str, stderr: str, wall: float) -> Outcome:
    if late:
        return Outcome("timeout", None, stdout, stderr, wall)
    if 0 <= ended < 128:
        return Outcome("ok" if ended == 0 else "failed", ended, stdout, stderr, wall)
    # equal limits: the kernel may send either of the first two; the others are of timers that the program set
    over = ended - 128 in (signal.SIGXCPU, signal.SIGKILL, signal.SIGPROF, signal.SIGVTALRM, signal.SIGALRM)
    return Outcome("timeout" if over else "killed", None, stdout, stderr, wall)


def _parse_report(data: bytes) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for line in data.splitlines():
        report |= json.loads(line)
    return report


@contextlib.contextmanager
def _fresh_folder(scratch: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mk-sandbox-", dir=scratch))
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Whatever a program may leave: folders that their owner cannot read, or deeper than a path or a stack goes.

    Raises MkError where it fills as fast as it is emptied, which takes a process that survives.
    """
    for _ in range(_PASSES):
        waiting = os.listdir(folder)
        while waiting:
            with _meanwhile():
                waiting += _take_apart(folder, waiting.pop())
        with _meanwhile():
            folder.rmdir()
            return
    raise MkError(f"sandbox: {folder} fills while it is removed")


def _take_apart(folder: Path, name: str) -> list[str]:
    """Remove a file, or a folder with its files; the folders in that move up, so that nothing is ever three deep. Their
    new names, which no program could have taken."""
    path, moved = folder / name, []
    if not stat.S_ISDIR(path.lstat().st_mode):
        path.unlink()
        return []
    path.chmod(0o700)
    for inner in list(path.iterdir()):
        if stat.S_ISDIR(inner.lstat().st_mode):
            inner.chmod(0o700)  # else only root may move it
            moved.append(secrets.token_hex(16))
            inner.rename(folder / moved[-1])
        else:
            inner.unlink()
    with _meanwhile():
        path.rmdir()
    return moved


@contextlib.contextmanager
def _meanwhile() -> Iterator[None]:
    """What goes or comes while a folder is emptied is left to the next pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise


@contextlib.contextmanager
def _streams(stdin: str) -> Iterator[tuple[IO[bytes], IO[bytes], IO[bytes]]]:
    """stdin, stdout and stderr as files without a name: the limit on file sizes bounds what is printed."""
    with contextlib.ExitStack() as stack:
        read, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        read.write(stdin.encode())
        read.seek(0)
        yield read, out, err


def _text(stream: IO[bytes], limits: Limits) -> str:
    stream.seek(0)
    return stream.read(limits.file_mb << 20).decode(errors="replace")
