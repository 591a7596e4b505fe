"""Parts of the kernel on the CPU: csrc/ compiled with a stand-in for the GPU's instructions, called by ctypes."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mk.isa import ISA, Word, Words, c_header
from mk.kernel.build import CSRC, geometry_header
from mk.kernel.step_params import HOST_STEP, HOST_STEPS, MAX_ROWS, StepParams, buffer_shapes, pack_sampling
from mk.model.geometry import Geometry
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from mk.splits import SplitPolicy

EMULATED = Path(__file__).parent / "emulated"

Floats = npt.NDArray[np.float32]


def compile_emulated(part: str, geometry: Geometry, folder: Path) -> ctypes.CDLL:
    """csrc/'s own files but for ptx.cuh, behind emulated/<part>.cc, with g++; no two float operations are fused."""
    shutil.copytree(CSRC, folder / "csrc")
    for name in ("ptx.cuh", "cuda_bf16.h", f"{part}.cc"):
        shutil.copy(EMULATED / name, folder / "csrc" / name)
    (folder / "csrc" / "isa.h").write_text(c_header())
    (folder / "csrc" / "geometry.h").write_text(geometry_header(geometry, SplitPolicy(128, 4)))
    library = folder / f"lib{part}.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", "-D__constant__=static"]
    subprocess.run(["g++", *flags, "-o", library, folder / "csrc" / f"{part}.cc"], check=True)
    return ctypes.CDLL(str(library))


def pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


class Buffers:
    """Host memory that the parameters of a step point to."""

    def __init__(self, geometry: Geometry, rows: int, n_sm: int) -> None:
        self.buffers: dict[str, npt.NDArray[Any]] = {}
        self.params = StepParams()
        for name, (dtype, size) in buffer_shapes(geometry, SplitPolicy(128, 4), n_sm).items():
            self.own(name, np.zeros(size, str(dtype).removeprefix("torch.").replace("bfloat16", "uint16")))
        self.params.rows, self.params.n_sm = rows, n_sm

    def own(self, name: str, array: npt.NDArray[Any]) -> None:
        aligned = np.zeros(array.nbytes + 128, np.uint8)
        start = -aligned.ctypes.data % 128
        self.buffers[name] = aligned[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        self.buffers[name][...] = array
        setattr(self.params, name, self.buffers[name].ctypes.data)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.buffers[name]


class Sampler(Buffers):
    """The buffers that the sampling tasks of a program touch, and a run of those tasks, SM after SM."""

    def __init__(self, library: ctypes.CDLL, program: Program) -> None:
        shape = program.shape
        super().__init__(shape.geometry, shape.rows, shape.n_sm)
        self.library, self.program, self.params.advance = library, program, 1
        self.own("host_steps", np.zeros(HOST_STEPS, HOST_STEP))
        self["candidate_value"].fill(-np.inf)
        self["candidate_low"].fill(np.inf)
        self["candidate_id"].fill(0x7FFFFFFF)

    def _tasks(self, op: str, words: Words) -> Words:
        return words[words[:, Word.OPCODE] == ISA.named(op).opcode]

    def set_rows(self, sampling: list[SamplingParams], keys: list[int]) -> None:
        packed = pack_sampling(sampling, self.program.shape.geometry.vocab)
        self["sampling"][...] = packed.view(np.int64).reshape(MAX_ROWS, 4)
        self["keys"][: len(keys)] = keys

    def step(self, logits: Floats) -> npt.NDArray[Any]:
        """Samples logits [rows, vocab]; the ring's record of the step. Padding of the vocabulary is the largest."""
        g = self.program.shape.geometry
        padded = np.full(self["logits"].shape, 1e30, np.float32)
        padded[: len(logits), : g.vocab] = logits
        params = ctypes.byref(self.params)
        for sm in range(self.program.shape.n_sm):
            tasks = self._tasks("lm_head", self.program.track(sm))
            strips = [strip for task in tasks for strip in range(task[Word.TILE], task[Word.TILE] + task[Word.TILES])]
            if strips:
                self.library.head(params, pointer(padded), sm, pointer(np.array(strips, np.int32)), len(strips))
        for wave in ("histogram", "shortlist", "draw", "sample"):
            for task in self._tasks(wave, self.program.words):
                self.library.task(params, pointer(task))
        record = self["host_steps"][self.params.launched % HOST_STEPS].copy()
        self.params.launched += 1
        self.params.epoch += 1
        return record
