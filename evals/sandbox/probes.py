"""Whether the sandbox holds on this machine: every protection is attacked before any code of a model runs.

What counts is what an attack finds, not which of the kernel's mechanisms stood against it: where a container forbids
namespaces, seccomp still refuses sockets. Both are in the report.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evals.sandbox.sandbox import APPLIED, ENVIRONMENT, Limits, RefusedError, Sandbox
from mk.errors import MkError
from mk.validation import require_one_of

PROTECTIONS = {
    "user": "neither root nor able to become it",
    "network": "no connection to a listener on this machine",
    "files": "no file outside its folder written, and none read but Python's and the system's",
    "signals": "no signal to a process outside",
    "environment": "no variable but the sandbox's own",
    "descriptors": "none open but the standard streams",
    "memory": "an allocation beyond the limit fails",
    "file_size": "a file beyond the limit fails",
    "processes": "forks beyond the limit fail",
    "cpu": "a busy loop ends at its CPU time",
    "wall": "a sleeper ends at its time",
    "tree": "no descendant outlives the run",
}
_SMALL = Limits(wall_s=10.0, cpu_s=5, memory_mb=256, file_mb=2, processes=8)

_ATTACK = """
import json, os, signal, socket, time
given = json.load(open("probe.json"))

def refused(action, *kinds):
    try:
        action()
    except kinds or OSError:
        return True
    return False

def write(path):
    with open(path, "w") as file:
        file.write("x")

def too_large():
    with open("large", "wb") as file:
        for _ in range(given["file_mb"] + 1):
            file.write(bytes(1 << 20))

def forks():
    children = []
    try:
        while len(children) <= given["processes"]:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
        return False
    except OSError:
        return bool(children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

def descriptors():
    found = []
    for number in range(4096):  # the lowest that is free is taken
        try:
            os.fstat(number)
            found.append(number)
        except OSError:
            pass
    return found

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
print(json.dumps({
    "user": 0 not in os.getresuid() and refused(lambda: os.setuid(0)),
    "network": refused(lambda: socket.create_connection(("127.0.0.1", given["port"]), 2).close()),
    "files": refused(lambda: write(given["outside"] + "/written")) and refused(lambda: open(given["secret"]).read()),
    "signals": refused(lambda: os.kill(given["pid"], 0)),
    "environment": set(os.environ) <= set(given["environment"]),
    "descriptors": descriptors() == [0, 1, 2],
    "memory": refused(lambda: bytearray(given["memory_mb"] << 20), MemoryError),
    "file_size": refused(too_large),
    "processes": forks(),
}))
"""
_ORPHAN = """
import os, sys
if os.fork() == 0:
    try:
        os.setsid()
    except OSError:
        pass
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {name!r}])
"""


@dataclass(frozen=True, slots=True)
class SandboxReport:
    """What stands in an evaluation's report. mechanisms: those that the kernel gives; held: each of `PROTECTIONS`."""

    mechanisms: list[str]
    held: dict[str, bool]

    @property
    def missing(self) -> list[str]:
        return [name for name, held in self.held.items() if not held]


def open_sandbox(allow_missing: Sequence[str] = (), scratch: Path | None = None) -> tuple[Sandbox, SandboxReport]:
    """A sandbox whose protections were all attacked just now, and held. Takes about three seconds.

    Raises MkError for one that did not hold and is not in `allow_missing`, and where Python cannot start in it.
    """
    for name in allow_missing:
        require_one_of("experiment.allow_missing", name, PROTECTIONS)
    sandbox, mechanisms = _with_what_there_is(scratch)
    report = SandboxReport(mechanisms, probe(sandbox))
    refused = [name for name in report.missing if name not in allow_missing]
    if refused:
        raise MkError(
            f"the sandbox lacks {', '.join(f'{name} ({PROTECTIONS[name]})' for name in refused)}",
            hint=f"experiment.allow_missing=[{','.join(refused)}] runs a model's code without",
        )
    return sandbox, report


def _with_what_there_is(scratch: Path | None) -> tuple[Sandbox, list[str]]:
    """A sandbox with every mechanism that can be applied here, and their names."""
    skip: list[str] = []
    while True:
        sandbox = Sandbox(skip, scratch)
        try:
            sandbox.run("pass", limits=_SMALL)
        except RefusedError as refusal:
            if not set(refusal.failed) <= set(APPLIED):
                raise
            skip += refusal.failed
        else:
            return sandbox, [name for name in APPLIED if name not in skip]


def probe(sandbox: Sandbox) -> dict[str, bool]:
    """Which protections hold, by `PROTECTIONS`."""
    with _targets() as (listener, outside, secret):
        given = {
            "port": listener.getsockname()[1],
            "outside": str(outside),
            "secret": str(secret),
            "pid": os.getpid(),
            "environment": [*ENVIRONMENT, "LC_CTYPE"],  # which Python sets itself
            "memory_mb": _SMALL.memory_mb,
            "file_mb": _SMALL.file_mb,
            "processes": _SMALL.processes,
        }
        outcome = sandbox.run(_ATTACK, limits=_SMALL, files={"probe.json": json.dumps(given).encode()})
        if not outcome.ok:
            raise MkError(f"the sandbox's probe {outcome.why}: {outcome.stderr.strip()[-300:]}")
        held: dict[str, bool] = json.loads(outcome.stdout)
        held["files"] &= not (outside / "written").exists()
    held["cpu"] = _ends_early(sandbox, "while True: pass", Limits(wall_s=8.0, cpu_s=1), 6.0)
    held["wall"] = _ends_early(sandbox, "import time; time.sleep(60)", Limits(wall_s=0.5), 6.0)
    name = f"orphan-{secrets.token_hex(8)}"
    sandbox.run(_ORPHAN.format(name=name), limits=_SMALL)
    held["tree"] = not processes_named(name)
    return {name: held[name] for name in PROTECTIONS}


def processes_named(word: str) -> list[int]:
    """Processes with an argument `word`."""

    def arguments(pid: str) -> list[bytes]:
        try:
            return Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile
            return []

    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and word.encode() in arguments(pid)]


def _ends_early(sandbox: Sandbox, program: str, limits: Limits, before_s: float) -> bool:
    outcome = sandbox.run(program, limits=limits)
    return outcome.why == "timeout" and outcome.wall_s < before_s


@contextmanager
def _targets() -> Iterator[tuple[socket.socket, Path, Path]]:
    """A listener, a folder that anybody may write in, and a file that anybody may read."""
    with tempfile.TemporaryDirectory(prefix="mk-outside-") as name, socket.create_server(("127.0.0.1", 0)) as listener:
        outside = Path(name)
        outside.chmod(0o777)
        secret = outside / "secret"
        secret.write_text("x")
        secret.chmod(0o644)
        yield listener, outside, secret
