"""Every fault in the list has a test that is marked with it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.serving_faults import FAULTS


def marked(module: Path) -> list[int]:
    """The faults that a module's tests are marked with."""
    return [
        ast.literal_eval(decorator.args[0])
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "fault"
    ]


def test_every_fault_is_held_off_by_a_test() -> None:
    numbers = [number for path in Path(__file__).parent.glob("test_serving_*.py") for number in marked(path)]
    assert set(numbers) == set(FAULTS) == set(range(1, 42))
