"""experiment=served_step on nano, with the interpreter and the stand-in for a card; what it notices and refuses."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import mk.engines.choice
from experiments import served_rig, served_step
from experiments.served_figures import between_tokens
from experiments.served_report import by_kind
from experiments.served_rig import Ran
from mk.compose import load_config
from mk.engines.cuda import CudaEngine
from mk.errors import MkError
from mk.results.rows import Row, read_rows
from tests.device_rig import FakeLibrary, fake_build, fake_device
from tests.promotion import committed, folder_of, repository, require_kept

__all__ = ["committed", "fake_device", "repository"]

SMALL = [
    "experiment=served_step",
    "model=nano",
    "weights=checkpoint",
    "gpu=cpu",
    "prefill=torch",
    "prefill.chunk=32",
    "wave_order=default",
    "experiment.batches=[1,4]",
    "experiment.context=70",
    "experiment.steps=6",
    "experiment.prompt=70",
    "experiment.short=20",
    "experiment.events=2",
    "server=default",
    "server.slots=4",
    "server.batches=[1,2]",
    "server.context=512",
]


def run(tmp_path: Path, *overrides: str) -> tuple[int, list[Row]]:
    status = served_step.main(load_config([*SMALL, f"run_dir={tmp_path}", *overrides]))
    (folder,) = tmp_path.iterdir()
    return status, read_rows(folder / "rows.jsonl")


def check_rows(rows: list[Row], engine: str) -> None:
    """A row a measurement; the order is that of the README's account of it."""
    steps, events, prompts = rows[:4], rows[4:8], rows[8:]
    assert [(row.arm, row.batch) for row in steps] == [("own", 1), ("served", 1), ("own", 4), ("served", 4)]
    assert all(row.engine == engine and row.weights == "checkpoint" and row.checks["tokens_as_own"] for row in steps)
    assert [row.ratio_to for row in steps] == [None, steps[0].digest, None, steps[2].digest]
    assert [row.event for row in events] == ["park", "retire", "switch", "admit"]
    assert all(row.interruptions and row.idle_us is not None for row in events) and events[0].park_us
    assert [row.prefill_policy for row in prompts] == ["pause", "interleave"]
    for row in prompts:
        assert row.checks == {"ran_throughout": True} and row.batch == 3 and row.prompt_tokens == 70
        assert row.itl_p50_ms and row.itl_p99_ms and row.itl_most_ms and row.ttft_ms
        assert row.itl_p50_ms <= row.itl_p99_ms <= row.itl_most_ms


def test_on_a_cpu_the_interpreter_is_measured_and_kept(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = run(tmp_path / "runs", "engine=interpreter")
    assert status == 0
    names = ("p50_ms", "ratio", "ratio_high", "interruptions", "idle_us", "park_us", "itl_p99_ms", "ttft_ms")
    require_kept(committed, folder_of(tmp_path / "runs"), **dict.fromkeys(names, lambda value: value + 1))
    check_rows(rows, "interpreter")
    printed = capsys.readouterr().out
    assert "steps are timed by the host: there is no card here" in printed and "weights: checkpoint" in printed


@pytest.fixture
def stand_in(fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    def engine(*args: Any, **more: Any) -> CudaEngine:
        made = CudaEngine(*args, **more, device="cpu")
        fake_device.runtime = made.runtime
        return made

    monkeypatch.setattr(mk.engines.choice, "CudaEngine", engine)
    monkeypatch.setattr("mk.kernel.build.build", fake_build)
    open_model = functools.partial(served_rig.open_model)
    monkeypatch.setattr(served_rig, "open_model", lambda model, weights, at, device: open_model(model, weights, at))
    return fake_device


def test_on_a_card_the_kernels_launches_are_the_other_arm(stand_in: FakeLibrary, tmp_path: Path) -> None:
    status, rows = run(tmp_path, "engine=cuda")
    assert status == 0
    check_rows(rows, "cuda")
    assert all(row.build_hash == "0123456789abcdef" and row.dtype == "bfloat16" for row in rows)


@pytest.mark.parametrize("engine", ["interpreter", "cuda"])
def test_drawn_tokens_are_the_engines_own(stand_in: FakeLibrary, tmp_path: Path, engine: str) -> None:
    status, rows = run(tmp_path, f"engine={engine}", "sampling=top_p", "experiment.events=1")
    assert status == 0
    check_rows(rows, engine)
    assert {row.sampling for row in rows} == {"temperature 1, top_p 0.95"}


def test_a_step_has_the_window_of_its_batch_size_whoever_launches_it(stand_in: FakeLibrary, tmp_path: Path) -> None:
    """The decode loop, through all changes of its batch size, or the engine itself."""
    launched: set[tuple[int, int]] = set()
    stand_in.fault = lambda rt, step: launched.add((rt.params.rows, 8 * rt.params.window_slots))
    assert run(tmp_path / "usual", "engine=cuda")[0] == 0
    assert launched == {(1, 56), (2, 64), (4, 64)}
    launched.clear()
    assert run(tmp_path / "one", "engine=cuda", "engine.ring.window_kb=40")[0] == 0
    assert launched == {(1, 40), (2, 40), (4, 40)}


def test_served_tokens_that_are_not_the_engines_fail(
    stand_in: FakeLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = served_step.own_steps

    def other(*args: Any) -> tuple[list[float], list[list[int]]]:
        times, tokens = own(*args)
        tokens[0][-1] += 1
        return times, tokens

    monkeypatch.setattr(served_step, "own_steps", other)
    status, rows = run(tmp_path, "engine=cuda", "experiment.batches=[1]", "experiment.events=1")
    assert status == 1 and not any(row.checks["tokens_as_own"] for row in rows[:2])


def test_gaps_are_told_apart_and_cost_what_is_beyond_a_step_and_a_prompt() -> None:
    def ran(rows: int, active: int, first_us: int, prefill_us: float = 0.0, park_us: float | None = None) -> Ran:
        """Three steps of 100 us."""
        return Ran(rows, active, prefill_us, [(first_us + 100 * step) * 1000 for step in range(3)], park_us)

    runs = [
        ran(4, 4, 0, park_us=7.0),
        ran(4, 4, 310, park_us=9.0),  # parked for nothing: 10 us
        ran(4, 3, 630),  # one ended: 20 us
        ran(2, 2, 970),  # and another, in a smaller batch: 40 us
        ran(2, 1, 1320),  # 50 us
        ran(2, 2, 2680, prefill_us=1000.0),  # a prompt came: 60 us beyond its own
        ran(4, 4, 9000),  # others
    ]
    assert {kind: (gaps, parks) for kind, (gaps, parks) in by_kind(runs).items()} == {
        "park": ([10.0], [7.0]),
        "retire": ([20.0, 50.0], [9.0]),
        "switch": ([40.0], []),
        "admit": ([60.0], []),
    }


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["experiment.batches=[3]"], r"experiment.batches=\[3\] are not of the sizes"),
        (["server.slots=3", "experiment.batches=[1]"], "2 requests and one more must decode in the same batch size"),
        (["server.context=75"], "contexts of 78 tokens exceed server.context=75"),
        (["experiment.steps=3000", "experiment.context=4000"], "a round of 1500 steps is more than the ring"),
        (["experiment.rounds=7"], "experiment.rounds=7 are more than experiment.steps=6"),
        (["experiment.context=1"], "experiment.context=1 leaves no room for 6 steps"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, overrides: list[str], says: str) -> None:
    with pytest.raises(MkError, match=says):
        run(tmp_path, "engine=interpreter", *overrides)
    assert not list(tmp_path.iterdir())


def test_its_configuration_is_the_full_model_on_a_card() -> None:
    cfg = load_config(["experiment=served_step"])
    assert (cfg.model.preset, cfg.weights.name, cfg.engine.name) == ("north_mini_code", "random", "cuda")
    assert cfg.prefill.chunk < cfg.experiment.prompt and cfg.experiment.steps == 1000
    assert cfg.experiment.batches == [1, 8]


def test_who_ended_before_the_newcomers_first_token_did_not_run_throughout() -> None:
    raw = {"kind": "between_tokens", "gap_ms": [2.0, 3.0], "first_ms": 40.0, "last_ms": [41.0, 40.5]}
    assert between_tokens(Row.__new__(Row), raw)["checks"] == {"ran_throughout": True}
    raw["last_ms"] = [41.0, 39.0]
    assert between_tokens(Row.__new__(Row), raw)["checks"] == {"ran_throughout": False}
