"""The card at hand, read from the driver, and its comparison with what `configs/gpu` says of it."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import torch

from mk.config import GpuConfig
from mk.errors import MkError

SM_RESERVED = 1024  # bytes of an SM's shared memory that a block never gets


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    name: str
    sms: int
    shared_bytes: int  # a block may have
    capability: tuple[int, int]

    @classmethod
    def read(cls) -> DeviceFacts:
        """Of the current CUDA device. Raises MkError when there is none."""
        if not torch.cuda.is_available():
            raise MkError("the CUDA engine needs a GPU, and torch sees none here")
        p = torch.cuda.get_device_properties(torch.cuda.current_device())
        shared = p.shared_memory_per_multiprocessor - SM_RESERVED
        return cls(p.name, p.multi_processor_count, shared, (p.major, p.minor))

    def require(self, gpu: GpuConfig) -> None:
        """Raises MkError where the device is not the card that the configuration describes, naming the figure."""
        if gpu.kind != "cuda":
            raise MkError(f"gpu={gpu.name} is no CUDA card", hint="gpu=h200")
        shared_kb = gpu.smem_per_block_kb or 0
        for key, holds, found in (
            (f"gpu.name={gpu.name}", gpu.name.lower() in self.name.lower(), self.name),
            (f"gpu.sms={gpu.sms}", gpu.sms == self.sms, f"{self.sms} SMs"),
            (f"gpu.smem_per_block_kb={shared_kb}", shared_kb * 1024 == self.shared_bytes, f"{self.shared_bytes} bytes"),
        ):
            if not holds:
                raise MkError(f"{key}, but the device has {found}", hint="choose the gpu group's option for this card")


def card_state() -> str | None:
    """Clocks, power and temperature, as nvidia-smi says it; None without."""
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.splitlines()[0] if said else None
