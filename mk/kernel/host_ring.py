"""The ring in pinned host memory to which the kernel writes each step's tokens: data first, then the step's number."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mk.kernel.step_params import HOST_STEP, HOST_STEPS
from mk.sampling import NO_TOKEN

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """tokens: int64 [rows], `NO_TOKEN` for an inactive row or one with a status. status: int64 [rows], `Status`."""

    tokens: Ints
    status: Ints


class HostRing:
    """`HOST_STEPS` records, written by the device and read by the host while later steps run."""

    def __init__(self, pinned: bool) -> None:
        """pinned: page-locked memory, which the device reaches under the host's address."""
        self._memory = torch.zeros(HOST_STEPS * HOST_STEP.itemsize, dtype=torch.uint8)
        if pinned:
            self._memory = self._memory.pin_memory()
        self.records = self._memory.numpy().view(HOST_STEP)

    @property
    def address(self) -> int:
        return self._memory.data_ptr()

    def read(self, launch: int, rows: int) -> StepTokens | None:
        """What launch number `launch` sampled, None before it has. No later one may have taken its place."""
        record = self.records[launch % HOST_STEPS]
        if int(record["step"]) != launch + 1:
            return None
        status = record["status"][:rows].astype(np.int64)
        return StepTokens(np.where(status == 0, record["tokens"][:rows], NO_TOKEN).astype(np.int64), status)
