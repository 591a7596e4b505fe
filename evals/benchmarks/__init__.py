"""The benchmarks: each a file of its prompts and its grader, behind the one interface of `base.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from evals.benchmarks.aime import Aime
from evals.benchmarks.base import Benchmark
from evals.benchmarks.choices import Gpqa, MmluPro
from evals.benchmarks.livecode import LiveCodeBench
from evals.benchmarks.nano_code import NanoCode
from evals.benchmarks.scicode import SciCode
from mk.config import BenchmarkConfig
from mk.errors import MkError

_OPEN: dict[str, Callable[[BenchmarkConfig, Path], Benchmark]] = {
    "aime2025": Aime,
    "gpqa": Gpqa,
    "mmlu_pro_cs": MmluPro,
    "livecodebench_v6": LiveCodeBench,
    "scicode": SciCode,
    "nano_code": NanoCode,
}


def open_benchmark(config: BenchmarkConfig, data_dir: Path) -> Benchmark:
    """The configured benchmark with its problems. Raises MkError for data that is missing or not what it should be."""
    if config.name not in _OPEN:
        raise MkError(f"benchmark={config.name} is nothing to score", hint=f"benchmark is one of {', '.join(_OPEN)}")
    return _OPEN[config.name](config, data_dir)
