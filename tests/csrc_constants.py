"""The integer constants of csrc/, read from its text."""

from __future__ import annotations

import re

from mk.build import CSRC


def constants() -> dict[str, int]:
    """`constexpr int` definitions whose value is arithmetic over integers and earlier ones of them."""
    found: dict[str, int] = {}
    for file in ("host_step.cuh", "params.cuh", "trace.cuh", "shared.cuh", "gemm.cuh", "sampling.cuh"):
        text = (CSRC / file).read_text()
        found |= {name: int(value) for name, value in re.findall(r"^#define (\w+) (\d+)$", text, re.MULTILINE)}
        for line in re.findall(r"^constexpr int ([^;]+);", text, re.MULTILINE):
            for definition in re.split(r",\s*(?=\w+ =)", line):
                name, expression = definition.split(" = ")
                if re.fullmatch(r"[\w\s*+()-]+", expression):
                    found[name] = eval(expression, {}, found)
    return found
