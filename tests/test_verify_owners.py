"""Owners of strips: one SM for the whole step, one run of strips an SM; the kernel keeps nothing else apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mk.graph import StepShape
from mk.isa import NONE, Op, Word, Words
from mk.schedule.cut import waves_of
from mk.schedule.lower import Program, lower
from mk.schedule.placement import RowOwner, SmIds
from mk.verify import verify
from tests.interpreter_rig import GEOMETRY, WAVE_ORDERS, batch, random_tokens
from tests.verify_rig import find, place, refusal

LAYERS, STRIPS = GEOMETRY.layers, GEOMETRY.hidden // 16
PROMPTS = (random_tokens(70, seed=1), random_tokens(20, seed=2))


class Owners(RowOwner):
    """Strips owned as `owner` [strips] says, in a wave of a layer by the SM that is `moved(wave, layer)` further."""

    def __init__(
        self, shape: StepShape, owner: SmIds | None = None, moved: Callable[[str, int], int] = lambda wave, layer: 0
    ) -> None:
        super().__init__(shape)
        self.owner = self.owner if owner is None else owner
        self.moved = moved

    def place(self, op: Op, wave: str, layer: int, tasks: Words) -> SmIds:
        sms = super().place(op, wave, layer, tasks)
        return (sms + self.moved(wave, layer)) % self.n_sm if wave in self.OWNED else sms


def lowered(n_sm: int, order: str = "default", claimers: int = 0, **owners: object) -> Program:
    shape = StepShape(
        GEOMETRY, len(PROMPTS), 300, n_sm, own_rows=True, attention_claimers=claimers, moe_claimers=claimers
    )
    return lower(shape, WAVE_ORDERS[order], "row_owner", Owners(shape, **owners))


def logits(program: Program) -> np.ndarray:
    return batch(program, PROMPTS).step().logits


RIGHT = {
    "the default": (4, {}),
    "one SM": (1, {}),
    "runs from the last SM to the first": (5, {"owner": np.arange(STRIPS)[::-1].copy()}),
    "runs of any length": (4, {"owner": np.array([2, 2, 2, 0, 0])}),
}
WRONG = {
    "strips dealt in turn": (2, {"owner": np.arange(STRIPS) % 2}),
    "a run that goes round": (4, {"owner": np.array([0, 0, 1, 2, 0])}),
    "another owner in every layer": (STRIPS, {"moved": lambda wave, layer: layer}),
    "an idle SM in one layer": (2 * STRIPS, {"moved": lambda wave, layer: STRIPS * (layer == 2)}),
    "an idle SM in the last layer": (2 * STRIPS, {"moved": lambda wave, layer: STRIPS * (layer == LAYERS - 1)}),
    "embeddings elsewhere": (STRIPS, {"moved": lambda wave, layer: int(wave == "embed")}),
    "embeddings on idle SMs": (2 * STRIPS, {"moved": lambda wave, layer: STRIPS * (wave == "embed")}),
}


@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.parametrize(("order", "claimers"), [("default", 0), ("parted", 1), ("oproj_prefetch", 0)])
def test_one_run_of_strips_an_sm_passes(case: str, order: str, claimers: int) -> None:
    n_sm, owners = RIGHT[case]
    program = lowered(n_sm, order, claimers, **owners)
    verify(program)
    for part in waves_of(program):
        verify(part)
    assert (logits(program) == logits(lowered(3))).all()


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize(("order", "claimers"), [("default", 0), ("parted", 1), ("oproj_prefetch", 0)])
def test_what_an_owner_could_not_find_again_is_refused(case: str, order: str, claimers: int) -> None:
    """By the verifier; in the interpreter, which keeps strips as the kernel does, it shows."""
    n_sm, owners = WRONG[case]
    program = lowered(n_sm, order, claimers, **owners)
    said = refusal(program, "owner")
    assert "SM " in said and "strip" in said
    assert not (logits(program) == logits(lowered(3))).all()


@pytest.mark.parametrize("op", ["embed", "o_proj", "moe_down_owned", "dense_down", "residual"])
def test_a_run_of_strips_in_two_tasks_is_refused(op: str) -> None:
    """Both would begin at the SM's first place."""
    program = lowered(2)
    at = find(program, op, 0 if op in ("embed", "dense_down") else 2)
    first, second = program.words[at].copy(), program.words[at].copy()
    tiles = int(first[Word.TILES])
    assert tiles > 1
    first[Word.TILES], first[[Word.SIGNAL, Word.SIGNAL_VALUE]] = 1, (NONE, 0)
    second[Word.TILE], second[Word.TILES] = first[Word.TILE] + 1, tiles - 1
    second[[Word.WAIT0, Word.WAIT1]] = NONE
    words = np.concatenate([program.words[:at], [first, second], program.words[at + 1 :]]).astype(np.int32)
    offsets = program.offsets + (np.arange(len(program.offsets)) > program.track_of[at]).astype(np.int32)
    parted = Program(program.shape, words, offsets, program.counters, program.wave_order, program.placement)
    said = refusal(parted, "owner")
    assert place(parted, at if op != "embed" else at + 1) in said


def test_the_message_names_the_task_and_what_its_sm_keeps() -> None:
    said = refusal(lowered(2, owner=np.array([0, 1, 1, 1, 0])), "owner")
    assert said == "SM 0 task 1 (embed.0) is for strip 4, and SM 0 keeps strip 0 of the residual, from its embedding on"
    moved = lowered(2 * STRIPS, moved=lambda wave, layer: STRIPS * (layer == 2))
    assert f"is for strip 0, and SM {STRIPS} keeps no strip of the residual" in refusal(moved, "owner")
