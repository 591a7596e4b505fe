"""Parts of a step on two machines: run the same waves from the same buffers, and compare what each of them wrote."""

from mk.parts.compare import Difference, Tolerances, compare
from mk.parts.fields import Field, fields, written
from mk.parts.waves import WaveResult, compare_waves, synthetic_pages
from mk.parts.workers import InterpreterWorker, KernelWorker, StepInput, Worker

__all__ = [
    "Difference",
    "Field",
    "InterpreterWorker",
    "KernelWorker",
    "StepInput",
    "Tolerances",
    "WaveResult",
    "Worker",
    "compare",
    "compare_waves",
    "fields",
    "synthetic_pages",
    "written",
]
