"""Which engine a configuration asks for, and making it; what stands in the way of the kernel is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from mk.config import Config
from mk.device import DeviceFacts
from mk.engines.cuda import CudaEngine
from mk.engines.interpreted import MachineEngine
from mk.engines.protocol import Engine, PagedEngine
from mk.engines.reference import ReferenceEngine
from mk.engines.scripted import Replies, ScriptedEngine, read_replies
from mk.errors import MkError
from mk.kernel.build import build_for, is_built
from mk.kernel.step_params import MAX_ROWS
from mk.model.geometry import Geometry
from mk.model.opening import Model
from mk.programs import Plan
from mk.routing import make_router


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
