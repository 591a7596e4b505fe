"""The process that confines itself and then becomes the program: `python -m evals.sandbox.jail ORDER`.

Three processes: this one; the first of a new PID namespace, whose end is the end of every process in it; and its
child, which gives up the file system and system calls last and executes the program. ORDER is JSON (see `Order`).
On the pipe `report` go one JSON line on what was applied and one on how the program ended; the program has no access
to it. Imports nothing but the standard library and `kernel`, because it is started for every run.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import TypedDict

from evals.sandbox import kernel

_UIDS = range(65_000, 65_500)  # nobody's accounts; one a run, as far as they go, so that limits count one run alone


class Order(TypedDict):
    """What a run is given."""

    argv: list[str]
    folder: str  # the program's, and the only one that it may write in
    readable: list[str]
    limits: dict[str, int]  # see `Limits` in sandbox.py
    wall_s: float
    skip: list[str]  # protections that this machine does not have
    report: int  # file descriptor


def main(order: Order) -> None:
    failed: dict[str, str] = {}

    def apply(name: str, action: Callable[[], None]) -> None:
        if name in order["skip"]:
            return
        try:
            action()
        except OSError as error:
            failed[name] = str(error)

    os.set_inheritable(order["report"], False)  # gone once the program is executed; its standard streams alone stay
    os.chdir(order["folder"])
    apply("namespaces", _leave_namespaces)
    apply("user", lambda: _become_nobody(order))
    kernel.undumpable()
    kernel.die_with_parent()
    kernel.adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    first = os.fork()
    if first == 0:
        kernel.die_with_parent()
        os.setpgid(0, 0)
        program = os.fork()
        if program == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            with contextlib.suppress(OSError):
                apply("limits", lambda: _limit(order["limits"]))
                apply("privileges", kernel.no_new_privileges)
                apply("files", lambda: kernel.restrict_files(order["readable"], [order["folder"]]))
                apply("calls", kernel.refuse_calls)
                _report(order, failed=failed)
                if not failed:
                    apply("start", lambda: os.execve(order["argv"][0], order["argv"], dict(os.environ)))
                    _report(order, failed=failed)
            os._exit(126)
        os._exit(_ending(program))
    late = not _ends(first, order["wall_s"])
    code = _end_all(first)
    _report(order, ended=code, late=late)


def _report(order: Order, **what: object) -> None:
    os.write(order["report"], json.dumps(what).encode() + b"\n")


def _ending(program: int) -> int:
    """0..255 of the program, or 128 + the signal that ended it; orphans that come to this first process are reaped."""
    while True:
        pid, status = os.wait()
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _ends(first: int, within_s: float) -> bool:
    """Whether the first process ends in time, and is left to be reaped; orphans that come to this one are reaped here.

    SIGCHLD is blocked, so that none is missed between a look and the wait for it.
    """
    end = time.monotonic() + within_s
    while (left := end - time.monotonic()) > 0:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            signal.sigtimedwait([signal.SIGCHLD], left)
        elif ended.si_pid == first:
            return True
        else:
            os.waitpid(ended.si_pid, 0)
    return False


def _end_all(first: int) -> int:
    """Kill and reap everything that the run started; what the first process had ended with, negative = a signal.

    No process can leave the group, and in a PID namespace the kernel ends all with the first. Where there is neither,
    what left becomes this process's child when its parent ends.
    """
    code = -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first, signal.SIGKILL)  # the first's own zombie keeps the group's id taken
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.wait()
            if pid == first:
                code = os.waitstatus_to_exitcode(status)
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
    return code


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without this file
        return []


def _leave_namespaces() -> None:
    """Of PIDs, network, host name and System V IPC; who is not root needs one of users for that."""
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        kernel.unshare(flags)
        return
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    # the same ids inside: with uid 0 there, the program would start with every capability of the namespace
    for name, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _become_nobody(order: Order) -> None:
    """Limits on processes do not bind root, and file permissions neither.

    A Python that lies in root's own folder could then not be read. Where Landlock says what may be, and only there, the
    program keeps the capability of reading past permissions.
    """
    if os.geteuid() != 0:
        return
    uid = _UIDS[os.getpid() % len(_UIDS)]
    for path, folders, files in os.walk(order["folder"]):
        for name in (".", *folders, *files):
            os.chown(os.path.join(path, name), uid, uid)
    present = [path for path in order["readable"] if os.path.exists(path)]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    kernel.keep_capabilities()
    os.setresuid(uid, uid, uid)
    out_of_reach = not all(os.access(path, os.R_OK) for path in present)
    kernel.drop_capabilities(keep_reading=out_of_reach and "files" not in order["skip"])


def _limit(limits: dict[str, int]) -> None:
    wanted = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_mb"] << 20,
        resource.RLIMIT_FSIZE: limits["file_mb"] << 20,
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: 128,
        resource.RLIMIT_CORE: 0,
    }
    for what, most in wanted.items():
        resource.setrlimit(what, (most, most))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
