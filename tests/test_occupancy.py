"""Idle SM time: from spans of work to shares by wave; launches on one clock; the experiment without a card."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import wave_occupancy
from mk.compose import load_config
from mk.errors import MkError
from mk.isa import ISA, Word
from mk.kernel.launches import WaveLaunches
from mk.kernel.occupancy import Spans, busy, ends_of_layer, idle_by_wave
from mk.kernel.runtime import Runtime
from mk.kernel.trace import StepTrace, records_of, records_of_launches, trace_words
from mk.results.recompute import different
from mk.results.rows import Row, read_raw, read_rows
from mk.schedule.cut import launches_of
from tests.device_rig import FakeLibrary, fake_device
from tests.interpreter_rig import program
from tests.test_decode_throughput import stand_in

__all__ = ["fake_device", "stand_in"]

GHZ = 1.5  # of the SMs' clocks
END = 0xFFFFFFFF
CODES = {op.name: op.opcode for op in ISA}
AT = {name: index for index, name in enumerate(trace_words())}
Entry = tuple[str, int, dict[str, float]]


def block(
    sm: int, begin: float, entries: list[Entry], end: float, room: int = 8, tick_ns: int = 1, aside: int = 0
) -> np.ndarray:
    """Records uint32 [room, 16] of a block that began and ended at these microseconds, on a card's clock that ticks
    each `tick_ns`. The last `aside` entries stand aside."""
    words = np.zeros((room, len(AT)), np.uint32)
    epoch = 2**32 - 1500  # ns: the low word wraps soon

    def cycles(us: float) -> int:
        return (2**32 - 40_000 * (sm + 1) + round(us * GHZ * 1e3)) & END  # every SM's own clock wraps, too

    def card(us: float) -> int:
        return (epoch + round(us * 1e3)) // tick_ns * tick_ns

    words[0, [AT["opcode"], AT["published"]]] = sm, cycles(begin)
    words[0, [AT["layer"], AT["task"]]] = card(begin) & END, card(begin) >> 32
    main = entries[: len(entries) - aside]
    for place, (op, layer, us) in enumerate(main, start=1):
        words[place, [AT["opcode"], AT["layer"], AT["published"]]] = CODES[op], layer, cycles(begin) or 1
        words[place, AT["task"]] = us.get("task", 100 * sm + place)
        for name, value in us.items():
            if name != "task":
                words[place, AT[name]] = round(value * GHZ * 1e3) if name == "ring_full" else cycles(value)
    words[len(main) + 1, [AT["opcode"], AT["published"]]] = END, cycles(end)
    words[len(main) + 1, [AT["storing"], AT["signalled"]]] = card(end) & END, cycles(end)
    for place, (op, layer, us) in enumerate(entries[len(main) :]):
        words[-1 - place, [AT["opcode"], AT["layer"]]] = CODES[op], layer
        words[-1 - place, [AT["storing"], AT["signalled"]]] = cycles(us["storing"]), cycles(us["signalled"])
    return words


def buffer(words: object) -> torch.Tensor:
    return torch.from_numpy(np.array(words).view(np.int32))


def stored(begin: float, end: float) -> dict[str, float]:
    return {"taken": begin, "done": begin, "storing": begin, "signalled": end}


LAYER = [  # of two SMs: what ends layer 4, and layer 5
    [("residual", 4, stored(0, 2)), ("qkv", 5, {"stream": 1, "streamed": 9, "ring_full": 4, "taken": 2, "opened": 4,
                                                "done": 9, "storing": 4, "signalled": 10}),
     ("residual", 5, stored(14, 16)), ("attn_combine", 5, {"storing": 11, "signalled": 12})],
    [("residual", 4, stored(0, 3)), ("residual", 5, stored(14, 20))],
]  # fmt: skip


def test_an_sm_idles_where_no_role_is_at_work() -> None:
    """From 3 to 20: SM 0 streams until 5, computes and stores until 10, merges from 11 to 12, stores from 14 to 16;
    SM 1 stores from 14 on."""
    trace = StepTrace.read(buffer([block(sm, 0, LAYER[sm], 20, aside=1 - sm) for sm in (0, 1)]))
    assert trace.aside["sm"].tolist() == [0] and trace.aside["layer"].tolist() == [5]
    spans = Spans.of(trace)
    begin, ends = ends_of_layer(spans, 5)
    assert begin == pytest.approx(3, abs=0.01)
    assert ends == {
        name: pytest.approx(us, abs=0.01) for name, us in (("qkv", 10), ("attn_combine", 12), ("rmsnorm", 20))
    }
    inside = spans.within(begin, 20)
    at_work = busy(inside, [0, 1])
    assert at_work == [[pytest.approx(s, abs=0.01) for s in sm] for sm in ([[0, 7], [8, 9], [11, 13]], [[11, 17]])]
    idle = idle_by_wave(at_work, {wave: end - begin for wave, end in ends.items()})
    assert idle == {
        "qkv": pytest.approx(3.5, abs=0.01),  # SM 1, all of 7
        "attn_combine": pytest.approx(1.5, abs=0.01),
        "rmsnorm": pytest.approx(4, abs=0.01),
    }


def test_a_producer_that_waits_for_room_is_not_at_work() -> None:
    """Its wait is taken to come last: it issues until the ring is full."""
    entries: list[Entry] = [("qkv", 1, {"stream": 1, "streamed": 9, "ring_full": 5})]
    spans = Spans.of(StepTrace.read(buffer([block(0, 0, entries, 10)])))
    assert spans.begin == pytest.approx([1], abs=0.01) and spans.end == pytest.approx([4], abs=0.01)
    with pytest.raises(MkError, match="the trace has no layer 1 with one before it"):
        ends_of_layer(spans, 1)


@pytest.mark.parametrize("tick_ns", [1, 32, 1024])
def test_launches_lie_on_one_clock_however_coarse_the_cards_is(tick_ns: int) -> None:
    """Blocks of a launch are on any SM; what is on one SM is as exact as its own clock."""
    rng, launches = np.random.default_rng(1), 200
    begins = np.cumsum(rng.uniform(4, 9, launches))
    skew = rng.uniform(0, 1, (launches, 3))
    words = []
    for launch, begin in enumerate(begins.tolist()):
        sms, late = rng.permutation(3).tolist(), skew[launch]
        words.append([
            block(sm, begin + late[sm], [("qkv", launch, stored(begin + late[sm] + 1, begin + late[sm] + 2))],
                  begin + late[sm] + 3, tick_ns=tick_ns) for sm in sms])  # fmt: skip
    trace = StepTrace.of_launches(buffer(words))
    assert len(trace.sm) == 3 * launches and set(trace.sm.tolist()) == {0, 1, 2}
    truth = begins[trace.layer] + skew[trace.layer, trace.sm] + 1
    off = trace.us["storing"] - truth
    off -= off.mean()
    assert np.abs(off).max() < 0.02 + tick_ns / 4000
    for sm in range(3):
        own = off[trace.sm == sm]
        assert np.ptp(own) < 0.02 + tick_ns / 1000 * 0.1
    assert trace.us["signalled"] - trace.us["storing"] == pytest.approx(1, abs=0.01 + tick_ns / 1e5)


@pytest.mark.parametrize("placement", ["round_robin", "row_owner"])
@pytest.mark.parametrize("n_sm", [5, 16])
def test_there_are_records_for_every_launch_but_the_last(placement: str, n_sm: int) -> None:
    whole = program(3, placement=placement, n_sm=n_sm)
    *parts, _ = launches_of(whole)
    assert max(map(records_of, parts)) <= records_of_launches(whole) <= 3 * max(map(records_of, parts))


# ---- the experiment ----
RUN = ["experiment=wave_occupancy", "model=nano", "weights=checkpoint", "experiment.context=300", "experiment.steps=3",
       "experiment.warmup=1", "experiment.batches=[2]", "experiment.layer=2"]  # fmt: skip


def run(folder: Path, *more: str) -> tuple[list[Row], dict[str, dict], Path]:
    assert wave_occupancy.main(load_config([*RUN, f"run_dir={folder}", *more])) == 0
    (path,) = folder.iterdir()
    return read_rows(path / "rows.jsonl"), read_raw(path / "raw.jsonl"), path


def fills(rt: Runtime, step: int) -> None:
    """As trace builds would: every entry takes its block 2 us of storing, every launch begins 10 us after the last."""
    assert rt.program is not None
    launched = isinstance(rt, WaveLaunches)
    programs = rt._parts.programs if isinstance(rt, WaveLaunches) and rt._parts else [rt.program]
    for number, part in enumerate(programs[:-1] if launched else programs):
        for sm in range(part.shape.n_sm):
            begin = 10.0 * number
            entries = [
                (
                    ISA.rows[int(d[Word.OPCODE])].name,
                    int(d[Word.LAYER]),
                    {**stored(begin + 2 * i + 1, begin + 2 * i + 3), "task": int(d[Word.TASK])},
                )
                for i, d in enumerate(part.track(sm))
            ]
            records = rt.params.trace_records
            words = block(sm, begin, entries, begin + 2 * len(entries) + 3, room=records)
            held = (
                rt.launch_trace[number] if isinstance(rt, WaveLaunches) and rt.launch_trace is not None else rt["trace"]
            )
            held[sm] = torch.from_numpy(words.view(np.int32))


def test_arms_have_a_row_and_a_panel_each(
    stand_in: FakeLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.fault = fills
    rows, raw, path = run(tmp_path)
    assert [row.engine for row in rows] == ["cuda"] * 4 and {row.layer for row in rows} == {2}
    waves, graph, barriers, _ = rows
    assert waves.schedule_hash == graph.schedule_hash != barriers.schedule_hash
    assert waves.idle_us_by_wave == graph.idle_us_by_wave
    assert set(waves.idle_us_by_wave or {}) == {"router", "qkv", "topk", "attn", "moe_up", "oproj", "moe_down",
                                                "moe_combine", "rmsnorm"}  # fmt: skip
    for row in rows:
        assert list(different(row, raw[row.raw_sha256 or ""])) == []
        assert row.idle_us_by_wave and row.layer_us and row.idle_pct is not None
        assert row.idle_pct == pytest.approx(100 * sum(row.idle_us_by_wave.values()) / row.layer_us)
        assert row.p50_ms == 1.0 and row.checks == {"schedule_verified": True}
    assert (waves.idle_pct or 0) > 50  # of 10 us from launch to launch few are work
    order = sorted(raw[waves.raw_sha256 or ""]["wave_ends_us"].items(), key=lambda item: item[1])
    named = [wave for wave, _ in order]
    assert named.index("topk") < named.index("moe_up")  # its first run of several
    assert (path / "layer2_batch2.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("% idle: ") == 4


def test_without_a_card_arms_of_one_launch_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    rows, raw, path = run(tmp_path)
    barriers, owned = rows
    assert {row.clock for row in rows} == {"simulated"} and capsys.readouterr().out.count("not simulated: ") == 2
    assert (barriers.idle_pct or 0) > (owned.idle_pct or 0) > 0 and (barriers.layer_us or 0) > (owned.layer_us or 0)
    assert "attn_combine" in (barriers.idle_us_by_wave or {})
    assert all(list(different(row, raw[row.raw_sha256 or ""])) == [] for row in rows)
    assert list(path.glob("*.png"))


@pytest.mark.parametrize("layer", [0, 99])
def test_a_layer_without_experts_or_one_before_is_refused(layer: int, tmp_path: Path) -> None:
    with pytest.raises(MkError, match=f"experiment.layer={layer} has no experts"):
        run(tmp_path, f"experiment.layer={layer}")
