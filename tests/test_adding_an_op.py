"""The recipe of mk/ADDING_AN_OP.md, followed for a toy operation: its row, its executor, and it runs.

`add_snapshot` copies the residual that enters a layer to the host: a wave of its own, which a wave order names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import mk
from mk.errors import MkError
from mk.graph import StepShape, own_strips, strip_tasks, x_buffer
from mk.interpreter import Machine
from mk.interpreter.registry import EXECUTORS, Bench, Run, Task, executes
from mk.interpreter.step import Step
from mk.isa import ISA, Access, Buffer, Op, Word, Words, c_header
from mk.kv import KVCache
from mk.model.reference import LayerOutput, reference_forward
from mk.programs import Plan
from mk.schedule.lower import Program, lower
from mk.schedule.placement import PLACEMENTS
from mk.verify import verify
from tests.interpreter_rig import (
    GEOMETRY,
    WAVE_ORDERS,
    batch,
    program,
    random_tokens,
    source,
    weights,
)

PROMPT = random_tokens(80, seed=80)


def tiles(s: StepShape, layer: int) -> Words:
    """One task a strip of the residual."""
    return strip_tasks(s.strips)


SNAPSHOT = Op(
    90,
    "snapshot",
    "snapshot",
    tiles,
    reads=(Access("x", own_strips),),
    doc="copies the residual that enters a layer to the host",
)


@pytest.fixture
def copies() -> Iterator[dict[tuple[int, int], npt.NDArray[np.float32]]]:
    """What the executor saw, by (layer, first column). The operation exists while the test runs."""
    seen: dict[tuple[int, int], npt.NDArray[np.float32]] = {}

    ISA.add(SNAPSHOT)

    @executes("snapshot")
    def snapshot(bench: Bench, task: Task) -> Run:
        x, columns = bench.memory.x[x_buffer(task.layer) - Buffer.X0], task.columns

        def run(step: Step) -> None:
            seen[task.layer, columns.start] = x[step.rows, columns].copy()

        return run

    yield seen
    del EXECUTORS["snapshot"]
    ISA.remove(SNAPSHOT)


def extended(placement: str, stealing: bool = False) -> Program:
    order = list(WAVE_ORDERS["default"])
    order.insert(order.index("attn"), "snapshot")
    return Plan(4, tuple(order), placement, 2 * stealing, 3 * stealing).lower(GEOMETRY, 1, 512)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("stealing", [False, True])
def test_a_toy_operation_runs_in_a_wave_of_its_own(
    copies: dict[tuple[int, int], npt.NDArray[np.float32]], placement: str, stealing: bool
) -> None:
    loaded = extended(placement, stealing)
    verify(loaded)
    out = batch(loaded, [PROMPT]).step()
    for layer, x in enumerate(residuals()):
        copy = np.concatenate([copies[key] for key in sorted(copies) if key[0] == layer], axis=1)
        assert np.abs(copy[0] - x.numpy()).max() < 1e-5 * float(x.abs().max())
    assert np.array_equal(out.logits, batch(program(1), [PROMPT]).step().logits)  # it only looks


def residuals() -> list[torch.Tensor]:
    """The residual that enters each layer for the token that follows PROMPT, in float64."""
    trace: list[LayerOutput] = []
    reference_forward(GEOMETRY, source().tensor, torch.tensor([*PROMPT, 7]), torch.float64, trace=trace)
    x = [source().tensor("model.embed_tokens.weight")[7].double()]
    for out in trace[:-1]:
        x.append(x[-1] + (out.attention + out.ffn)[-1])
    return x


def test_the_header_knows_it(copies: object) -> None:
    assert "OP_SNAPSHOT = 90," in c_header()


def test_without_an_executor_it_is_refused(copies: object) -> None:
    machine = Machine(weights(), KVCache.for_contexts(GEOMETRY, 1, 64))
    loaded = extended("row_owner")
    executor = EXECUTORS.pop("snapshot")
    try:
        with pytest.raises(MkError, match="operation snapshot has no executor"):
            machine.load(loaded)
    finally:
        EXECUTORS["snapshot"] = executor


def test_orders_may_leave_it_out_but_not_repeat_it(copies: object) -> None:
    shape = StepShape(GEOMETRY, 1, 64, 2)
    opcodes = lower(shape, WAVE_ORDERS["default"], "round_robin").words[:, Word.OPCODE]
    assert SNAPSHOT.opcode not in opcodes
    with pytest.raises(MkError, match="'snapshot' stands twice"):
        lower(shape, ["snapshot", *WAVE_ORDERS["default"], "snapshot"], "round_robin")


@pytest.mark.parametrize(
    ("language", "files"),
    [("python", ("graph/experts.py", "interpreter/moe.py")), ("cpp", ("csrc/storer.cuh",))],
)
def test_the_recipe_quotes_the_code(language: str, files: tuple[str, ...]) -> None:
    """The page shows moe_combine as it is, comments apart."""
    root = Path(mk.__file__).parent
    page = (root / "ADDING_AN_OP.md").read_text()
    blocks = re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == len(files)
    code = " ".join("".join((root / name).read_text() for name in files).split())
    for block in blocks:
        for part in re.sub(r" +#.*", "", block).split("\n\n"):
            quoted = " ".join(part.split())
            assert quoted in code, quoted


def test_its_wave_is_unknown_without_its_row() -> None:
    with pytest.raises(MkError, match="unknown wave 'snapshot'"):
        lower(StepShape(GEOMETRY, 1, 64, 2), [*WAVE_ORDERS["default"], "snapshot"], "round_robin")


def test_a_taken_name_is_refused(copies: object) -> None:
    with pytest.raises(ValueError, match="already taken"):
        ISA.add(SNAPSHOT)
    with pytest.raises(ValueError, match="already has an executor"):
        executes("snapshot")(lambda bench, task: lambda step: None)
