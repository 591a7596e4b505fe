"""Shared test set-up: no network, GPU tests only where there is a GPU, and figures in the summary."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# before torch is imported: the models here are so small that threads mostly wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import prefill  # noqa: F401 (it chooses Triton's interpreter, before a test imports Triton)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def one_gpu_test_at_a_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers share the card: beside another's resident kernel a step would run into its time limit."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    with (Path(tempfile.gettempdir()) / f"mini-mk-gpu-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes a line that `make test` prints at its end: what a test measured, besides passing."""
    return lambda line: record_property("figure", line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    reports += terminalreporter.getreports("failed")
    reports.sort(key=lambda report: report.nodeid)  # workers report in any order
    lines = [line for report in reports for name, line in report.user_properties if name == "figure"]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(str(line))
