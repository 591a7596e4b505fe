"""Programs from a process of their own are the ones that would be made here; without it everything works."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from mk.graph import LAYER_WAVES
from mk.programs import Plan, Programs, programs_by_size
from mk.programs_ahead import keys_of, made_ahead
from tests.interpreter_rig import GEOMETRY

PLAN = Plan(4, LAYER_WAVES, "row_owner")
SIZES, CONTEXT = (1, 3), 700


def fresh() -> dict[int, Programs]:
    return programs_by_size(GEOMETRY, SIZES, PLAN)


def test_contexts_need_buckets_that_double() -> None:
    assert [bucket for size, bucket, draws in keys_of([1], 1025) if not draws] == [256, 512, 1024, 2048]
    assert keys_of([1, 8], 100) == [(1, 256, False), (8, 256, False), (1, 256, True), (8, 256, True)]


def test_they_are_what_would_be_made_here() -> None:
    found, own = fresh(), fresh()
    with made_ahead(found, CONTEXT) as thread:
        thread.join(60)
        assert not thread.is_alive()
    keys = keys_of(SIZES, CONTEXT)
    assert len(keys) == 12 and {(size, *key) for size in SIZES for key in found[size]._made} == set(keys)
    for size, bucket, draws in keys:
        program, alone = found[size].get(bucket, draws), own[size].get(bucket, draws)
        assert program is not alone and program.schedule_hash == alone.schedule_hash
        assert (program.words == alone.words).all() and program.counters == alone.counters
        assert program.shape == alone.shape and found[size].get(bucket, draws) is program
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("killed", [False, True])
def test_what_has_not_come_is_made_by_who_needs_it(killed: bool) -> None:
    found = fresh()
    with made_ahead(found, CONTEXT):
        if killed:
            (process,) = multiprocessing.active_children()
            os.kill(process.pid or 0, signal.SIGKILL)
        first = found[3].get(1024, True)
        assert first.shape.bucket == 1024 and first.shape.draws
    assert found[3].get(1024, True) is first and not multiprocessing.active_children()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_a_server_that_is_killed_leaves_no_process() -> None:
    """The process finds out when it sends the next one."""
    parent = multiprocessing.get_context("spawn").Process(target=_hold)
    parent.start()
    pid = _child_of(parent.pid or 0)
    os.kill(parent.pid or 0, signal.SIGKILL)
    parent.join()
    end = time.monotonic() + 30
    while _state(pid) not in ("", "Z") and time.monotonic() < end:
        time.sleep(0.1)
    assert _state(pid) in ("", "Z")


def _hold() -> None:
    with made_ahead(fresh(), 2**18):
        time.sleep(60)


def _child_of(pid: int) -> int:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
        named = [child for child in children if "spawn_main" in _command(child)]
        if named:
            return named[0]
        time.sleep(0.05)
    raise AssertionError("it started no process")


def _command(pid: int) -> str:
    return _read(pid, "cmdline")


def _state(pid: int) -> str:
    """As /proc has it, Z for one that has ended; "" for one that is not there."""
    return _read(pid, "stat").rpartition(") ")[2][:1]


def _read(pid: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/{name}") as file:
            return file.read()
    except OSError:
        return ""
