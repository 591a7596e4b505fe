"""experiment=batch_switching on nano: its arms, their steps and tokens, what it notices and refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments import batch_switching
from experiments.batch_switching import AGAIN, LARGEST, SWITCHING, Rounds, figures
from experiments.opening import sampling_of
from mk.compose import load_config
from mk.engines.interpreted import MachineEngine
from mk.errors import MkError
from mk.results.rows import Row, read_rows
from tests.promotion import committed, folder_of, repository, require_kept
from tests.small_runs import SERVED

__all__ = ["committed", "repository"]

SMALL = ["experiment=batch_switching", *SERVED, "server.slots=4", "server.batches=[1,2]", "server.context=256"]
SMALL += ["experiment.context=20", "experiment.stagger=4", "experiment.rounds=2"]


def run(root: Path, *overrides: str) -> tuple[int, list[Row]]:
    status = batch_switching.main(load_config([*SMALL, f"run_dir={root}", *overrides]))
    return status, read_rows(folder_of(root) / "rows.jsonl")


def test_arms_take_as_many_steps_in_other_batches_and_give_the_same_tokens(committed: Path, tmp_path: Path) -> None:
    status, rows = run(tmp_path)
    assert status == 0 and [row.arm for row in rows] == [SWITCHING, LARGEST, AGAIN]
    first, largest, again = rows
    # 16 tokens of the last one, the first of which comes with its prompt: 4 rows, then 3, 2 and 1
    assert first.steps_of == again.steps_of == {"1": 2 * 4, "2": 2 * 4, "4": 2 * (3 + 4)}
    assert largest.steps_of == {"4": 2 * 15}
    assert all(row.steps == 30 and row.checks == {"tokens_the_same": True} for row in rows)
    assert first.ratio is None and largest.ratio_to == again.ratio_to == first.digest and largest.ratio
    names = ("tok_s", "wall_s", "ratio", "ratio_low", "steps")
    require_kept(committed, folder_of(tmp_path), **dict.fromkeys(names, lambda value: value + 1))


def test_drawn_tokens_are_the_same_in_all_arms_and_others_than_the_likeliest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[list[list[int]]] = []
    measure = batch_switching.measured

    def noted(*args: Any) -> dict[str, Rounds]:
        rounds = measure(*args)
        tokens.append(rounds[SWITCHING].tokens[0])
        return rounds

    monkeypatch.setattr(batch_switching, "measured", noted)
    assert run(tmp_path / "greedy")[0] == 0
    status, rows = run(tmp_path / "drawn", "sampling=top_p")
    assert status == 0 and {row.sampling for row in rows} == {"temperature 1, top_p 0.95"}
    assert all(row.checks == {"tokens_the_same": True} for row in rows)
    greedy, drawn = tokens
    assert greedy != drawn and list(map(len, greedy)) == list(map(len, drawn))


def test_figures_are_of_the_rounds() -> None:
    row = SimpleNamespace(batch=2)
    raw: dict[str, Any] = {"block_ms": [50.0, 150.0], "tokens": 12, "steps_of": {"1": 6, "2": 10}}
    found = figures(row, raw)  # type: ignore[arg-type]
    assert (found["tok_s"], found["wall_s"]) == (pytest.approx(90.0), pytest.approx(0.1))
    assert (found["steps"], found["steps_of"]) == (16, raw["steps_of"])
    assert figures(row, raw | {"base_block_ms": [25.0, 75.0]})["ratio"] == pytest.approx(2.0)


def test_tokens_that_depend_on_the_batch_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = MachineEngine._compute

    def off(self: MachineEngine, tokens: Any, keys: Sequence[int], sampling: Any) -> Any:
        out = compute(self, tokens, keys, sampling)
        if len(keys) == 1:
            out.tokens[0] = 17
        return out

    monkeypatch.setattr(MachineEngine, "_compute", off)
    status, rows = run(tmp_path)
    assert status == 1 and [row.checks["tokens_the_same"] for row in rows] == [True, False, True]
    assert capsys.readouterr().out.count("FAILED: other tokens") == 1


def test_an_arm_that_differs_from_itself_marks_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = batch_switching.measured

    def drifted(*args: Any) -> dict[str, Rounds]:
        rounds = measure(*args)
        rounds[SWITCHING].ms, rounds[AGAIN].ms = [10.0, 10.01], [11.0, 11.01]
        return rounds

    monkeypatch.setattr(batch_switching, "measured", drifted)
    status, rows = run(tmp_path)
    assert status == 0  # by a host's clock that is no surprise
    assert all(f"{SWITCHING} differs from itself: ratio 1.09" in (row.unstable or "") for row in rows)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("server.batches=[]", "server.batches has no size beside server.slots=4"),
        ("experiment.context=250", "contexts of 266 tokens exceed server.context=256"),
        ("experiment.stagger=0", "experiment.stagger=0 must be at least 1"),
        ("experiment.rounds=1", "experiment.rounds=1 must be at least 2"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(MkError, match=says):
        run(tmp_path, override)
    assert not list(tmp_path.iterdir())


def test_a_configured_seed_must_be_one_and_rows_go_on_from_it() -> None:
    cfg = load_config(["sampling=top_p", f"sampling.seed={2**64 - 1}"])
    assert [sampling_of(cfg, row).seed for row in range(3)] == [2**64 - 1, 0, 1]
    with pytest.raises(MkError, match=r"sampling\.seed=-1 must be an unsigned"):
        sampling_of(load_config(["sampling=top_p", "sampling.seed=-1"]), 1)
