"""Engines: what computes a decode step. Each holds the KV of a fixed number of batch slots.

`interpreter` executes lowered descriptors on virtual SMs, `cuda` runs them in the kernel (`mk/cuda_engine.py`),
`reference` is the plain PyTorch forward. A batch decoder (`mk/decode.py`) drives any of them without knowing which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from mk.build import build_for, is_built
from mk.config import Config
from mk.cuda_engine import CudaEngine
from mk.decode_loop import DecodeLoop, TwinLoop
from mk.device import DeviceFacts
from mk.engine.scripted import Replies, ScriptedEngine, read_replies
from mk.errors import MkError
from mk.interpreter import Machine, StepInputs, StepOutputs
from mk.kv import KINDS, KVCache, PageAllocator, blocks_of, pages_for_contexts
from mk.model.geometry import Geometry
from mk.model.opening import Model
from mk.model.packing import PackedWeights
from mk.model.reference import LayerOutput, ReferenceCache, reference_forward
from mk.model.tensors import WeightSource, parameter_count
from mk.programs import Plan, programs_by_size
from mk.routing import Router, make_router
from mk.sampling import SamplingParams, sample_row
from mk.schedule.lower import Program
from mk.step_params import MAX_ROWS
from mk.threads import threads_for
from prefill.chunks import Prompt
from prefill.interpreted import InterpretedPrefill
from prefill.torch_prefill import TorchPrefill

Logits = npt.NDArray[np.float32]


class Engine(Protocol):
    """`rows` batch slots with room for `context` tokens each. `program` is what the last step ran, None without one."""

    name: str
    geometry: Geometry
    rows: int
    context: int

    @property
    def program(self) -> Program | None: ...

    def executed_hash(self) -> str | None:
        """Of the schedule that the last step executed, read back from the machine; None without one."""
        ...

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> Logits:
        """Take in tokens at positions start.. of a slot that holds the `start` tokens before them.

        Returns the logits after the last one, float32 [vocab], or after `every` one, [tokens, vocab]. Raises MkError.
        """
        ...

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        """Decode one token in every active row.

        tokens [rows]: what each row continues with; None = what the last step sampled. keys [rows]: context lengths
        with that token, 0 = inactive row. details: whether logits and experts are wanted besides tokens and status; an
        engine to which they are no trouble gives them anyway. Raises MkError.
        """
        ...

    def free(self, row: int) -> None:
        """Give a slot's memory back; its next sequence starts empty."""
        ...


class PagedEngine(Engine, Protocol):
    """An engine whose KV lies in pages: what continuous batching needs.

    sizes: batch sizes that it is built for, ascending, the last of them `rows`. A step has one row for each of the
    first slots: `tokens`, `keys`, `sampling` and what comes out are of any one of these sizes.
    """

    pages: PageAllocator
    sizes: tuple[int, ...]

    @property
    def packs(self) -> bool:
        """Whether prompts that are prefilled together share a pass over the weights, at the bits each has alone."""
        ...

    def prefill_together(self, prompts: Sequence[Prompt]) -> Sequence[Logits]:
        """As `prefill`, several slots at once: the logits after the last token of each, the same bits as alone.

        An MkError, of whichever prompt, leaves all of them undone.
        """
        ...

    @property
    def loop(self) -> DecodeLoop:
        """What decodes where nobody has to look at a step's logits. `step`, `prefill` and the copies want it parked."""
        ...

    def copy_out(self, kind: str, pages: Sequence[int]) -> Any:
        """What some physical pages hold, in host memory."""
        ...

    def copy_in(self, kind: str, pages: Sequence[int], values: Any) -> None:
        """Fill as many pages with what `copy_out` gave, bit for bit."""
        ...


class MachineEngine:
    """The interpreter, its paged KV, and programs that change when the longest context outgrows its bucket."""

    name = "interpreter"

    def __init__(
        self,
        weights: PackedWeights,
        plan: Plan,
        rows: int,
        context: int,
        numerics: str = "float32",
        chunk: int = 512,
        seed: int = 0,
        router: Router | None = None,
        prefill: str = "torch",
        pages: Mapping[str, int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """`seed` orders both the interleaving of the SMs and the pages handed out. prefill: torch, triton.

        pages: of each pool; None = as many as `rows` contexts need. sizes: as of `PagedEngine`; None = `rows` alone.
        """
        self.geometry = g = weights.geometry
        self.rows, self.context = rows, context
        self.sizes = (rows,) if sizes is None else tuple(sizes)
        pages = pages or pages_for_contexts(g, rows, context, chunk, paged_chunk=prefill == "triton")
        self.kv = KVCache(g, pages["full"], pages["sliding"])
        self.pages = self.kv.allocator(rows, blocks_of(context), seed)
        self.machine = Machine(weights, self.kv, numerics, seed, router)
        self.programs = programs_by_size(g, self.sizes, plan)
        self.program: Program | None = None
        self.loop = TwinLoop(self._compute)
        self._prefill: TorchPrefill | InterpretedPrefill
        if prefill == "triton":
            self._prefill = InterpretedPrefill(weights, self.kv, context, numerics, chunk)
        else:
            self._prefill = TorchPrefill(weights, self.kv, numerics, chunk)

    def executed_hash(self) -> str | None:
        return None if self.program is None else self.machine.executed_hash()

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> Logits:
        return self._prefill.run(self.pages, row, tokens, start, every)

    @property
    def packs(self) -> bool:
        return isinstance(self._prefill, InterpretedPrefill)

    def prefill_together(self, prompts: Sequence[Prompt]) -> Sequence[Logits]:
        return self._prefill.together(self.pages, prompts)

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        self.pages.advance(keys)
        return self._compute(tokens, keys, sampling)

    def _compute(
        self, tokens: Sequence[int] | None, keys: Sequence[int], sampling: Sequence[SamplingParams]
    ) -> StepOutputs:
        self._fit(len(keys), max(keys), any(not params.greedy for params in sampling))
        table = {kind: self.pages.table[kind][: len(keys)] for kind in KINDS}
        try:
            return self.machine.step(StepInputs(tokens, keys, table, list(sampling)))
        except MkError:
            self.program = None  # its counters stand somewhere in the middle of a step
            raise

    def free(self, row: int) -> None:
        self.pages.free(row)

    def copy_out(self, kind: str, pages: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.kv.pools[kind][list(pages)]

    def copy_in(self, kind: str, pages: Sequence[int], values: npt.NDArray[np.float32]) -> None:
        self.kv.pools[kind][list(pages)] = values

    def _fit(self, rows: int, longest: int, draws: bool) -> None:
        """Change to a program that fits. Loading clears counters; fed-back tokens stay while the batch size does."""
        program = self.programs[rows].fit(self.program, longest, draws)
        if program is not self.program:
            self.program = program
            self.machine.load(program)


class ReferenceEngine:
    """The PyTorch reference, one row after the other. It knows no pages, programs or SMs."""

    name = "reference"

    def __init__(self, source: WeightSource, rows: int, context: int, router: Router | None = None) -> None:
        self.geometry = source.geometry
        self.rows, self.context = rows, context
        self.program: Program | None = None
        self._source = source
        self._nbytes = 4 * parameter_count(source.geometry)  # as float32
        self._router = router
        self._caches = [ReferenceCache() for _ in range(rows)]
        self._sampled: list[int] = []
        self._steps = 0

    def executed_hash(self) -> None:
        return None

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> Logits:
        if not tokens:
            raise MkError("prefill: the prompt has no tokens")
        if every:
            return np.stack([self._forward(row, [token]) for token in tokens])
        return self._forward(row, tokens)

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        g, tokens = self.geometry, self._sampled if tokens is None else tokens
        active = np.array(keys) > 0
        out = StepOutputs.blank(self.rows, g.vocab)
        out.expert_ids = {layer: np.full((self.rows, g.top_k), -1, np.int64) for layer in g.sparse_layers}
        forced = self._forced_ids(active)
        for row in np.flatnonzero(active).tolist():
            trace: list[LayerOutput] = []
            ids = [forced[layer][row, None] if layer in forced else None for layer in range(g.layers)]
            out.logits[row] = self._forward(row, [tokens[row]], trace, ids)
            out.tokens[row] = sample_row(out.logits[row], sampling[row], keys[row])
            for layer in g.sparse_layers:
                chosen = trace[layer].expert_ids
                assert chosen is not None
                out.expert_ids[layer][row] = chosen[0].numpy()
        self._sampled = out.tokens.tolist()
        self._steps += 1
        return out

    def free(self, row: int) -> None:
        self._caches[row] = ReferenceCache()

    def _forced_ids(self, active: npt.NDArray[np.bool_]) -> dict[int, torch.Tensor]:
        """A routing mode's ids [rows, top_k] by layer: they do not depend on logits, only on who is active."""
        if self._router is None:
            return {}
        g = self.geometry
        logits = np.where(active[:, None], np.zeros((self.rows, g.experts), np.float32), np.float32(np.nan))
        return {layer: torch.from_numpy(self._router(layer, self._steps, logits)) for layer in g.sparse_layers}

    def _forward(
        self,
        row: int,
        tokens: Sequence[int],
        trace: list[LayerOutput] | None = None,
        ids: Sequence[torch.Tensor | None] | None = None,
    ) -> Logits:
        fresh = torch.tensor(list(tokens))
        with threads_for(self._nbytes):
            logits = reference_forward(
                self.geometry, self._source.tensor, fresh, cache=self._caches[row], trace=trace, expert_ids=ids, keep=1
            )
        last: Logits = logits[0].numpy()
        return last


def cuda_obstacle(config: Config, rows: int) -> MkError | None:
    """Why the kernel cannot decode this configuration here; None if it can, once it is built."""
    if not torch.cuda.is_available():
        small = " model=nano weights=checkpoint gpu=cpu" if config.model.name != "nano" else ""
        hint = f"engine=interpreter{small} executes the same descriptors on the CPU"
        return MkError("engine=cuda: there is no CUDA device here", hint=hint)
    facts = DeviceFacts.read()
    if facts.capability != (9, 0):
        return MkError(f"engine=cuda: {facts.name} is no Hopper GPU", hint="engine=interpreter")
    if config.gpu.kind == "cuda":
        try:
            facts.require(config.gpu)
        except MkError as other_card:
            return other_card
    if rows > MAX_ROWS:
        return MkError(f"engine=cuda decodes at most {MAX_ROWS} rows, not {rows}", hint="engine=interpreter")
    if config.routing.name != "checkpoint":
        other = f"engine=cuda decodes with the router's own choice, not routing={config.routing.name}"
        return MkError(other, hint="engine=interpreter, or experiment=decode_throughput")
    return None


def require_engine(config: Config, rows: int) -> None:
    """Raises MkError for an engine asked for by name that cannot run here, saying what can, and for a script that is
    none."""
    if config.engine.name == "scripted":
        read_replies(Path(config.engine.script or ""))
    obstacle = cuda_obstacle(config, rows) if config.engine.name == "cuda" else None
    if obstacle is not None:
        raise obstacle


def engine_name(config: Config, geometry: Geometry, rows: int) -> str:
    """The engine that `engine.name` stands for: `auto` takes the kernel where it can run and its library is built."""
    if config.engine.name != "auto":
        return config.engine.name
    if cuda_obstacle(config, rows) is None and is_built(config, geometry):
        return "cuda"
    return "interpreter"


def make_engine(
    config: Config,
    model: Model,
    rows: int,
    context: int,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """The configured engine for `rows` sequences of at most `context` tokens. Raises MkError for what does not fit.

    `progress` is told (matrices packed, in all) where weights have to be packed first.
    """
    name = engine_name(config, model.geometry, rows)
    if name == "reference":
        _check(config, model, rows, context)
        if config.engine.numerics != "float32":
            raise MkError(
                f"engine=reference computes in float32, not engine.numerics={config.engine.numerics}",
                hint="engine=interpreter has both",
            )
        return ReferenceEngine(model.source, rows, context, make_router(config.routing, model.geometry, rows))
    if name == "scripted":
        raise MkError("engine=scripted has no model to decode with", hint="it is for experiment=serve")
    return make_paged_engine(config, model, rows, context, None, progress)


def make_paged_engine(
    config: Config,
    model: Model,
    rows: int,
    context: int,
    pages: Mapping[str, int] | None,
    progress: Callable[[int, int], None] | None = None,
    sizes: Sequence[int] | None = None,
) -> PagedEngine:
    """As `make_engine`, of the engines that page their KV. pages: of each pool; None = as many as `rows` contexts need.

    The scripted engine needs to be told. sizes: as of `PagedEngine`; None = `rows` alone, and so it is for a routing
    mode, which draws for the whole batch.
    """
    _check(config, model, rows, context)
    if sizes is None or config.routing.name != "checkpoint":
        sizes = (rows,)
    name = engine_name(config, model.geometry, rows)
    if name == "cuda":
        return _cuda_engine(config, model, rows, context, pages, progress, sizes)
    if name == "scripted" and pages is not None:
        script = Replies(model.tokenizer, read_replies(Path(config.engine.script or "")))
        return ScriptedEngine(model.geometry, script, rows, context, pages, sizes=sizes, ahead=config.engine.run_ahead)
    if name != "interpreter":
        raise MkError(f"engine={name} has no paged KV", hint="engine=interpreter")
    return MachineEngine(
        model.packed(progress),
        Plan.from_config(config),
        rows,
        context,
        config.engine.numerics,
        config.prefill.chunk,
        config.gpu.interleaving_seed or 0,
        make_router(config.routing, model.geometry, rows),
        config.prefill.name,
        pages,
        sizes,
    )


def _check(config: Config, model: Model, rows: int, context: int) -> None:
    require_engine(config, rows)
    require_positions(model.geometry, context)


def require_positions(geometry: Geometry, context: int) -> None:
    """Raises MkError for a context, in tokens, that the model has no positions for."""
    if context > geometry.max_positions:
        raise MkError(
            f"a context of {context} tokens exceeds the model's max_positions={geometry.max_positions}",
            hint="shorten the prompt, or decode fewer tokens",
        )


def card_plan(config: Config) -> Plan:
    """The kernel's plan. Virtual SMs are for the interpreter: where the gpu group names no card, the plan takes all of
    this one's, and so do its claimers if they were all of the virtual ones."""
    plan = Plan.from_config(config)
    if config.gpu.kind != "cpu":
        return plan
    sms, schedule = DeviceFacts.read().sms, config.schedule
    attention, moe = (
        sms if claimers == config.gpu.sms else claimers or 0
        for claimers in (schedule.attention_claimers, schedule.moe_claimers)
    )
    return dataclasses.replace(plan, n_sm=sms, attention_claimers=attention, moe_claimers=moe)


def _cuda_engine(
    config: Config,
    model: Model,
    rows: int,
    context: int,
    pages: Mapping[str, int] | None,
    progress: Callable[[int, int], None] | None,
    sizes: Sequence[int],
) -> CudaEngine:
    plan = card_plan(config)
    library = build_for(config, model.geometry, plan.splits)
    on_card = config.prefill.name == "triton"  # else PyTorch's prefill reads them too, on the CPU
    return CudaEngine(
        model.packed(progress, "cuda" if on_card else "cpu"),
        library,
        plan,
        rows,
        context,
        config.prefill.chunk,
        windows=config.engine.ring.windows,
        products=config.prefill.products,
        pages=pages,
        sizes=sizes,
        ahead=config.engine.run_ahead,
    )
