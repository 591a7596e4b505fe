"""The decode loop of csrc/, compiled for this machine: with a card made of a thread, or one that Python plays."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mk.kernel.build import CSRC

SOURCES = Path(__file__).parent / "decode_loop"
HEADERS = ("host_step.cuh", "decode_loop.cuh", "loop_interface.cuh")
FLAGS = ("-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CSRC}")


def compiled(source: str, *flags: str) -> Path:
    """A program or library of tests/decode_loop/, built once for its inputs. Raises CalledProcessError."""
    compiler = shutil.which("g++")
    assert compiler, "the tests need g++"
    inputs = [SOURCES / source, *(CSRC / header for header in HEADERS)]
    digest = hashlib.sha256(repr((compiler, FLAGS, flags)).encode())
    for path in inputs:
        digest.update(path.read_bytes())
    builds = Path(os.environ.get("MK_BUILD_DIR", CSRC.parent.parent / "build"))
    target = builds / f"{source}-{digest.hexdigest()[:16]}"
    if not target.exists():
        builds.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="partial-", dir=builds) as scratch:
            made = Path(scratch) / "made"
            command = [compiler, *FLAGS, *flags, "-o", str(made), str(SOURCES / source)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.rename(target)
    return target


@functools.cache
def python_card() -> ctypes.CDLL:
    """The loop's library; `play` is told what launches."""
    return ctypes.CDLL(str(compiled("python_card.cpp", "-shared", "-fPIC")))


LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)
STATE = ctypes.CFUNCTYPE(ctypes.c_int)
IDLE, BUSY = 0, -1  # `Card::State`
