"""What a step of a trace build (`engine.trace`) left behind: when each SM published, streamed, computed and stored.

A record is 16 words, whose order csrc/trace.cuh fixes. Times are cycles of the SM's own clock; `StepTrace` turns them
into microseconds since the first SM of the step began, through the card's clock that each SM read at its start.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mk.errors import MkError
from mk.isa import ISA, Word
from mk.kernel.build import CSRC
from mk.schedule.lower import Program

_WORD = 0xFFFFFFFF
_END = _WORD  # the opcode of the entry that ends an SM's main track
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def trace_words() -> list[str]:
    """Names of a record's words, in order, as csrc/trace.cuh lists them."""
    text = re.sub(r"//.*", "", (CSRC / "trace.cuh").read_text())
    body = text[text.index("enum TraceWord") :].split("{", 1)[1].split("}")[0]
    names = [name.strip() for name in body.split(",") if name.strip()]
    assert names.pop() == "TRACE_WORDS"
    return [name.removeprefix("T_").lower() for name in names]


def records_of(program: Program) -> int:
    """Records an SM needs for a step: its descriptors, every tile that it might claim, and one at either end of the
    main track."""
    shape = program.shape
    main, aside = np.diff(program.offsets).reshape(2, shape.n_sm)
    longest = int(main.max()) + int(aside.max())
    if shape.attention_claimers or shape.moe_claimers:
        most = max(shape.splits.most(shape.bucket, shape.window(layer)) for layer in range(shape.geometry.layers))
        tiles = shape.rows * (shape.geometry.kv_heads * most + shape.geometry.top_k * shape.hidden_strips)
        longest += shape.geometry.layers * 4 * (1 + tiles // shape.n_sm)
    return longest + 2


def records_of_launches(program: Program) -> int:
    """Records a block needs for the longest launch of a step with one a wave, but for the last launch: those of a wave,
    with as many again for what it makes again, and both ends."""
    words, layers = program.words, program.shape.geometry.layers
    inner = words[:, Word.LAYER] < layers
    keys = np.stack([program.sm_of, words[:, Word.LAYER], words[:, Word.WAVE]], axis=1)[inner]
    longest = int(np.unique(keys, axis=0, return_counts=True)[1].max())
    return 2 * longest + 4


ASIDE = ("sm", "opcode", "layer", "task", "begun", "ended")


def _words(buffer: torch.Tensor) -> Ints:
    return buffer.cpu().numpy().view(np.uint32).astype(np.int64)


def _places() -> dict[str, int]:
    return {name: index for index, name in enumerate(trace_words())}


def _last(words: Ints) -> Ints:
    """The records [blocks, 16] that end each block's main track. Raises MkError for a block without one."""
    ends = words[:, 1:, _places()["opcode"]] == _END
    if not ends.any(axis=1).all():
        raise MkError(f"SM {int(np.argmin(ends.any(axis=1)))} ran more descriptors than its trace has records")
    return words[np.arange(len(words)), 1 + ends.argmax(axis=1)]


TIMES = ("published", "go", "stream", "streamed", "taken", "opened", "done", "storing", "signalled")
TALLIES = ("ring_full", "window", "ring_empty", "tile_full")


@dataclass(frozen=True)
class StepTrace:
    """One step. sm, opcode, layer, task: int64 [n], SM after SM in list order; us: name of a word -> float64 [n].

    The words of `TIMES` are moments in microseconds, those of `TALLIES` durations, 0 where waits are not noted. A
    moment that a role never came to (a consumer that need not wait) is NaN. aside: of the tasks aside, float64 [m] by
    the names of `ASIDE`, moments alike; empty where they are not known.
    """

    sm: npt.NDArray[np.int64]
    opcode: npt.NDArray[np.int64]
    layer: npt.NDArray[np.int64]
    task: npt.NDArray[np.int64]
    us: dict[str, Floats]
    aside: dict[str, Floats] = field(default_factory=lambda: {name: np.zeros(0) for name in ASIDE})

    @classmethod
    def read(cls, buffer: torch.Tensor) -> StepTrace:
        """buffer: int32 [SMs, records, 16] as the kernel leaves it: an SM's record 0 and its last one hold both clocks.

        Raises MkError when an SM had more descriptors than the buffer has records.
        """
        words, at = _words(buffer), _places()
        last = _last(words)
        begun, begun_ns = words[:, 0, at["published"]], words[:, 0, at["layer"]]
        cycles = (last[:, at["signalled"]] - begun) & _WORD
        per_us = float((cycles / ((last[:, at["storing"]] - begun_ns) & _WORD)).mean() * 1e3)
        start = begun_ns + (words[:, 0, at["task"]] << 32)  # ns of the card's clock
        return cls._of(words, np.arange(len(words)), (start - start.min()) / 1e3, per_us)

    @classmethod
    def of_launches(cls, buffer: torch.Tensor) -> StepTrace:
        """Of a step of many launches, in which an SM ran one block of each: int32 [launches, blocks, records, 16].

        An SM's own clock runs on from launch to launch and is the finer one; it is put onto the card's by all launches
        together. Raises MkError as `read`.
        """
        words, at = _words(buffer).reshape(-1, *buffer.shape[2:]), _places()
        sm, begun = words[:, 0, at["opcode"]], words[:, 0, at["published"]]
        ns = words[:, 0, at["layer"]] + (words[:, 0, at["task"]] << 32)
        ns -= ns.min()
        since = np.zeros(len(words))  # cycles of the SM's clock since its first block
        rates, shift = [], np.zeros(len(words))
        for number in np.unique(sm):
            own = np.flatnonzero(sm == number)
            own = own[np.argsort(ns[own], kind="stable")]
            since[own] = (begun[own] - begun[own[0]]) & _WORD
            cycles, card = (values - values.mean() for values in (since[own], ns[own].astype(np.float64)))
            rates.append((cycles @ cycles) / (cycles @ card))
        per_us = float(np.median(rates)) * 1e3
        for number in np.unique(sm):
            own = sm == number
            shift[own] = since[own] / per_us + np.median(ns[own] / 1e3 - since[own] / per_us)
        return cls._of(words, sm, shift - shift.min(), per_us)

    @classmethod
    def _of(cls, words: Ints, number: Ints, shift: Floats, per_us: float) -> StepTrace:
        """words [blocks, records, 16]; of each block its SM, when it began, microseconds, and the cycles of one."""
        at, begun = _places(), words[:, 0, _places()["published"]]
        _last(words)
        opcode = words[:, 1:, at["opcode"]]
        block, place = np.nonzero(np.arange(opcode.shape[1]) < (opcode == _END).argmax(axis=1)[:, None])
        of = words[block, place + 1]

        def moments(of: Ints, block: Ints, name: str) -> Floats:
            since = ((of[:, at[name]] - begun[block]) & _WORD) / per_us
            return np.where(of[:, at[name]] == 0, np.nan, since + shift[block])

        us = {name: moments(of, block, name) for name in TIMES}
        us |= {name: of[:, at[name]] / per_us for name in TALLIES}
        # those aside: from the last record backwards
        backwards = words[:, :0:-1]
        beside = (backwards[:, :, at["opcode"]] != 0) & (backwards[:, :, at["opcode"]] != _END)
        aside_block, back = np.nonzero(np.cumprod(beside, axis=1) & (backwards[:, :, at["published"]] == 0))
        found = backwards[aside_block, back]
        aside = {
            "sm": number[aside_block].astype(np.float64),
            "opcode": found[:, at["opcode"]].astype(np.float64),
            "layer": found[:, at["layer"]].astype(np.float64),
            "task": found[:, at["task"]].astype(np.float64),
            "begun": moments(found, aside_block, "storing"),
            "ended": moments(found, aside_block, "signalled"),
        }
        places = number[block], of[:, at["opcode"]], of[:, at["layer"]], of[:, at["task"]]
        return cls(*places, us, aside)

    def save(self, path: Path) -> None:
        """As npz, for `mk/schedule/fit.py`."""
        places = {"sm": self.sm, "opcode": self.opcode, "layer": self.layer, "task": self.task}
        columns: dict[str, npt.NDArray[Any]] = {**places, **self.us}
        np.savez_compressed(path, allow_pickle=False, **columns)

    @classmethod
    def load(cls, path: Path) -> StepTrace:
        """Raises MkError for a file that is no saved trace."""
        try:
            with np.load(path) as of:
                places = (of["sm"], of["opcode"], of["layer"], of["task"])
                return cls(*places, {name: of[name] for name in (*TIMES, *TALLIES)})
        except Exception as error:  # of broken bytes: as in mk/routing.py
            raise MkError(f"{path}: is no trace of a step ({type(error).__name__})") from error

    def causes(self) -> dict[str, dict[str, float]]:
        """Microseconds an SM, mean over SMs, by operation and cause. Of a build that notes waits.

        Of the consumers: `poll` (a counter), `empty` (nothing streamed yet), `storer` (no room for a tile), `work`,
        `entry` (before the descriptor was there). Of the producer: `window` (streaming as fast as the window lets it),
        `full` (no free slot), `idle` (no descriptor it could stream for), `issue` (the rest).
        """
        us, first = self.us, np.diff(self.sm, prepend=-1) != 0
        opened = np.where(np.isnan(us["opened"]), us["taken"], us["opened"])
        before = np.where(first, 0.0, np.roll(us["done"], 1))
        streamed = np.where(first, 0.0, np.roll(us["streamed"], 1))
        took = us["done"] - opened
        parts = {
            "entry": us["taken"] - before,
            "poll": opened - us["taken"],
            "empty": us["ring_empty"],
            "storer": us["tile_full"],
            "work": took - us["ring_empty"] - us["tile_full"],
            "idle": us["stream"] - streamed,
            "full": us["ring_full"],
            "window": us["window"],
            "issue": us["streamed"] - us["stream"] - us["ring_full"] - us["window"],
            "store": us["signalled"] - us["storing"],
        }
        names = {op.opcode: op.name for op in ISA}
        sms = len(np.unique(self.sm))
        table: dict[str, dict[str, float]] = defaultdict(dict)
        for opcode in np.unique(self.opcode).tolist():
            chosen = self.opcode == opcode
            for cause, value in parts.items():
                table[names.get(opcode, str(opcode))][cause] = float(np.nansum(value[chosen])) / sms
        return dict(table)

    def perfetto(self, path: Path) -> None:
        """Chrome trace events, one process an SM and one thread a role, for ui.perfetto.dev."""
        names = {op.opcode: op.name for op in ISA}
        spans = {
            "consumers": ("opened", "done"),
            "producer": ("stream", "streamed"),
            "storer": ("storing", "signalled"),
        }
        events: list[dict[str, object]] = []
        for thread, (role, (begin, end)) in enumerate(spans.items()):
            begins, ends = self.us[begin], self.us[end]
            if role == "consumers":
                begins = np.where(np.isnan(begins), self.us["taken"], begins)
            for k in np.flatnonzero(ends > begins).tolist():
                name = f"{names.get(int(self.opcode[k]), '?')}.{self.layer[k]}"
                event = {"name": name, "ph": "X", "ts": begins[k], "dur": ends[k] - begins[k]}
                events.append({**event, "pid": int(self.sm[k]), "tid": thread, "args": {"task": int(self.task[k])}})
            for sm in np.unique(self.sm).tolist():
                events.append({"name": "thread_name", "ph": "M", "pid": sm, "tid": thread, "args": {"name": role}})
        for sm in np.unique(self.sm).tolist():
            events.append({"name": "process_name", "ph": "M", "pid": sm, "args": {"name": f"SM {sm}"}})
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def causes_table(causes: dict[str, dict[str, float]], layers: int) -> str:
    """The causes as lines, microseconds a layer, a total last."""
    columns = list(next(iter(causes.values())))
    total = {cause: sum(row[cause] for row in causes.values()) for cause in columns}
    lines = [f"{'us a layer':16}" + "".join(f"{name:>9}" for name in columns)]
    for name, row in {**causes, "all": total}.items():
        lines.append(f"{name:16}" + "".join(f"{row[cause] / layers:9.2f}" for cause in columns))
    return "\n".join(lines)
