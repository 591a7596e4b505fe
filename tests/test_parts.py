"""Comparing two machines wave by wave: what they wrote is found in both, and a machine that is wrong is told apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mk.errors import MkError
from mk.interpreter.memory import Memory
from mk.isa import Buffer
from mk.kernel.build import Library
from mk.kv import KINDS
from mk.model.geometry import PRESETS
from mk.parts import InterpreterWorker, StepInput, Tolerances, compare_waves, fields, written
from mk.parts.device import download, download_pages, upload, upload_pages
from mk.parts.workers import Ids
from mk.schedule.cut import cut, waves_of
from mk.schedule.lower import Program
from mk.verify.errors import unit_count
from tests.device_rig import fake_device
from tests.interpreter_rig import GEOMETRY, program
from tests.parts_rig import InterpretingLibrary, interpreter, kernel, step_input

__all__ = ["fake_device"]

KEYS = [100, 0, 64, 1]  # past the window, inactive, a page's last token, nothing behind it
EXACT, NOISE = Tolerances(GEOMETRY, exact=True), Tolerances(GEOMETRY)


@pytest.fixture
def library(fake_device: object, monkeypatch: pytest.MonkeyPatch) -> InterpretingLibrary:
    made = InterpretingLibrary()
    monkeypatch.setattr(Library, "open", lambda self: made)
    return made


def noise(array: np.ndarray) -> None:
    array[...] = np.random.default_rng(array.size).normal(size=array.shape)


def test_fields_are_views_and_count_the_units_of_the_buffer() -> None:
    shape = program(len(KEYS)).shape
    memory = Memory(shape)
    for buffer in Buffer:
        for field in fields(memory, buffer):
            units = np.prod(field.values.shape[: field.units])
            assert units == unit_count(shape, buffer), field
            assert field.values.shape[field.rows] == shape.rows
            field.values[...] = 1.5
            assert all((other.values == 1.5).all() for other in fields(memory, buffer) if other.name == field.name)
    layers = cut(program(len(KEYS), placement="round_robin"), None, f"{GEOMETRY.layers - 1}.rmsnorm")
    assert {buffer for buffer in written(layers) if not fields(memory, buffer)} <= {Buffer.QUEUES}


def test_a_part_writes_what_its_operations_declare() -> None:
    whole = program(len(KEYS))
    assert set(written(cut(whole, "2.attn", "2.attn"))) == {Buffer.PARTIAL}
    residual = written(cut(whole, "2.rmsnorm", "2.rmsnorm"))
    assert set(residual) == {Buffer.X1, Buffer.OPROJ_OUT, Buffer.FFN_OUT}
    assert all(mask.all() for mask in residual.values())
    router = written(cut(whole, "2.router", "2.router"))[Buffer.ROUTER_PART]
    assert router.all() and router.sum() == unit_count(whole.shape, Buffer.ROUTER_PART)


def test_memory_survives_the_way_to_the_device_and_back(library: InterpretingLibrary) -> None:
    """Up to bf16 where the kernel keeps bf16, and to the rounding of a change of the logarithm's base."""
    shape = program(len(KEYS)).shape
    worker = kernel(shape, library)
    sent, received = Memory(shape), Memory(shape)
    for buffer in Buffer:
        for field in fields(sent, buffer):
            noise(field.values)
    sent.hidden[..., GEOMETRY.expert_ffn :] = 0
    for dense in (False, True):
        upload(worker.runtime, sent)
        download(worker.runtime, received, dense)
        for buffer in Buffer:
            for ours, theirs in zip(fields(sent, buffer), fields(received, buffer), strict=True):
                if buffer != Buffer.HIDDEN:
                    np.testing.assert_allclose(theirs.values, ours.values, rtol=2**-8)
        width = GEOMETRY.dense_ffn if dense else GEOMETRY.expert_ffn
        experts = slice(0, 1) if dense else slice(None)
        np.testing.assert_allclose(received.hidden[experts, :, :width], sent.hidden[experts, :, :width], rtol=2**-8)
    step_input(worker.kv, KEYS)
    pools = {kind: worker.kv.pools[kind].copy() for kind in KINDS}
    upload_pages(worker.runtime, worker.kv)
    for kind in KINDS:
        worker.kv.pools[kind].fill(0)
    download_pages(worker.runtime, worker.kv)
    assert all(np.array_equal(worker.kv.pools[kind], pools[kind], equal_nan=True) for kind in KINDS)


@pytest.mark.parametrize(
    ("order", "placement", "stealing"),
    [("default", "row_owner", False), ("parted", "round_robin", True), ("interleaved", "dependency_affinity", False)],
)
def test_two_interleavings_write_the_same_wave_by_wave(order: str, placement: str, stealing: bool) -> None:
    whole = program(len(KEYS), order, placement, stealing)
    expected, tested = interpreter(whole.shape), interpreter(whole.shape, seed=1)
    results = list(compare_waves(waves_of(whole), expected, tested, step_input(expected.kv, KEYS), EXACT))
    assert all(result.passed for result in results)
    seen = {(d.buffer, d.field) for result in results for d in result.differences if d.elements}
    last = {Buffer.LOGITS, Buffer.TOKENS}
    layers = {buffer for part in waves_of(whole) for buffer in written(part)} - {Buffer.QUEUES}
    assert {buffer for buffer, _ in seen} >= {buffer.name for buffer in layers | last}
    assert ("KV page", "K") in seen and ("ROUTE", "expert ids") in seen


def test_the_kernels_side_is_read_and_written_where_its_buffers_are(library: InterpretingLibrary) -> None:
    """Every wave crosses to the device's layout and back, and the numbers are those of the interpreter."""
    whole = program(len(KEYS))
    expected, tested = interpreter(whole.shape), kernel(whole.shape, library)
    parts = waves_of(whole)
    results = list(compare_waves(parts, expected, tested, step_input(expected.kv, KEYS), NOISE))
    assert [result.name for result in results] == [part.cut.name for part in parts]
    assert all(result.passed for result in results), [r for r in results if not r.passed][:1]
    assert library.launches == len(parts)
    assert sum(d.elements for r in results for d in r.differences) > 50_000


def test_given_ids_take_the_routers_place(library: InterpretingLibrary) -> None:
    whole = program(len(KEYS))
    part = cut(whole, "2.qkv", "2.rmsnorm")
    ids = {2: np.array([[4, 1, 6]] * len(KEYS))}
    for worker in (interpreter(whole.shape), kernel(whole.shape, library)):
        inputs = step_input(worker.kv, KEYS)
        noise(worker.memory.x)
        noise(worker.memory.x_squares[0])
        worker.memory.x_squares[...] = 1.0
        chosen = worker.run(part, StepInput(inputs.keys, inputs.tokens, inputs.table, ids))
        assert (chosen[2] == np.array([[4, 1, 6], [-1] * 3, [4, 1, 6], [4, 1, 6]])).all()


class Wrong(InterpreterWorker):
    """Does something to memory after (or, given nothing to run, instead of) each part."""

    def __init__(self, shape, fault: Callable[[Memory], None]) -> None:
        worker = interpreter(shape, seed=1)
        super().__init__(worker.machine, shape)
        self.fault = fault

    def run(self, part: Program, inputs: StepInput) -> Ids:
        ids = super().run(part, inputs)
        self.fault(self.memory)
        return ids


def one_step_of_bf16(memory: Memory) -> None:
    memory.qkv[0, 3, 5] *= 1 + 2**-6


def many_roundings(memory: Memory) -> None:
    memory.qkv[0] *= np.float32(1 + 2**-8)


def a_strip_left_out(memory: Memory) -> None:
    memory.qkv[:, 2] = np.nan


def a_float_off(memory: Memory) -> None:
    memory.router_part[0, 0, 2, 1] += np.float32(0.001) * np.abs(memory.router_part[:, :, 2]).max()


def another_key(memory: Memory) -> None:
    memory.split_out[0, 1, 0, 0] *= -1


def a_wrong_token(memory: Memory) -> None:
    memory.tokens[2] += 1


@pytest.mark.parametrize(
    ("wave", "fault", "field"),
    [
        ("2.qkv", one_step_of_bf16, ("QKV", "q, k, v")),
        ("2.qkv", many_roundings, ("QKV", "q, k, v")),
        ("2.qkv", a_strip_left_out, ("QKV", "q, k, v")),
        ("2.router", a_float_off, ("ROUTER_PART", "logits of a k slot")),
        ("2.attn", another_key, ("PARTIAL", "o")),
        ("5.lm_head-5.sample", a_wrong_token, ("TOKENS", "tokens")),
    ],
)
def test_a_wave_that_is_wrong_is_named(wave: str, fault: Callable[[Memory], None], field: tuple[str, str]) -> None:
    whole = program(len(KEYS))
    expected = interpreter(whole.shape)
    inputs = step_input(expected.kv, KEYS)
    parts = waves_of(whole)
    at = [part.cut.name for part in parts].index(wave)
    assert all(r.passed for r in compare_waves(parts[:at], expected, interpreter(whole.shape), inputs, NOISE))
    tested = Wrong(whole.shape, fault)
    (result,) = compare_waves([parts[at]], expected, tested, inputs, NOISE)
    assert [(d.buffer, d.field) for d in result.differences if not d.passed] == [field]


def test_a_status_flag_is_an_error() -> None:
    whole = program(1)
    worker = interpreter(whole.shape)
    inputs = step_input(worker.kv, [5])
    with pytest.raises(MkError, match=r"2\.topk: row 0 has status 2"):
        worker.run(cut(whole, "2.topk", "2.topk"), inputs)  # nobody wrote the logits: they are NaN


def test_tolerances_are_far_below_a_percent_in_a_full_width_model() -> None:
    wide = Tolerances(PRESETS["slice"])
    for field in ("logits of a k slot", "an expert's", "attention's", "the FFN's", "logits"):
        own, of_row, stored = wide.of(field)
        assert own == 0 and not stored and of_row < 2e-4
