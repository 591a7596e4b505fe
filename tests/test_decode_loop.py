"""The decode loop: in C++ over a card made of a thread, hard; its twin in Python; and that both give the same."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mk.decode_loop import CardLost, LoopStep, Parked, Run, TwinLoop, finish
from mk.engines.cuda import CudaEngine
from mk.errors import MkError
from mk.graph import LAYER_WAVES
from mk.interpreter import StepOutputs
from mk.kernel.build import CSRC
from mk.kernel.native_loop import RECORD, LoopRun, LoopState
from mk.programs import Plan
from mk.sampling import SamplingParams, sample_row
from mk.splits import SplitPolicy
from tests.csrc_constants import constants, fields
from tests.device_rig import FakeLibrary, fake_build, fake_device, next_logits
from tests.interpreter_rig import GEOMETRY, weights
from tests.loop_rig import compiled

__all__ = ["fake_device"]

SCENARIOS = {"runs": 300, "ends": 60, "park_races": 1000, "slow_reader": 40, "faults": 40, "stops": 100, "patience": 8}
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1.0, seed=3)


def stress(
    program: Path, scenario: str, seed: int, rounds: int, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    command = [program, scenario, str(seed), str(rounds)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_loop_under_stress(scenario: str, seed: int) -> None:
    """Parks at any moment, budgets, ends, late pages, a ring that wraps, a slow reader, broken cards, a stop."""
    done = stress(compiled("stress.cpp"), scenario, seed, SCENARIOS[scenario])
    assert done.returncode == 0, done.stderr


def test_the_loop_has_no_data_race() -> None:
    try:
        program = compiled("stress.cpp", "-fsanitize=thread", "-O1")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no ThreadSanitizer: {error.stderr.strip().splitlines()[-1]}")
    for scenario, rounds in SCENARIOS.items():
        done = stress(program, scenario, 4, max(4, rounds // 8))
        if "unexpected memory mapping" in done.stderr:
            pytest.skip("ThreadSanitizer cannot run in this address space")
        assert done.returncode == 0, done.stderr[:4000]


@pytest.mark.parametrize(
    ("scenario", "right", "wrong"),
    [
        ("runs", "run_.keys[row] + done > held_[row]", "run_.keys[row] + done > held_[row] + 1"),
        ("runs", "done >= run_.budget[row]", "done > run_.budget[row]"),
        ("runs", "if (seen_ < next_) {", "if (seen_ < next_ && !asked_) {"),
        ("slow_reader", "tail_ - head_ + (next_ - seen_) >= records_.size()", "false"),
        ("ends", "live_[row] = false;", ""),
        ("runs", "asked_ = false, settled_", "settled_"),
        ("stops", "if (seen_ < next_) {", "if (seen_ < next_ && !stopping_) {"),
    ],
)
def test_a_wrong_loop_is_noticed(scenario: str, right: str, wrong: str, tmp_path: Path) -> None:
    program = mutant(right, wrong, tmp_path)
    assert any(stress(program, scenario, seed, 200).returncode for seed in range(1, 5))


def test_a_loop_without_a_limit_hangs_on_a_card_that_does(tmp_path: Path) -> None:
    program = mutant("now - begun < limit_", "true", tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        stress(program, "patience", 1, 1, timeout=4)


def mutant(right: str, wrong: str, folder: Path) -> Path:
    """The program of all scenarios over a loop with one change."""
    text = (CSRC / "decode_loop.cuh").read_text()
    assert text.count(right) == 1
    (folder / "decode_loop.cuh").write_text(text.replace(right, wrong))
    source = Path(__file__).parent / "decode_loop" / "stress.cpp"
    command = ["g++", "-std=c++17", "-pthread", f"-I{folder}", f"-I{CSRC}", source, "-o", folder / "wrong"]
    subprocess.run(command, check=True)
    return folder / "wrong"


def test_both_sides_mean_the_same() -> None:
    text = (CSRC / "decode_loop.cuh").read_text()
    names = re.findall(r"^  ([A-Z]+),", text[text.index("enum Parked") :], re.MULTILINE)
    assert names == [*(reason.name for reason in Parked), "CROWDED"]

    assert fields("decode_loop.cuh", "LoopRun") == [name for name, _ in LoopRun._fields_]
    assert fields("decode_loop.cuh", "LoopState") == [name for name, _ in LoopState._fields_]
    assert fields("decode_loop.cuh", "StepRecord") == list(RECORD.names or ())
    # rows as many as a step has, and no padding that one side has and the other has not
    rows = constants()["MAX_ROWS"]
    assert not re.search(r"\[\d+\]", text + (CSRC / "host_step.cuh").read_text())
    assert RECORD.itemsize == 16 + 2 * 4 * rows and ctypes.sizeof(LoopRun) == 16 + 4 + 4 * (4 * rows + 1) + 8
    assert ctypes.sizeof(LoopState) == 16


# ---- the twin ----


def computed(tokens: list[int], keys: list[int], sampling: list[SamplingParams]) -> StepOutputs:
    """A step as the stand-in for the card computes it."""
    out = StepOutputs.blank(len(keys), GEOMETRY.vocab)
    for row, length in enumerate(keys):
        if length:
            logits = next_logits(GEOMETRY, tokens[row], length).numpy()
            out.tokens[row] = sample_row(logits, sampling[row], length)
    return out


def drawn(rng: np.random.Generator, rows: int) -> Run:
    """A run that parks itself."""
    keys = [int(rng.integers(0, 2)) * int(rng.integers(1, 60)) for _ in range(rows - 1)] + [int(rng.integers(1, 60))]
    ends = [frozenset(rng.integers(0, GEOMETRY.vocab, int(rng.integers(0, 60))).tolist()) for _ in keys]
    return Run(
        tokens=rng.integers(0, GEOMETRY.vocab, rows).tolist(),
        keys=keys,
        sampling=[(GREEDY, WARM)[int(rng.integers(2))] for _ in keys],
        held=[64 * int(rng.integers(1, 3)) if length else 0 for length in keys],
        budgets=rng.integers(1, 90, rows).tolist(),
        ends=ends,
        steps=None if rng.random() < 0.7 else int(rng.integers(1, 40)),
    )


def test_the_loop_and_its_twin_give_the_same(fake_device: FakeLibrary) -> None:
    """Reason and tokens; steps that were under way when a row ended may be fewer where the end was noticed sooner."""
    rng, reasons = np.random.default_rng(0), set()
    plan = Plan(6, LAYER_WAVES, "row_owner", splits=SplitPolicy(128, 4))
    engine = CudaEngine(weights(), fake_build(GEOMETRY, plan.splits), plan, 3, 128, device="cpu", ahead=4)
    fake_device.runtime = engine.runtime
    for row in range(3):
        engine.pages.reserve(row, 64, since=0)
        engine.pages.reserve(row, 128, since=0)
    twin = TwinLoop(computed, ahead=4)
    for _ in range(60):
        run = drawn(rng, 3)
        engine.loop.resume(run)
        twin.resume(run)
        native, theirs = finish(engine.loop), finish(twin)
        assert engine.loop.parked == twin.parked
        reasons.add(twin.parked)
        slack = 3 if twin.parked is Parked.END else 0
        assert len(theirs) - slack <= len(native) <= len(theirs)
        for mine, other in zip(native, theirs, strict=False):
            assert mine.tokens.tolist() == other.tokens.tolist() and mine.status.tolist() == other.status.tolist()
    assert reasons == {Parked.END, Parked.STEPS, Parked.BUDGET, Parked.ROOM}
    engine.loop.stop()


@pytest.mark.parametrize("at_exit", [False, True], ids=["stop", "exit"])
def test_no_call_into_the_library_outlives_the_loop(
    fake_device: FakeLibrary, monkeypatch: pytest.MonkeyPatch, at_exit: bool
) -> None:
    """A thread that nobody waits for reads while another stops the loop, or the interpreter's exit does."""
    engine = CudaEngine(weights(), fake_build(GEOMETRY), Plan(6, LAYER_WAVES, "row_owner"), 1, 128, device="cpu")
    fake_device.runtime, loop = engine.runtime, engine.loop
    engine.pages.reserve(0, 128, since=0)
    inside, calls, reads = set[str](), list[str](), threading.Semaphore(0)

    def watched(name: str) -> Callable[..., int]:
        function = getattr(fake_device, f"mk_loop_{name}")

        def call(*arguments: object) -> int:
            calls.append(name)
            assert name != "stop" or not inside, f"deleted under {inside}"
            inside.update({name} - {"stop", "park"})
            if name == "read":
                reads.release()
                time.sleep(0.05)  # the caller has let go of the GIL
            result: int = function(*arguments)
            inside.discard(name)
            return result

        return call

    for name in ("resume", "park", "grant", "read", "state", "stop"):
        monkeypatch.setattr(fake_device, f"mk_loop_{name}", watched(name))
    ended: list[object] = []

    def decode() -> None:
        try:
            for _ in range(100):
                loop.resume(Run(tokens=[5], keys=[10], held=[128], budgets=[9], sampling=[GREEDY], ends=[frozenset()]))
                finish(loop)
        except CardLost as error:
            ended.append(error)

    reader = threading.Thread(target=decode)
    reader.start()
    for _ in range(3):
        reads.acquire()
    (loop._stop if at_exit else loop.stop)()
    reader.join(10)
    assert not reader.is_alive() and len(ended) == 1
    loop.park()
    loop.stop()
    with pytest.raises(CardLost):
        loop.resume(twin_run())
    assert calls.count("stop") == 1 and calls[-1] == "stop"


def twin_run(budget: int = 100, held: int = 100, **more: object) -> Run:
    given = {"sampling": [GREEDY], "ends": [frozenset()], **more}
    return Run(tokens=[5], keys=[10], held=[held], budgets=[budget], **given)  # type: ignore[arg-type]


def test_the_twin_grants_parks_and_fails_as_the_loop_does() -> None:
    twin = TwinLoop(computed, ahead=3)
    assert twin.read() == []
    twin.resume(twin_run(held=12))
    with pytest.raises(MkError, match="a run is under way"):
        twin.resume(twin_run())
    twin.read()
    twin.grant([20])
    found = finish(twin)
    assert twin.parked is Parked.ROOM and found[-1].number == 10  # contexts of 10 to 20
    twin.resume(twin_run())
    twin.read()
    twin.park()
    assert len(finish(twin)) == 2 and twin.parked is Parked.ASKED  # those under way

    def breaks(tokens: list[int], keys: list[int], sampling: list[SamplingParams]) -> StepOutputs:
        if keys[0] == 15:
            raise MkError("SM 3 gave up")
        out = computed(tokens, keys, sampling)
        out.status[0] = keys[0] == 13
        return out

    def until_it_fails(ahead: int) -> list[LoopStep]:
        found: list[LoopStep] = []
        twin = TwinLoop(breaks, ahead)
        twin.resume(twin_run())
        with pytest.raises(MkError, match="gave up"):
            while steps := twin.read():
                found += steps
        assert twin.parked is Parked.ABORTED and twin.read() == []
        return found

    found = until_it_fails(3)
    assert [step.status[0] for step in found] == [0, 0, 0, 1, 0] and found[3].tokens[0] == found[4].tokens[0] == -1
    twin = TwinLoop(breaks)
    twin.resume(twin_run())
    assert len(finish(twin)) == 4 and twin.parked is Parked.FAULT
    twin.stop()
    with pytest.raises(CardLost, match="was stopped"):
        twin.resume(twin_run())
