"""The decode step as waves of tasks: tiles, and the regions each task reads and writes.

One step is `embed`, then the waves of each layer in the configured order, then `lm_head` and the waves that sample. A
*wave* is one operation of one layer; a *task* is one tile of it, already in descriptor form (`mk/isa.py`). Everything
here is vectorised over descriptors, so a full-size step of 90,000 tasks is built in well under a second.

Tile sizes: matrix operations work on 16-row strips of the weight (`mk/model/packing.py`), attention on (row, KV head,
split). Waits are not written here: `mk/schedule/lower.py` derives them from the regions.

Importing this package registers every operation: `attention.py`, `experts.py`, `dense.py` and `sampling.py` hold
for each of them its tiles, its regions and its row of the instruction set, side by side.
"""

from mk.graph import attention, dense, experts, sampling  # noqa: F401  (they register their operations)
from mk.graph.shape import (
    DENSE_WAVES,
    HEAD_PARTS,
    HEAD_STRIPS,
    LAST_WAVES,
    LAYER_WAVES,
    OPTIONAL_WAVES,
    PARTED_WAVES,
    QUEUE_KINDS,
    WAVE_NAMES,
    StepShape,
    queue_id,
    resolve,
    x_buffer,
)
from mk.graph.tiles import own_strips, strip_tasks

__all__ = [
    "DENSE_WAVES",
    "HEAD_PARTS",
    "HEAD_STRIPS",
    "LAST_WAVES",
    "LAYER_WAVES",
    "OPTIONAL_WAVES",
    "PARTED_WAVES",
    "QUEUE_KINDS",
    "WAVE_NAMES",
    "StepShape",
    "own_strips",
    "queue_id",
    "resolve",
    "strip_tasks",
    "x_buffer",
]
