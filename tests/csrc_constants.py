"""The integer constants of csrc/, read from its text."""

from __future__ import annotations

import re

from mk.build import CSRC


def constants() -> dict[str, int]:
    """`constexpr int` definitions whose value is arithmetic over integers and earlier ones of them."""
    found: dict[str, int] = {}
    for file in ("params.cuh", "shared.cuh", "gemm.cuh", "sampling.cuh"):
        for line in re.findall(r"^constexpr int ([^;]+);", (CSRC / file).read_text(), re.MULTILINE):
            for definition in re.split(r",\s*(?=\w+ =)", line):
                name, expression = definition.split(" = ")
                if re.fullmatch(r"[\w\s*+()-]+", expression):
                    found[name] = eval(expression, {}, found)
    return found
