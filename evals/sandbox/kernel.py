"""The kernel's own interfaces for a process that gives up what it could do: namespaces, Landlock, seccomp, prctl.

Everything here acts on the calling process and raises OSError where the kernel refuses. Numbers are the kernel's ABI
(`uapi/linux/{landlock,seccomp,filter,audit,prctl,sched}.h` and the system call tables of the two architectures).
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
from collections.abc import Sequence

CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (1 << bit for bit in (26, 27, 28, 29, 30))

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 1, 4, 22
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_READ_SEARCH = 2

_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_LEAST_ABI = 3  # before it a file could be truncated that may not be written

# System calls that a seccomp filter refuses: what neither Landlock nor a limit covers. (x86_64, aarch64), None = absent
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),  # Internet, and local ones such as a container daemon's
    "io_uring_setup": (425, 425),  # opens sockets without that call
    "setpgid": (109, 154),  # the whole process group must end with its leader
    "setsid": (112, 157),
    "ptrace": (101, 117),
    "open_by_handle_at": (304, 265),  # a file without its path
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "shmget": (29, 194),  # outlives its maker
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "chmod": (90, None),  # attributes of other files of the same user
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "unshare": (272, 97),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column above
_X32 = 0x40000000  # x86_64's second table of the same calls

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave the given namespaces for new ones; a new PID namespace begins with the next child."""
    _check(_libc.unshare(flags), "unshare")


def no_new_privileges() -> None:
    """From here on no program that is executed gains any."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """SIGKILL when the parent ends. A change of user clears it, so that goes first."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def keep_capabilities() -> None:
    """Through the next change of user; `drop_capabilities` follows it."""
    _prctl(_PR_SET_KEEPCAPS, 1)


def drop_capabilities(keep_reading: bool) -> None:
    """Drop all, or all but reading past file permissions, which then also outlives an exec.

    Raises OSError where that one is asked for and this process does not have it.
    """
    kept = 1 << _CAP_DAC_READ_SEARCH if keep_reading else 0
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = struct.pack("=6I", kept, kept, kept, 0, 0, 0)  # effective, permitted, inheritable; low and high words
    _check(_libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(data)), "capset")
    if keep_reading:
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)


def adopt_orphans() -> None:
    """Descendants whose parent ends become this process's children, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def undumpable() -> None:
    """Other processes of this user can neither trace this one nor read its memory and environment."""
    _prctl(_PR_SET_DUMPABLE, 0)


def restrict_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Landlock: read and execute below `readable`, anything below `writable`, nothing else. Missing paths are skipped.

    Where the kernel can, no TCP, and no signals or abstract sockets to processes outside either. Raises OSError for a
    kernel without Landlock, or one whose Landlock does not cover truncation.
    """
    abi = _syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    if abi < _LEAST_ABI:
        raise OSError(f"Landlock ABI {abi} does not cover truncation, {_LEAST_ABI} does")
    # rights 0..14 since ABI 3, 15 (ioctl on devices) since 5; TCP since 4; scopes since 6
    every = (1 << (16 if abi >= 5 else 15)) - 1
    attributes = struct.pack("=QQQ", every, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _syscall(_LANDLOCK_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)
    try:
        for paths, rights in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (writable, every)):
            for path in filter(os.path.exists, paths):
                _allow(ruleset, path, rights)
        _syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(beneath).st_mode):
            rights &= _EXECUTE | _READ_FILE | _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", rights, beneath)
        _syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(beneath)


def refuse_calls() -> None:
    """seccomp: the calls of `_REFUSED` fail with EPERM, those of another architecture kill. Needs no_new_privileges."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(f"no table of system calls for {machine}")
    architecture, column = _ARCHITECTURES[machine]
    calls = [numbers[column] for numbers in _REFUSED.values() if numbers[column] is not None]
    # classic BPF over struct seccomp_data: number at 0, architecture at 4
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050000 | 1  # EPERM
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, _X32), (give, 0, 0, kill)]
    for number in calls:
        program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    program.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in program))
    filter_program = struct.pack("@HP", len(program), ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(filter_program))


def _prctl(option: int, *arguments: object) -> None:
    words = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    _check(_libc.prctl(option, *words, *[ctypes.c_ulong(0)] * (4 - len(words))), "prctl")


def _syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *words), f"system call {number}")


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result
