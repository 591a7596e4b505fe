"""Every launch of a prefill compiled for Hopper, on a machine without one: registers, spills, what the loops became.

TRITON_INTERPRET=0 python -m prefill.ahead     # the full model, with the tiles it is run with on an H200
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from mk.errors import MkError
from mk.kv import KINDS, PageAllocator, blocks_of, kv_layers
from mk.model.geometry import PRESETS, Geometry
from mk.model.packing import SLOT_ELEMENTS, PackedWeights, WeightLayout
from prefill.chunks import Prompt
from prefill.kernels import interpreted
from prefill.tiles import HOPPER, Tiles
from prefill.triton_prefill import TritonPrefill

SM_90 = GPUTarget("cuda", 90, 32)
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int16: "*i16"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel with one set of constants. Bytes are a thread's on its stack, a block's in shared memory."""

    kernel: str
    constants: dict[str, Any]
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str

    def count(self, instruction: str) -> int:
        """Occurrences of a regular expression in the PTX."""
        return len(re.findall(instruction, self.ptx))


@contextmanager
def recorded(take: Callable[[JITFunction, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Launches inside are handed to `take`, and none happens."""
    run = JITFunction.run

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        take(self, args, kwargs)

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run


def compile_prefill(
    geometry: Geometry, tokens: int, chunk: int, products: str = "packed", tiles: Tiles = HOPPER
) -> Iterator[Compiled]:
    """What a prompt of `tokens` tokens launches, each different kernel once.

    Nothing is allocated: tensors are torch's "meta" ones. Raises MkError where kernels are made for the interpreter.
    """
    if interpreted():
        raise MkError("Triton was imported for its interpreter", hint="set TRITON_INTERPRET=0 in the environment")
    layout = WeightLayout(geometry)
    slots = torch.empty(layout.total_slots, SLOT_ELEMENTS, dtype=torch.bfloat16, device="meta")
    norms = torch.empty(geometry.layers + 1, geometry.hidden, dtype=torch.bfloat16, device="meta")
    blocks = blocks_of(tokens)
    pools = {
        kind: torch.empty(
            blocks, max(1, len(kv_layers(geometry, kind))), geometry.kv_heads, 2, 64 * 128,
            dtype=torch.bfloat16, device="meta",
        )
        for kind in KINDS
    }  # fmt: skip
    found: dict[str, tuple[JITFunction, ASTSource, dict[str, Any]]] = {}

    def take(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        source, options = _source(kernel, args, kwargs)
        found.setdefault(
            f"{kernel.__name__} {source.signature} {source.constants} {options}", (kernel, source, options)
        )

    prefill = TritonPrefill(PackedWeights(slots, norms, layout, geometry), pools, tokens, chunk, products, tiles)
    with recorded(take):
        prefill.forward(PageAllocator(geometry, dict.fromkeys(KINDS, blocks), 1, blocks), [Prompt(0, [0] * tokens)])
    for kernel, source, options in found.values():
        yield _compile(kernel, source, options)


def _source(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ASTSource, dict[str, Any]]:
    """The launch as the compiler takes it. Pointers count as aligned to 16 bytes, which all of ours are."""
    values = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
    values |= {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    return ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes), options


def _compile(kernel: JITFunction, source: ASTSource, options: dict[str, Any]) -> Compiled:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that a later version changes
        made = triton.compile(source, target=SM_90, options=options)
    registers, stack = _resources(made.asm["cubin"])
    names = kernel.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items()}
    return Compiled(
        kernel.__name__, constants, made.metadata.num_warps, registers, stack, made.metadata.shared, made.asm["ptx"]
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of its stack, where spills go) of a binary with one kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    (usage,) = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return int(usage[0]), int(usage[1])


def report(made: Compiled) -> dict[str, Any]:
    """What there is to say about a kernel without its code."""
    return {
        "kernel": made.kernel,
        "constants": made.constants,
        "warps": made.warps,
        "registers": made.registers,
        "stack_bytes": made.stack_bytes,
        "shared_bytes": made.shared_bytes,
        "wgmma": made.count(r"wgmma\.mma_async"),
        "mma": made.count(r"\bmma\.sync"),
        "copies": made.count(r"cp\.async\.c[ag]\."),
        "copies_of_16_bytes": made.count(r"cp\.async\.cg\.[^;]*, 0x10, "),
    }


def main() -> None:
    """A JSON line for each kernel of the full model: of a long prompt, of a short one, of torch's products."""
    seen: list[dict[str, Any]] = []
    for tokens, products in ((8192, "packed"), (100, "packed"), (8192, "torch")):
        for made in compile_prefill(PRESETS["north_mini_code"], tokens, 8192, products):
            line = report(made)
            if line not in seen:
                seen.append(line)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
