"""The device side of a decode step: buffers, parameters, launches.

`Runtime` owns everything the kernel touches except the weights, loads lowered programs and launches steps. Steps are
queued on a CUDA stream: tokens and context lengths advance on the device, so the host may be many steps ahead. Whatever
it writes between steps is ordered on the same stream.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from mk.device import DeviceFacts
from mk.errors import MkError
from mk.graph import QUEUE_KINDS
from mk.interpreter.step import Status
from mk.isa import NONE, Buffer, Word
from mk.kernel.build import Library
from mk.kernel.host_ring import HostRing, StepTokens
from mk.kernel.stalls import describe_stall, missing_signals
from mk.kernel.step_params import (
    HOST_STEPS,
    KV_BLOCK,
    MAX_ROWS,
    OWNED,
    StepParams,
    buffer_shapes,
    counters_at,
    pack_sampling,
)
from mk.kv import KINDS, PAGE, Blocks, blocks_of, first_visible, kv_layers
from mk.model.packing import PackedWeights
from mk.model.reference import rope_table
from mk.page_layout import pack_keys, pack_values
from mk.ring import MIN_WINDOW, SLOT_KB, UNSAFE_SLOTS, window_for
from mk.sampling import SamplingParams
from mk.schedule.identity import executed_hash
from mk.schedule.lower import Program

DELAYS = "MK_DELAYS"  # defined in a library that can inject delays (csrc/delay.cuh)
MEANING = {
    Status.LOGITS: "a logit is NaN or infinite",
    Status.ROUTER_NAN: "a router logit is NaN",
    Status.EXPERT_ID: "an expert id that replaced the router's does not exist",
}


class StepAborted(MkError):
    """The kernel gave a step up: the message names the SM, task and counter."""


class Runtime:
    """One model on one device: `load` a program, `set_tables`, `set_sequences`, then `launch` steps.

    `tokens_of` gives a step's tokens as soon as they are sampled, `finish` waits for all steps. Every buffer of the
    kernel is `runtime[name]`, shaped as csrc/params.cuh says.
    """

    def __init__(
        self,
        library: Library,
        weights: PackedWeights,
        pages: Mapping[str, int],
        max_blocks: int,
        max_positions: int,
        windows: Sequence[int] = (8,),
        time_limit_s: float = 2.0,
        trace_records: int = 0,
    ) -> None:
        """pages: physical pages of each pool. max_blocks: blocks of a sequence. max_positions: longest context.

        windows: slots an SM may have outstanding, by a step's rows (`mk/ring.py`). time_limit_s: of a step; a wait that
        outlasts it is given up. trace_records: room an SM for a trace build's records (trace.py), which each step
        overwrites.
        Raises MkError for a device or a library that does not fit.
        """
        self.weights, self.geometry = weights, weights.geometry
        self.facts = DeviceFacts.read()
        if self.facts.capability != (9, 0):
            major, minor = self.facts.capability
            raise MkError(f"{self.facts.name} has compute capability {major}.{minor}, the kernel is built for 9.0")
        if library.geometry != self.geometry:
            raise MkError("the library was built for another model geometry than that of the weights")
        self.splits, self.build_hash, self.defines = library.splits, library.build_hash, library.defines
        self.library = library.open()
        most = self.library.mk_ring_slots() - UNSAFE_SLOTS
        for window in windows:
            if not MIN_WINDOW <= window <= most:
                raise MkError(
                    f"a window of {window} slots must lie in {MIN_WINDOW}..{most}",
                    hint=f"engine.ring.window_kb from {SLOT_KB * MIN_WINDOW} to {SLOT_KB * most}",
                )
        if self.library.mk_params_bytes() != ctypes.sizeof(StepParams):
            raise MkError("the library's parameters differ from this code's", hint="remove build/ and build again")
        blocks = self.library.mk_prepare()
        if blocks < 0:
            raise MkError(f"{self.facts.name} refuses the kernel: {self.library.mk_error(-blocks).decode()}")
        if blocks == 0:
            raise MkError(f"the kernel does not fit an SM of {self.facts.name}")
        self.device = weights.slots.device
        self.max_blocks, self.max_positions, self.windows = max_blocks, max_positions, tuple(windows)
        self.stream = torch.cuda.Stream()
        self.program: Program | None = None
        self.epoch = 0
        self._loaded = 0, np.zeros(0, np.uint32)  # epoch and counters as they were when the program was loaded
        self.launched = 0  # steps in all
        self._room: int | None = None  # steps whose contexts have been checked to have pages, where they advance
        self._buffers: dict[str, torch.Tensor] = {}
        self._tables = {kind: np.full((MAX_ROWS, max_blocks), -1, np.int32) for kind in KINDS}  # as the device has them
        self._lists: dict[int, tuple[Program, torch.Tensor, torch.Tensor]] = {}  # words, offsets of those loaded so far
        self.params = StepParams()
        self.params.time_limit_ns = int(time_limit_s * 1e9)
        self.params.table_stride = max_blocks
        self.ring = HostRing(pinned=self.device.type == "cuda")
        self.params.host_steps = self.ring.address
        self._allocate(pages)
        if trace_records:
            records = torch.zeros(self.facts.sms, trace_records, 16, dtype=torch.int32, device=self.device)
            self._own("trace", records)
            self.params.trace_records = trace_records
        self.stream.wait_stream(torch.cuda.current_stream())

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Keeps a device tensor and points the parameter of the same name at it."""
        assert tensor.device == self.device and tensor.is_contiguous(), name
        self._buffers[name] = tensor
        setattr(self.params, name, tensor.data_ptr())
        return tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    def _allocate(self, pages: Mapping[str, int]) -> None:
        g = self.geometry
        self._own("slots", self.weights.slots)
        self._own("norms", self.weights.norms)
        for kind in KINDS:
            pool = (max(1, pages[kind]), max(1, len(kv_layers(g, kind))), g.kv_heads, 2, KV_BLOCK)
            self._own(f"pool_{kind}", torch.full(pool, float("nan"), dtype=torch.bfloat16, device=self.device))
            table = torch.full((MAX_ROWS, self.max_blocks), -1, dtype=torch.int32, device=self.device)
            self._own(f"table_{kind}", table)
        for name, (dtype, shape) in buffer_shapes(g, self.splits, self.facts.sms).items():
            self._own(name, torch.zeros(shape, dtype=dtype, device=self.device))
        # rounded as transformers rounds its tables to the activations' dtype
        rope = torch.stack(rope_table(g, torch.arange(self.max_positions)), dim=-1)
        self._own("rope", rope.bfloat16().float().to(self.device))

    # ---- programs and steps ----

    def load(self, program: Program, epoch: int = 0) -> None:
        """Makes a program current, after a stream-ordered clear of counters, queues and epoch.

        Raises MkError when its grid cannot be resident, or when it was lowered for something else than the library.
        """
        shape, facts = program.shape, self.facts
        for fits, message in (
            (
                shape.n_sm <= facts.sms,
                f"the program wants {shape.n_sm} resident blocks, {facts.name} has {facts.sms} SMs",
            ),
            (shape.rows <= MAX_ROWS, f"the kernel is built for at most {MAX_ROWS} rows, the program has {shape.rows}"),
            (shape.geometry == self.geometry, "the program is for another model geometry"),
            (
                shape.splits == self.splits,
                f"the program cuts attention by {shape.splits}, the library by {self.splits}",
            ),
        ):
            if not fits:
                raise MkError(message)
        sums = np.isin(program.words[:, Word.DST], (Buffer.ACC_ATTN, Buffer.ACC_FFN))  # a part may have one of the two
        kept = program.words[sums, Word.TILES].max(initial=0)
        if kept > OWNED:
            raise MkError(
                f"an SM would own {kept} strips of the residual, the kernel keeps at most {OWNED}",
                hint="more SMs, or another placement than row_owner",
            )
        queues = self.geometry.layers * len(QUEUE_KINDS)
        steps = program.per_step
        counters = counters_at(steps, epoch)
        with torch.cuda.stream(self.stream):
            if id(program) not in self._lists:  # megabytes: a batch size that comes back must not wait for them
                words, offsets = (torch.from_numpy(part).to(self.device) for part in (program.words, program.offsets))
                self._lists[id(program)] = program, words, offsets
            _, words, offsets = self._lists[id(program)]
            self._own("words", words)
            self._own("offsets", offsets)
            self._own("counters", torch.from_numpy(counters).to(self.device))
            self._own("queues", torch.zeros(2, queues, dtype=torch.int32, device=self.device))
            self["candidate_value"].fill_(float("-inf"))  # of SMs that get no strip of the head
            self["candidate_low"].fill_(float("inf"))
            self["candidate_id"].fill_(0x7FFFFFFF)
            for name in ("bin_mass", "bin_count", "undecided_count", "abort_word", "stalls"):
                self[name].zero_()
        self.params.rows, self.params.n_sm, self.params.n_queues = shape.rows, shape.n_sm, queues
        self.params.window_slots = window_for(self.windows, shape.rows)
        self.program, self.epoch = program, epoch
        self._loaded = epoch, counters[: len(steps), 0].view(np.uint32).copy()

    def set_tables(self, tables: Mapping[str, Blocks]) -> None:
        """Page tables of the batch: kind -> int32 [rows, blocks], as `PageTable.table` holds them. -1 = no page.

        Only what changed since the last call goes to the device. Raises MkError for a table or a page that it lacks.
        """
        for kind in KINDS:
            table = np.full((MAX_ROWS, self.max_blocks), -1, np.int32)
            rows, blocks = tables[kind].shape
            if rows > MAX_ROWS or blocks > self.max_blocks:
                raise MkError(f"a {kind} page table of {rows} x {blocks} exceeds {MAX_ROWS} x {self.max_blocks}")
            table[:rows, :blocks] = tables[kind]
            changed = np.flatnonzero(table != self._tables[kind])
            if not len(changed):
                continue
            pages = table.reshape(-1)[changed]
            if pages.max() >= len(self[f"pool_{kind}"]):
                raise MkError(f"the {kind} page table names page {pages.max()} of {len(self[f'pool_{kind}'])}")
            self._change(f"table_{kind}", changed, pages)
            self._tables[kind] = table

    def set_sequences(
        self,
        keys: Sequence[int],
        tokens: Sequence[int] | None = None,
        steps: int = 1,
        sampling: Sequence[SamplingParams] | None = None,
        held: Sequence[int] | None = None,
    ) -> None:
        """The next step's rows. keys: context lengths with this step's token, 0 = inactive row.

        tokens: what each row continues with; None = what the last step sampled. steps: how many may be queued before
        the next call; with more than one, contexts advance on the device. sampling: one a row, None = greedy. held:
        for a decode loop, which launches in this object's place: the contexts that it may take each row to. Clears
        the rows' status. Raises MkError for a context without room in the program or without pages, and for parameters
        that the program cannot sample by, naming the row.
        """
        if self.program is None:
            raise MkError("no program is loaded", hint="Runtime.load first")
        advance = steps > 1 or held is not None
        if advance and self.program.cut is not None:
            raise MkError(f"{self.program.cut.name} is a part of a step: it is run once, not {steps} times")
        shape, g = self.program.shape, self.geometry
        sampling = [SamplingParams()] * shape.rows if sampling is None else sampling
        if {len(keys), len(sampling), len(keys if tokens is None else tokens)} != {shape.rows}:
            raise MkError(f"{len(keys)} rows for a program of {shape.rows}")
        drawn = [row for row, params in enumerate(sampling) if not params.greedy]
        if drawn and not shape.draws:
            raise MkError(
                f"row {drawn[0]}: the program only takes the likeliest token", hint="lower it with draws=True"
            )
        for row, first in enumerate(keys):
            last = first + steps - 1 if held is None else held[row]
            if first and not 0 < first <= last <= self.longest:
                raise MkError(f"row {row}: contexts of {first} to {last} keys do not fit 1..{self.longest}")
            if first:
                self.require_pages(row, first, last)
            if first and tokens is not None and not 0 <= tokens[row] < g.vocab:
                raise MkError(f"row {row}: token {tokens[row]} is outside 0..{g.vocab - 1}")
        with torch.cuda.stream(self.stream):
            self._upload("keys", _padded(keys))
            if tokens is not None:
                self._upload("tokens", _padded(tokens))
            if shape.draws:
                packed = pack_sampling(sampling, g.vocab)
                self._upload("sampling", torch.from_numpy(packed.view(np.int64).reshape(MAX_ROWS, -1)))
            self["status"].zero_()
        self.params.advance = int(advance)
        self.params.epoch = self.epoch & 0xFFFFFFFF
        self._room = 0 if held is not None else steps if advance else None

    @property
    def longest(self) -> int:
        """The longest context that the loaded program, the positions and the page tables have room for."""
        assert self.program is not None
        return min(self.program.shape.bucket, self.max_positions, self.max_blocks * PAGE)

    def require_pages(self, row: int, first: int, last: int) -> None:
        """Raises MkError where the tables lack a page that a row's contexts of `first` to `last` keys need."""
        for kind in KINDS:
            window = self.geometry.window_keys if kind == "sliding" else None
            held = self._tables[kind][row, first_visible(first, window) // PAGE : blocks_of(last)]
            if kv_layers(self.geometry, kind) and (held < 0).any():
                raise MkError(f"row {row}: a context of {last} keys has no {kind} page for some of its blocks")

    def force_routing(self, ids: torch.Tensor | None) -> None:
        """From the next launch on top-k takes `ids`, int32 [layers, MAX_ROWS, top_k] on the device, distinct in a row.

        None gives the router its say back. The tensor must stay as it is until the launched steps are done.
        """
        if ids is None:
            self.params.forced_ids = None
            self._buffers.pop("forced_ids", None)
        else:
            self._own("forced_ids", ids)

    def publish_routing(self, ids: torch.Tensor) -> None:
        """From the next launch on top-k writes the ids it took to `ids`, int32 [layers, MAX_ROWS, top_k]."""
        self._own("route_ids", ids)

    def inject_delays(self, seed: int = 0, most_ns: int = 0, slow_sm: int = 0, slow_ns: int = 0) -> None:
        """From the next launch on every claim, wait and signal is late by up to `most_ns`, drawn from `seed`, and SM
        `slow_sm` takes `slow_ns` longer for each attention split and expert tile.

        `runtime["tiles_taken"]` counts those of every SM. Raises MkError where the library was built without delays.
        """
        if DELAYS not in self.defines:
            raise MkError("this library was built without delays", hint=f"build(..., defines=({DELAYS!r},))")
        self.params.delay_seed, self.params.delay_ns = seed, most_ns
        self.params.slow_sm, self.params.slow_ns = slow_sm, slow_ns

    def launch(self) -> int:
        """Queues one step; its number, for `tokens_of`.

        Raises MkError when CUDA refuses the launch, and beyond the steps of `set_sequences`.
        """
        if self._room == 0:
            raise MkError("all steps that contexts may advance by are queued", hint="Runtime.set_sequences again")
        self.params.epoch, self.params.launched = self.epoch & 0xFFFFFFFF, self.launched
        self.require_success(self._queue_step())
        self.count_launches(1)
        if self._room is not None:
            self._room -= 1
        return self.launched - 1

    def launcher(self, tell: Callable[[int], None], steps: int) -> Callable[[int], int]:
        """A function that queues step i of the next `steps`, which it is called for in order, and gives its number;
        `tell(i)` has said by then what the step is to do (`force_routing`, `publish_routing`). Raises as `launch`."""

        def launch(step: int) -> int:
            tell(step)
            return self.launch()

        return launch

    def _queue_step(self) -> int:
        """Hands a step with the parameters as they are to the stream; a CUDA error code."""
        return int(self.library.mk_launch(ctypes.byref(self.params), ctypes.c_void_p(self.stream.cuda_stream)))

    def require_success(self, code: int) -> None:
        """Raises MkError for a CUDA error code."""
        if code:
            raise MkError(f"launch failed: {self.library.mk_error(code).decode()}")

    def count_launches(self, count: int) -> None:
        """Somebody has launched `count` steps with these parameters."""
        self.epoch += count
        self.launched += count

    def poll(self, launch: int) -> StepTokens | None:
        """What launch number `launch` sampled, as soon as it has and whatever is queued behind it; None before.

        Raises MkError for a launch that never was, and for one whose place in the ring a later one may have taken.
        """
        assert self.program is not None
        if not self.launched - HOST_STEPS <= launch < self.launched or launch < 0:
            raise MkError(
                f"launch {launch} of {self.launched} has no tokens in the ring, which holds {HOST_STEPS} steps",
                hint="read each step's tokens before many more are queued",
            )
        return self.ring.read(launch, self.program.shape.rows)

    def tokens_of(self, launch: int) -> StepTokens:
        """Waits for what launch number `launch` samples. Raises MkError as `poll` does, `StepAborted` if it gave up."""
        while True:
            idle = self.stream.query()
            found = self.poll(launch)
            if found is not None:
                return found
            if idle:  # before the look at the ring
                self.finish()
                raise MkError(f"launch {launch} ended without a token in the ring")
            time.sleep(0)

    def finish(self) -> None:
        """Waits for all queued steps; raises `StepAborted` if one gave up. The program is then as if newly loaded."""
        self.stream.synchronize()
        if self["abort_word"].item():
            assert self.program is not None
            stalls = self["stalls"].cpu().numpy()
            launched, missing = self._given_up(stalls)
            message = describe_stall(launched, missing, stalls, int(self["abort_word"].item()) - 1)
            self.load(self.program)
            raise StepAborted(message)

    def _given_up(self, stalls: npt.NDArray[np.int32]) -> tuple[Program, npt.NDArray[np.int32]]:
        """What was launched and did not end, and the signals that its counters lack. stalls: [SMs, 8]."""
        assert self.program is not None
        counters = self["counters"].cpu().numpy()[:, 0]
        return self.program, missing_signals(self.program.per_step, self.epoch, counters)

    def executed_hash(self) -> str:
        """Of the descriptors, lists and counter increments that the device holds, read back from it, after all steps
        that are queued. Raises MkError before the first step since `load`, and where it is not the program's hash."""
        self.finish()
        if self.program is None:
            raise MkError("no program is loaded", hint="Runtime.load first")
        words, offsets = (self[name].cpu().numpy() for name in ("words", "offsets"))
        epoch, before = self._loaded
        after = self["counters"].cpu().numpy().view(np.uint32)[: len(before), 0]
        return executed_hash(self.program, words, offsets, before, after, self.epoch - epoch)

    def logits(self, row: int) -> torch.Tensor:
        """float32 [vocab] of the last finished step, a view that the next step overwrites."""
        return self["logits"][row, : self.geometry.vocab]

    def status(self) -> list[int]:
        """Flags of each row of the program since `set_sequences`, as in mk/interpreter/step.py; 0 = nothing wrong."""
        found: list[int] = self["status"][: self.params.rows].tolist()
        return found

    def require_healthy(self, what: str) -> None:
        """Raises MkError, beginning with `what`, for the first active row with a status: row, reason, and of an expert
        id that does not exist the layer and the id."""
        active = self["keys"].tolist()
        for row, flags in enumerate(self.status()):
            if flags and active[row]:
                reasons = [text for flag, text in MEANING.items() if flags & flag]
                if flags & Status.EXPERT_ID and "forced_ids" in self._buffers:
                    ids, experts = self["forced_ids"][:, row].cpu(), self.geometry.experts
                    replaced = ids[:, :1] != NONE  # layers whose router has no say in this row
                    for layer, rank in (replaced & ((ids < 0) | (ids >= experts))).nonzero().tolist()[:1]:
                        reasons[-1] += f": layer {layer} got {ids[layer, rank]}, ids are 0..{experts - 1}"
                raise MkError(f"{what}: row {row}: {', '.join(reasons)}", hint="mk/interpreter/step.py lists the flags")

    def _upload(self, name: str, values: torch.Tensor) -> None:
        """Stream-ordered copy into a buffer. From page-locked memory, so that the host need not wait for the stream."""
        source = values.pin_memory() if self.device.type == "cuda" else values
        self[name].copy_(source, non_blocking=True)

    def _change(self, name: str, places: npt.NDArray[np.int64], values: Blocks) -> None:
        """Stream-ordered change of some elements of a buffer, by their flat index; one copy, as `_upload`'s."""
        both = torch.from_numpy(np.stack([places, values.astype(np.int64)]))
        source = both.pin_memory() if self.device.type == "cuda" else both
        with torch.cuda.stream(self.stream):
            moved = source.to(self.device, non_blocking=True)
            buffer = self[name]
            buffer.view(-1).scatter_(0, moved[0], moved[1].to(buffer.dtype))

    # ---- KV pages ----

    def write_pages(self, kind: str, page: int, layer_index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Fills one page of one layer (by its index among its kind) from K and V [kv_heads, 64, 128]."""
        pool = self[f"pool_{kind}"]
        with torch.cuda.stream(self.stream):
            pool[page, layer_index, :, 0] = pack_keys(k.to(self.device, torch.bfloat16))
            pool[page, layer_index, :, 1] = pack_values(v.to(self.device, torch.bfloat16))


def _padded(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor([*values, *[0] * (MAX_ROWS - len(values))], dtype=torch.int32)
