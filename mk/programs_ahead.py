"""Programs made before anybody needs them, in a process of its own: no step of a server waits for a longer context's.

The process makes them in the order in which growing contexts need them, and sends each as it is done. What is needed
before it has come is made by whoever needs it, as without the process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from mk.errors import MkError
from mk.programs import SMALLEST_BUCKET, Programs, bucket_for

LATER = 10  # niceness beside what serves
Key = tuple[int, int, bool]  # batch size, bucket, whether rows may be sampled


def keys_of(sizes: Sequence[int], context: int) -> list[Key]:
    """Of all programs for contexts of at most so many tokens, the shortest first."""
    last, buckets = bucket_for(context), [SMALLEST_BUCKET]
    while buckets[-1] < last:
        buckets.append(2 * buckets[-1])
    return [(size, bucket, draws) for bucket in buckets for draws in (False, True) for size in sizes]


@contextmanager
def made_ahead(programs: Mapping[int, Programs], context: int) -> Iterator[threading.Thread]:
    """While the context lasts, programs by batch size come to have all they may need. The thread ends with the last."""
    spawn = multiprocessing.get_context("spawn")  # a fork would share the card's driver
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_make, args=(theirs, dict(programs), context), name="mk-programs", daemon=True)
    process.start()
    theirs.close()  # so that the end of the process ends what is read
    thread = threading.Thread(target=_take, args=(ours, programs), name="mk-programs", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        process.kill()
        process.join()
        thread.join()
        ours.close()


def _make(results: Connection, programs: Mapping[int, Programs], context: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; whoever waits for programs ends this process
    os.nice(LATER)
    with suppress(BrokenPipeError, MkError):  # nobody reads any more; a wrong plan shows where it is needed
        for size, bucket, draws in keys_of(list(programs), context):
            results.send(((size, bucket, draws), programs[size].make(bucket, draws)))
    results.close()


def _take(results: Connection, programs: Mapping[int, Programs]) -> None:
    with suppress(EOFError, OSError):  # it has sent all, or ended: what is missing is made where it is needed
        while True:
            (size, bucket, draws), program = results.recv()
            programs[size].put(bucket, draws, program)
