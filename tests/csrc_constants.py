"""The integer constants of csrc/ and the fields of its structs, read from its text."""

from __future__ import annotations

import re

from mk.kernel.build import CSRC


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


def fields(file: str, struct: str) -> list[str]:
    """Names of a struct's fields, in order."""
    begin = rf"struct (?:alignas\(\d+\) )?{struct} {{"
    (body,) = re.findall(rf"{begin}(.*?)^}};", (CSRC / file).read_text(), re.MULTILINE | re.DOTALL)
    body = re.sub(r"//.*", "", body)
    return re.findall(r"(\w+)(?:\[[^]]*\])?[,;]", body)
