"""Every launch of the full model's prefill compiled for sm_90: no spills, asynchronous copies, wgmma."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prefill.tiles import HOPPER

ROOT = Path(__file__).resolve().parent.parent
SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    """In a process of its own: here Triton was imported for its interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "prefill.ahead"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_needs_more_than_an_sm_has(compiled: list[dict[str, Any]], figure: Callable[[str], None]) -> None:
    kernels = {made["kernel"] for made in compiled}
    assert kernels == {
        "embed_kernel", "product_kernel", "append_kernel", "attention_kernel", "route_kernel",
        "sort_kernel", "residual_kernel", "unpack_kernel",
    }  # fmt: skip
    for made in compiled:
        assert made["stack_bytes"] <= 64, made  # spills, if any, are a few words
        assert made["shared_bytes"] <= SHARED_BYTES and made["registers"] * made["warps"] * 32 <= 65536, made
    for name in sorted(kernels):
        mine = [made for made in compiled if made["kernel"] == name]
        most, stack = max(made["registers"] for made in mine), max(made["stack_bytes"] for made in mine)
        figure(f"prefill {name} on sm_90: at most {most} registers, {stack} bytes of stack")


def test_products_and_attention_run_on_wgmma_fed_by_16_byte_copies(compiled: list[dict[str, Any]]) -> None:
    sizes = set()
    for made in compiled:
        if made["kernel"] in ("product_kernel", "attention_kernel", "route_kernel"):
            assert made["wgmma"] and not made["mma"] and made["stack_bytes"] == 0, made
            assert made["copies"] == made["copies_of_16_bytes"] > 0, made
            sizes.add(made["constants"].get("BLOCK_M"))
    assert {HOPPER.large.m, HOPPER.small.m} <= sizes  # the long prompt's tiles and the short one's


def test_each_product_is_compiled_for_few_shapes(compiled: list[dict[str, Any]]) -> None:
    """A kernel takes seconds to compile: what changes from call to call must not be a constant."""
    assert len(compiled) < 45
