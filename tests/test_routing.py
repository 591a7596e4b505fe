"""Routing modes: what they promise about the ids, and that the machine takes them."""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mk.config import RoutingConfig
from mk.errors import MkError
from mk.routing import Router, Trace, make_router
from tests.interpreter_rig import GEOMETRY, batch, program, random_tokens
from tests.tiny_model import tiny_geometry

WIDE = tiny_geometry(experts=24, top_k=4)


def router(rows: int, name: str, **values: Any) -> Router:
    made = make_router(RoutingConfig(name, **values), WIDE, rows)
    assert made is not None
    return made


def logits(rows: int, inactive: tuple[int, ...] = ()) -> Any:
    out = np.zeros((rows, WIDE.experts), np.float32)
    out[list(inactive)] = np.nan
    return out


MODES: list[tuple[str, dict[str, Any]]] = [
    ("uniform", {"seed": 3}),
    ("oracle", {"seed": 3}),
    ("correlated", {"seed": 3, "distinct": 9}),
    ("adversarial", {"pattern": "all_same"}),
    ("adversarial", {"pattern": "all_different"}),
]


def test_the_checkpoint_decides_for_itself() -> None:
    assert make_router(RoutingConfig("checkpoint"), WIDE, 4) is None


@pytest.mark.parametrize(("name", "values"), MODES)
def test_ids_are_valid_fresh_and_the_same_for_every_sm(name: str, values: dict[str, Any]) -> None:
    route, again = router(4, name, **values), router(4, name, **values)
    seen = set()
    for step in range(6):
        for layer in WIDE.sparse_layers:
            ids = route(layer, step, logits(4))
            assert ids.shape == (4, 4) and ids.min() >= 0 and ids.max() < WIDE.experts
            assert all(len(set(row)) == 4 for row in ids.tolist())
            assert (ids == again(layer, step, logits(4))).all()
            seen.add(tuple(sorted(ids[0].tolist())))
    assert len(seen) > 15  # of 24 draws: neither layers nor steps repeat each other


def test_uniform_rows_do_not_see_each_other_and_cover_all_experts() -> None:
    route = router(8, "uniform", seed=1)
    counts = np.zeros(WIDE.experts)
    for step in range(150):
        ids = route(1, step, logits(8))
        assert (route(1, step, logits(8, inactive=(0, 3)))[5] == ids[5]).all()
        assert (router(6, "uniform", seed=1)(1, step, logits(6)) == ids[:6]).all()
        np.add.at(counts, ids.ravel(), 1)
    share = counts / counts.sum() * WIDE.experts  # 200 expected each, standard deviation 13
    assert share.min() > 0.7 and share.max() < 1.3


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_seeds_differ(seed: int) -> None:
    a, b = router(4, "uniform", seed=seed), router(4, "uniform", seed=seed + 1)
    assert any((a(1, step, logits(4)) != b(1, step, logits(4))).any() for step in range(3))


@pytest.mark.parametrize("distinct", [4, 5, 11, 16])
def test_correlated_rows_touch_exactly_the_stated_number(distinct: int) -> None:
    route = router(4, "correlated", seed=0, distinct=distinct)
    for step in range(20):
        assert len(np.unique(route(2, step, logits(4)))) == distinct


def test_correlated_rows_that_are_left_touch_what_they_can() -> None:
    route = router(4, "correlated", seed=0, distinct=9)
    ids = route(2, 0, logits(4, inactive=(1, 2)))
    assert len(np.unique(ids[[0, 3]])) == 8
    ids = route(2, 0, logits(4, inactive=(0,)))
    assert len(np.unique(ids[1:])) == 9


def test_adversarial_rows_share_everything_or_nothing() -> None:
    same = router(4, "adversarial", pattern="all_same")(1, 0, logits(4))
    assert len(np.unique(same)) == 4
    assert len(np.unique(router(6, "adversarial", pattern="all_different")(1, 0, logits(6)))) == 24
    crowded = router(8, "adversarial", pattern="all_different")(1, 0, logits(8))  # 32 choices of 24 experts
    assert len(np.unique(crowded)) == 24


@pytest.mark.parametrize("name", ["uniform", "adversarial"])
def test_the_machine_takes_the_ids_of_a_mode_and_replays_them(name: str, tmp_path: Path) -> None:
    config = RoutingConfig(name, **({"seed": 5} if name == "uniform" else {"pattern": "all_same"}))
    prompts = [random_tokens(n, seed=n) for n in (70, 0, 9)]
    run = batch(program(3), prompts, router=make_router(config, GEOMETRY, 3))
    outputs = [run.step() for _ in range(3)]
    plain = batch(program(3), prompts).step()
    assert any((outputs[0].expert_ids[layer] != plain.expert_ids[layer]).any() for layer in GEOMETRY.sparse_layers)
    assert all((ids[1] == -1).all() for ids in outputs[0].expert_ids.values())

    Trace.record([out.expert_ids for out in outputs]).save(tmp_path / "trace.npz")
    replay = make_router(RoutingConfig("replay", path=str(tmp_path / "trace.npz")), GEOMETRY, 3)
    again = batch(program(3), prompts, router=replay)
    for out in outputs:
        step = again.step()
        assert (step.tokens == out.tokens).all() and (step.logits[[0, 2]] == out.logits[[0, 2]]).all()
        assert all((step.expert_ids[layer] == ids).all() for layer, ids in out.expert_ids.items())
    with pytest.raises(MkError, match="the trace ends after 3 steps"):
        again.step()


def ids_of_a_trace() -> np.ndarray:
    """int16 [5 steps, layers, 2 rows, 4]"""
    return np.broadcast_to(np.arange(4, dtype=np.int16), (5, len(WIDE.sparse_layers), 2, 4)).copy()


def test_ids_that_no_router_gives_are_refused_before_anything_runs(tmp_path: Path) -> None:
    """With the first place that has them; an inactive row is all -1, and any ids will do for it."""
    path = tmp_path / "trace.npz"
    layers = np.array(WIDE.sparse_layers)

    def load(ids: object, layers: object = layers) -> Trace:
        np.savez(path, ids=ids, layers=layers)
        return Trace.load(path)

    ids = ids_of_a_trace()
    inactive = ids.copy()
    inactive[:, :, 1] = -1
    assert (load(inactive).ids == inactive).all()
    below, twice = "less than 0", "twice the same"
    for wrong, what in (((1, -5, 2, 3), below), ((-1, 1, 2, 3), below), ((2, 1, 0, 2), twice)):
        edited = ids.copy()
        edited[3, 1, 1] = wrong
        with pytest.raises(MkError, match=f"step 3, layer {layers[1]}, row 1 has {what}: .{wrong[0]}, {wrong[1]}"):
            load(edited)
    for cast in (np.float64, np.str_, bool):
        with pytest.raises(MkError, match=r"routing\.path=.*: ids are .*, not whole numbers"):
            load(ids.astype(cast))
        with pytest.raises(MkError, match=r"routing\.path=.*: layers are .*, not whole numbers"):
            load(ids, layers.astype(cast))
    with pytest.raises(MkError, match="for layers of shape"):
        load(ids, np.array(3))
    with pytest.raises(MkError, match="is a folder"):
        Trace.load(tmp_path)


def test_a_trace_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"

    def refused(message: str, rows: int = 2, steps: int = 0) -> None:
        with pytest.raises(MkError, match=message):
            make_router(RoutingConfig("replay", path=str(path)), WIDE, rows, steps)

    refused("no such file")
    path.write_text("nothing of the kind")
    refused("is not a routing trace")
    np.savez(path, other=np.zeros(3))
    refused("is not a routing trace")
    whole = path.read_bytes()
    damaged = whole[:60] + b"\xff" * 40 + whole[100:]
    for broken in (b"", b"PK\x03\x04 and nothing else", whole[: len(whole) // 2], damaged):
        path.write_bytes(broken)
        refused("is not a routing trace")
    np.savez_compressed(path, ids=np.arange(4000), layers=np.arange(4000))
    packed, raised = path.read_bytes(), set()
    for at in range(0, 600, 20):  # headers, and what is deflated
        path.write_bytes(packed[:at] + bytes(20) + packed[at + 20 :])
        refused("is not a routing trace|ids of shape")
        try:
            with np.load(path) as arrays:
                _ = arrays["layers"], arrays["ids"]
        except Exception as error:
            raised.add(type(error))
    assert {zlib.error, zipfile.BadZipFile} <= raised and len(raised) > 3
    for mark, place in ((1, 6), (99, 8)):  # an encrypted entry, a method that nobody knows
        broken = bytearray(packed)
        for at in (place, place + 2):
            for entry in re.finditer(b"PK\x03\x04" if at == place else b"PK\x01\x02", packed):
                broken[entry.start() + at] = mark
        path.write_bytes(broken)
        refused("is not a routing trace")
    ids = ids_of_a_trace()
    Trace(WIDE.sparse_layers, ids[:, :-1]).save(path)
    refused("ids of shape")
    Trace(tuple(layer + 1 for layer in WIDE.sparse_layers), ids).save(path)
    refused("the trace has layers")
    Trace(WIDE.sparse_layers, ids[..., :3]).save(path)
    refused("3 ids a row")
    Trace(WIDE.sparse_layers, ids + 24).save(path)
    refused("up to 27")
    Trace(WIDE.sparse_layers, ids).save(path)
    refused("2 rows, the batch 3", rows=3)
    refused("the trace has 5 steps, this run may take 6", steps=6)
    assert make_router(RoutingConfig("replay", path=str(path)), WIDE, 2, steps=5)


@pytest.mark.parametrize("distinct", [3, 17])
def test_an_impossible_number_of_experts_is_refused(distinct: int) -> None:
    with pytest.raises(MkError, match=rf"routing.distinct={distinct} must lie in 4..16"):
        router(4, "correlated", seed=0, distinct=distinct)


def test_a_model_without_experts_has_no_routing() -> None:
    dense = tiny_geometry(mlp_kinds=("dense",) * 5)
    with pytest.raises(MkError, match="needs a layer with experts"):
        make_router(RoutingConfig("uniform", seed=0), dense, 1)
