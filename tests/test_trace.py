"""What is made of a trace build's records: times on one clock, causes that add up, a timeline that viewers read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mk.errors import MkError
from mk.graph import LAYER_WAVES, StepShape
from mk.isa import ISA
from mk.kernel.trace import TALLIES, TIMES, StepTrace, causes_table, records_of, trace_words
from mk.schedule.lower import lower
from tests.tiny_model import tiny_geometry

GHZ = 1.5
QKV, RESIDUAL = (ISA.named(name).opcode for name in ("qkv", "residual"))
AT = {name: index for index, name in enumerate(trace_words())}


def records(starts_ns: list[int], room: int = 4) -> np.ndarray:
    """Two descriptors an SM: a product that streams, waits and stores, and a residual that only the storer runs."""
    words = np.zeros((len(starts_ns), room, len(AT)), np.uint32)
    for sm, ns in enumerate(starts_ns):
        clock = 2**32 - 3001 * (sm + 1)  # an SM's own clock, which wraps within the step

        def put(record: int, sm: int = sm, clock: int = clock, **of: float) -> None:
            for name, value in of.items():
                cycles = name in TIMES and not (record == 0 or (record == 3 and name == "storing"))
                words[sm, record, AT[name]] = (clock + int(value * GHZ * 1e3) if cycles else int(value)) & 0xFFFFFFFF

        put(0, layer=ns & 0xFFFFFFFF, task=ns >> 32, published=clock)
        put(1, opcode=QKV, layer=2, task=7, published=1, go=3, stream=1.5, streamed=4, taken=2, opened=3, done=6)
        put(1, storing=3, signalled=7, ring_empty=GHZ * 1000, tile_full=GHZ * 500, window=GHZ * 250)
        put(2, opcode=RESIDUAL, layer=2, task=8, published=2, go=7, stream=4, streamed=4, taken=6, done=6)
        put(2, storing=7, signalled=8)
        put(3, opcode=0xFFFFFFFF, published=2, storing=(ns + 20_000) & 0xFFFFFFFF, signalled=20)
    return words


def read(words: np.ndarray) -> StepTrace:
    return StepTrace.read(torch.from_numpy(words.view(np.int32)))


def test_times_of_all_sms_are_on_one_clock() -> None:
    """Whatever their own clocks say, and when the low word of the card's clock wraps."""
    step = read(records([2**32 - 500, 2**32 + 1500]))
    assert step.sm.tolist() == [0, 0, 1, 1] and step.opcode.tolist() == [QKV, RESIDUAL] * 2
    assert step.us["done"] == pytest.approx([6, 6, 8, 8], abs=0.01)
    assert step.us["signalled"] == pytest.approx([7, 8, 9, 10], abs=0.01)
    assert np.isnan(step.us["opened"][1]) and step.us["opened"][2] == pytest.approx(5, abs=0.01)
    assert step.us["ring_empty"] == pytest.approx([1, 0, 1, 0], abs=0.01)


def test_causes_add_up_to_the_time_of_the_consumers_and_of_the_producer() -> None:
    causes = read(records([0, 0])).causes()
    of = {name: pytest.approx(value, abs=0.01) for name, value in causes["qkv"].items()}
    assert of == {
        "entry": 2,
        "poll": 1,
        "empty": 1,
        "storer": 0.5,
        "work": 1.5,
        "idle": 1.5,
        "full": 0,
        "window": 0.25,
        "issue": 2.25,
        "store": 4,
    }
    consumers = sum(row[name] for row in causes.values() for name in ("entry", "poll", "empty", "storer", "work"))
    producer = sum(row[name] for row in causes.values() for name in ("idle", "full", "window", "issue"))
    assert consumers == pytest.approx(6, abs=0.01) and producer == pytest.approx(4, abs=0.01)
    lines = causes_table(causes, layers=2).splitlines()
    assert lines[0].split()[3:5] == ["entry", "poll"] and lines[-1].split()[:3] == ["all", "1.00", "0.50"]


def test_the_timeline_has_a_span_for_each_role(tmp_path: Path) -> None:
    read(records([0, 5000])).perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} == {"qkv.2", "residual.2"}
    product = [event for event in spans if event["pid"] == 1 and event["name"] == "qkv.2"]
    assert [event["ts"] for event in product] == pytest.approx([8, 6.5, 8], abs=0.01)
    assert [event["dur"] for event in product] == pytest.approx([3, 2.5, 4], abs=0.01)
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "consumers",
        "producer",
        "storer",
    }


def test_a_buffer_that_is_too_short_is_refused() -> None:
    with pytest.raises(MkError, match="SM 1 ran more descriptors than its trace has records"):
        words = records([0, 0])
        words[1, 3] = 0
        read(words)


def test_words_are_those_that_python_reads() -> None:
    assert len(AT) == 16 and {*TIMES, *TALLIES, "opcode", "layer", "task"} == set(AT)


@pytest.mark.parametrize("claimers", [0, 4])
def test_there_is_room_for_every_descriptor(claimers: int) -> None:
    shape = StepShape(tiny_geometry(), 2, 300, 4, attention_claimers=claimers, moe_claimers=claimers)
    program = lower(shape, LAYER_WAVES, "round_robin")
    main, aside = np.diff(program.offsets).reshape(2, 4)
    longest = int(main.max() + aside.max())
    assert records_of(program) == longest + 2 if not claimers else records_of(program) > longest + 2
