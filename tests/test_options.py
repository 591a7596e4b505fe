"""Every option of every config group changes what its group is for: no two options of a group come to the same.

What an option comes to is looked up where code decides by it: descriptors as they are lowered, expert ids as they are
drawn, the class that executes, tokens, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.benchmarks import open_benchmark
from experiments import decode_throughput, quickstart, vllm_serve
from experiments.agents.programs import PROGRAMS, Place
from experiments.agents.trace import Trace as AgentTrace
from mk.compose import experiment_main, load_config
from mk.config import GROUPS, Config, group_options
from mk.device import DeviceFacts
from mk.engines.choice import make_engine, make_paged_engine
from mk.errors import MkError
from mk.kernel.build import defines_of
from mk.model.opening import Model, open_model
from mk.programs import Plan
from mk.results.loggers import make_logger
from mk.routing import Trace, make_router
from mk.sampling import sample_row
from mk.schedule.sm_map import SmMap
from mk.server.launch import build_service
from tests.interpreter_rig import NANO_GEOMETRY
from tests.test_config import COMPANIONS

ROWS, PAGES = 2, {"full": 8, "sliding": 8}


def opened(config: Config, folder: Path) -> Model:
    return open_model(config.model, config.weights, folder)


def descriptors(config: Config, folder: Path) -> Hashable:
    """The hash of nano's step."""
    return Plan.from_config(config).lower(NANO_GEOMETRY, config.batch.size, 256).schedule_hash


def geometry(config: Config, folder: Path) -> Hashable:
    return opened(config, folder).geometry


def values(config: Config, folder: Path) -> Hashable:
    """Of one matrix."""
    model = opened(config, folder)
    return model.weights_label, model.source.tensor("model.layers.0.self_attn.q_proj.weight").float().sum().item()


def expert_ids(config: Config, folder: Path) -> Hashable:
    """Of two rows in every sparse layer; an oracle's are known to the kernel before the step."""
    router = make_router(config.routing, NANO_GEOMETRY, ROWS)
    logits = np.zeros((ROWS, NANO_GEOMETRY.experts), np.float32)
    ids = None if router is None else tuple(router(layer, 0, logits).tobytes() for layer in NANO_GEOMETRY.sparse_layers)
    return ids, defines_of(config)


def prompts(config: Config, folder: Path) -> Hashable:
    return tuple(map(len, quickstart._first_batch(config, opened(config, folder))))


def card(config: Config, folder: Path) -> Hashable:
    """What a machine with an H200 says of it."""
    try:
        DeviceFacts("NVIDIA H200", 132, 227 * 1024, (9, 0)).require(config.gpu)
    except MkError as error:
        return str(error)
    return "this card"


def executes(config: Config, folder: Path) -> Hashable:
    """The class of the engine; what is said where it cannot be here."""
    model = opened(config, folder)
    try:
        if config.engine.name == "scripted":
            return type(make_paged_engine(config, model, ROWS, 128, PAGES))
        return type(make_engine(config, model, ROWS, 128))
    except MkError as error:
        return str(error)


def prefills(config: Config, folder: Path) -> Hashable:
    return type(make_paged_engine(config, opened(config, folder), ROWS, 128, PAGES)._prefill)  # type: ignore[attr-defined]


def service(config: Config, folder: Path) -> Hashable:
    """The context that it has; what is said where nano has less."""
    try:
        return build_service(config, opened(config, folder)).context
    except MkError as error:
        return str(error)


def tokens(config: Config, folder: Path) -> Hashable:
    """Of a sequence's first 32 positions, from logits of which few are likely."""
    logits = np.random.default_rng(0).normal(size=512).astype(np.float32) * 2
    (params,) = decode_throughput.configured_sampling(config, 1)
    return tuple(sample_row(logits, params, position) for position in range(32))


def benchmark(config: Config, folder: Path) -> Hashable:
    """What is to be scored, or which data it lacks."""
    try:
        return type(open_benchmark(config.benchmark, folder))
    except MkError as error:
        return str(error)


def beside(config: Config, folder: Path) -> Hashable:
    """What is said without an installation, and what an engine would be started with."""
    with pytest.raises(MkError) as caught:
        vllm_serve.main(config)
    vllm = config.baseline.vllm
    return str(caught.value), vllm and (vllm.kv, vllm.gpu_memory)


def agent(config: Config, folder: Path) -> Hashable:
    """How it is run, or what is sent in its place."""
    if config.agent.name in PROGRAMS:
        (folder / "home").mkdir()
        return repr(PROGRAMS[config.agent.name](Place(folder, folder / "home", "http://a/v1", "m", 64), "Do it.", 9.0))
    return None if config.agent.trace is None else repr(AgentTrace.load(Path(config.agent.trace)))


def sinks(config: Config, folder: Path) -> Hashable:
    logger = make_logger(config, folder)
    logger.close(failed=False)
    return type(logger), (folder / "wandb").exists()


def dispatched(config: Config, folder: Path) -> Hashable:
    main = experiment_main(config.experiment.name)
    return main.__module__, main.__name__, repr(config.experiment)


COMES_TO: dict[str, Callable[[Config, Path], Hashable]] = {
    "model": geometry,
    "weights": values,
    "schedule": descriptors,
    "wave_order": descriptors,
    "placement": descriptors,
    "routing": expert_ids,
    "batch": prompts,
    "gpu": card,
    "engine": executes,
    "prefill": prefills,
    "server": service,
    "sampling": tokens,
    "benchmark": benchmark,
    "baseline": beside,
    "agent": agent,
    "logger": sinks,
    "experiment": dispatched,
}
# options that come to what another one does: auto takes the kernel where there is a card and a built library
ALIKE = {"engine": {"auto": "interpreter"}}


def overrides(group: str, option: str, folder: Path) -> list[str]:
    if (group, option) == ("wave_order", "custom"):
        *rest, last, end = load_config().wave_order.waves
        return [f"wave_order.waves=[{','.join([*rest, end, last])}]"]
    if (group, option) == ("routing", "replay"):
        ids, path = np.tile(np.arange(NANO_GEOMETRY.top_k) + 1, (ROWS, 1)), folder / "routing.npz"
        Trace.record([dict.fromkeys(NANO_GEOMETRY.sparse_layers, ids)]).save(path)
        return [f"routing.path={path}"]
    if (group, option) == ("engine", "scripted"):
        (folder / "replies.json").write_text('[{"when": "Hi", "say": "Hello"}]')
        return [f"engine.script={folder / 'replies.json'}"]
    if (group, option) == ("placement", "sm_map"):
        path, far = folder / "sm_map.json", [9.0, 7.0, 5.0, 1.0]  # the last SM is the nearest to all
        SmMap("cpu", tuple(tuple(max(a, b) * (a is not b) for b in far) for a in far)).save(path)
        return [f"placement.path={path}"]
    own: Sequence[str] = {"schedule": ["gpu=h200"], "baseline": ["experiment=vllm_serve"]}.get(group, [])
    if group == "prefill":
        own = ["engine=interpreter", "engine.numerics=kernel"]
    return [*own, *COMPANIONS.get(f"{group}={option}", [])]


def test_every_group_is_looked_at() -> None:
    assert COMES_TO.keys() == set(GROUPS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the engine would be the card's")
@pytest.mark.parametrize("group", GROUPS)
def test_every_option_changes_what_its_group_is_for(group: str, tmp_path: Path) -> None:
    found: dict[str, Hashable] = {}
    for option in group_options(group):
        folder = tmp_path / option
        folder.mkdir()
        config = load_config([f"{group}={option}", *overrides(group, option, folder)])
        found[option] = COMES_TO[group](config, folder)
    alike = ALIKE.get(group, {})
    assert len(found) >= 2 and all(found[option] == found[other] for option, other in alike.items())
    distinct = {option: of for option, of in found.items() if option not in alike}
    assert len(set(distinct.values())) == len(distinct), distinct
