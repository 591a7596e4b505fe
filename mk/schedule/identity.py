"""Which schedule it is: a hash of descriptors, lists and targets, of a lowered program or of what was executed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mk.errors import MkError
from mk.isa import Words

if TYPE_CHECKING:
    from mk.schedule.lower import Program

Counts = npt.NDArray[np.uint32]


def schedule_hash(words: Words, offsets: npt.NDArray[np.int32], per_step: npt.NDArray[np.int32]) -> str:
    """Of descriptors int32 [n, 32], the first of each track, and what each counter gains in a step."""
    digest = hashlib.sha256(np.ascontiguousarray(words, np.int32).tobytes())
    digest.update(np.ascontiguousarray(offsets, np.int32).tobytes())
    digest.update(np.ascontiguousarray(per_step, np.int32).tobytes())
    return digest.hexdigest()[:16]


def executed_hash(
    program: Program, words: Words, offsets: npt.NDArray[np.int32], before: Counts, after: Counts, steps: int
) -> str:
    """`schedule_hash` of what a machine holds after `steps` steps of a program: the descriptors and lists in its
    memory, and what its counters gained since `before`, uint32 that may have wrapped.

    Raises MkError where no step was run, and where that is another schedule than the program, which was verified: its
    figures would be of something else.
    """
    if steps < 1:
        raise MkError("no step of the loaded program has run", hint="launch one first")
    gained = (after - before).astype(np.int64)  # modulo 2^32: fewer than that in all steps together
    if (gained % steps).any():
        counter = int(np.flatnonzero(gained % steps)[0])
        name = program.counters[counter].name
        raise MkError(f"the counter of {name} gained {gained[counter]} in {steps} steps, which is no whole number each")
    found = schedule_hash(words, offsets, (gained // steps).astype(np.int32))
    if found != program.schedule_hash:
        raise MkError(f"the machine executed schedule {found}, and {program.schedule_hash} was verified and loaded")
    return found
