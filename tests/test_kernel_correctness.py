"""The layer-by-layer measurement on a CPU: its arms agree where they must, and a layer that is wrong does not pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments import kernel_correctness as experiment
from experiments import layer_arms
from experiments.layer_arms import (
    Arm,
    Contributions,
    History,
    InterpreterArm,
    KernelArm,
    ReferenceArm,
    TransformersArm,
    strip_squares,
)
from experiments.needles import FAR, Needle, passes, place, positions, returned, turned_away, with_needles
from mk.compose import load_config
from mk.errors import MkError
from mk.kernel.build import Library
from mk.kernel.runtime import Runtime
from mk.kv import KVCache
from mk.model.geometry import PRESETS
from mk.model.reference import Reference
from mk.results.rows import Row, read_rows
from mk.splits import SplitPolicy
from tests.device_rig import fake_build, fake_device
from tests.interpreter_rig import GEOMETRY, MAX_BLOCKS, program, tensors, weights
from tests.parts_rig import InterpretingLibrary, cache
from tests.promotion import committed, folder_of, no, repository, require_kept

__all__ = ["committed", "fake_device", "repository"]

CPU = torch.device("cpu")
KEYS = [100, 0, 64, 1]
RUN = [
    "experiment=kernel_correctness",
    "model=nano",
    "weights=checkpoint",
    "gpu=cpu",
    "engine=interpreter",
    "experiment.batches=[[1,0,65],[300]]",
]


def rows_of(folder: Path) -> list[Row]:
    return [row for path in folder.glob("*/rows.jsonl") for row in read_rows(path)]


def random_history(keys: int, seed: int) -> History:
    shape = (GEOMETRY.kv_heads, keys - 1, GEOMETRY.head_dim)
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    return History(k * 0.3, v)


def random_x(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, GEOMETRY.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def interpreter_arm() -> InterpreterArm:
    kv = cache(len(KEYS))
    pages = kv.allocator(len(KEYS), MAX_BLOCKS, seed=2)
    for row, keys in enumerate(KEYS):
        if keys:
            pages.reserve(row, keys)
    return InterpreterArm(weights(), kv, program(len(KEYS)), pages.table, KEYS)


# ---- the arms


@pytest.mark.parametrize("layer", range(GEOMETRY.layers))
@pytest.mark.parametrize("keys", [1, 64, 65, 100])
def test_transformers_layer_in_float32_is_the_reference(layer: int, keys: int) -> None:
    """Full and sliding, dense and sparse, at both sides of the window: the arms are fed the same way."""
    x, history = random_x(1)[0], random_history(keys, seed=layer)
    exact = ReferenceArm(Reference(GEOMETRY, tensors(GEOMETRY))).row(layer, x, history)
    theirs = TransformersArm(GEOMETRY, tensors(GEOMETRY), layer, CPU, torch.float32)
    with torch.no_grad():
        made = theirs.run(x[None], history, exact.expert_ids)
    for found, expected in ((made.attention, exact.attention), (made.ffn, exact.ffn)):
        assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("layer", range(GEOMETRY.layers))
@pytest.mark.parametrize("replay", [False, True])
def test_transformers_layer_over_a_prompt_is_the_reference(
    layer: int, replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of queries, across the window's edge, the router free or given ids."""
    monkeypatch.setattr(layer_arms, "QUERY_BLOCK", 30)
    x, ids = random_x(100), None
    if replay and layer in GEOMETRY.sparse_layers:
        ids = torch.arange(100)[:, None] % 5 + torch.arange(GEOMETRY.top_k)
    exact, logits = ReferenceArm(Reference(GEOMETRY, tensors(GEOMETRY))).run(layer, x, ids)
    theirs = TransformersArm(GEOMETRY, tensors(GEOMETRY), layer, CPU, torch.float32)
    with torch.no_grad():
        found = theirs.run(x, History.none(GEOMETRY, CPU), ids)
    for name in ("attention", "ffn", "keys", "values"):
        ours, wanted = getattr(found, name), getattr(exact, name)
        assert ours.shape == wanted.shape and (ours - wanted).norm() < 1e-5 * wanted.norm(), name
    if logits is None:
        assert found.choice is None and exact.choice is None
    else:
        assert torch.equal(found.choice, exact.choice) and torch.equal(exact.choice[:, 0], logits.argmax(-1))


@pytest.mark.parametrize("layer", range(GEOMETRY.layers))
def test_the_interpreters_layer_is_near_the_reference(layer: int) -> None:
    """In each row, with given ids, at a few roundings to bfloat16."""
    arm, exact = interpreter_arm(), ReferenceArm(Reference(GEOMETRY, tensors(GEOMETRY)))
    x, ids = random_x(len(KEYS)), torch.arange(GEOMETRY.top_k).repeat(len(KEYS), 1)
    for row, keys in enumerate(KEYS):
        if keys:
            history = random_history(keys, seed=row)
            arm.set_history(layer, row, history)
            outputs = exact.row(layer, x[row], history)
            if outputs.expert_ids is not None:
                ids[row] = outputs.expert_ids[0]
    ours = arm.run(layer, x, ids if layer in GEOMETRY.sparse_layers else None)
    for row, keys in enumerate(KEYS):
        if keys:
            expected = exact.row(layer, x[row], random_history(keys, seed=row))
            for found, y in ((ours.attention[row], expected.attention[0]), (ours.ffn[row], expected.ffn[0])):
                assert (found - y).norm() < 2**-5 * y.norm(), (row, keys)


def test_the_kernels_arm_reads_and_writes_what_the_interpreters_does(
    fake_device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the device's buffers, pages and launch, with the interpreter in the kernel's place: the same numbers."""
    library = InterpretingLibrary()
    monkeypatch.setattr(Library, "open", lambda self: library)
    inside = interpreter_arm()
    whole = program(len(KEYS))
    built, pages = fake_build(GEOMETRY, whole.shape.splits), cache(len(KEYS)).pages
    library.runtime = Runtime(built, weights(), pages, MAX_BLOCKS, MAX_BLOCKS * 64)
    outside = KernelArm(library.runtime, whole, inside.table, KEYS)
    x, ids = random_x(len(KEYS)), torch.tensor([[4, 1, 6]]).repeat(len(KEYS), 1)
    for layer in (0, 1, 3):
        found = []
        for arm in (inside, outside):
            for row, keys in enumerate(KEYS):
                if keys:
                    arm.set_history(layer, row, random_history(keys, seed=row))
            sums = arm.run(layer, x, ids if layer in GEOMETRY.sparse_layers else None)
            found.append((sums.attention, sums.ffn, arm.heads, arm.values))
        for ours, theirs in zip(*found, strict=True):
            active = [row for row, keys in enumerate(KEYS) if keys]
            assert torch.equal(ours[active], theirs[active])


def test_strips_have_the_squares_of_their_own_columns() -> None:
    x = random_x(3)
    found = strip_squares(x)
    assert found.shape == (GEOMETRY.hidden // 16, 3)
    assert torch.allclose(found[2, 1], x[1, 32:48].float().square().sum())


# ---- needles


def test_needles_stand_at_the_edges() -> None:
    g, splits = PRESETS["slice"], SplitPolicy(128, 32)
    sliding, full = positions(g, splits, 1, 8192), positions(g, splits, 4, 8192)
    own = 8191
    for wanted in (0, own - 4096, own - 4095, own - 1, 8128, 8127):
        assert wanted in sliding and wanted in full
    assert {4096, 4095} <= set(full)  # a split edge: 256 keys each at this length
    assert positions(g, splits, 1, 1) == [] and positions(g, splits, 1, 2) == [0]
    dealt = [needle for turn in range(passes(g, splits, 1, [8192])) for needle in place(g, splits, 1, 8192, turn)]
    assert [needle.position for needle in dealt] == sliding
    assert {needle.position for needle in dealt if not needle.visible} == {n for n in sliding if n < 8192 - 4096}
    assert all(needle.visible for needle in place(g, splits, 4, 8192, 0))


def test_a_needle_is_returned_to_the_last_bit_and_a_lost_one_is_named() -> None:
    history, queries = random_history(50, seed=1), torch.randn(GEOMETRY.q_heads, GEOMETRY.head_dim)
    needles = [Needle(0, 7, True), Needle(GEOMETRY.group, 3, False)]
    needled = with_needles(history, queries, needles)
    group = GEOMETRY.group
    scores = needled.keys[0].float() @ queries[0] * GEOMETRY.head_dim**-0.5
    assert scores.argmax() == 7 and scores[7] == pytest.approx(60, rel=0.01)
    assert torch.equal(needled.values, history.values) and not torch.equal(needled.keys, history.keys)
    heads = torch.zeros(GEOMETRY.q_heads, GEOMETRY.head_dim)
    heads[0] = history.values[0, 7].float()
    assert returned(heads, needled, needles) == []
    heads[0, 5] *= 1 + 2**-7
    heads[group] = history.values[1, 3].float() * (1 + FAR / 2)
    assert returned(heads, needled, needles) == needles
    away, chosen = turned_away(history, queries, turn=1)
    assert chosen == [1, group + 1]
    scores = away.keys[0].float() @ queries[1] * GEOMETRY.head_dim**-0.5
    assert (scores < -59).all()


# ---- the run


def test_a_run_measures_every_layer(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], figure: Callable[[str], None]
) -> None:
    """And its rows can be kept."""
    assert experiment.main(load_config([*RUN, f"run_dir={tmp_path}"])) == 0
    rows = rows_of(tmp_path)
    assert [(row.layer, row.context) for row in rows] == [(n, c) for n in range(5) for c in ([1, 0, 65], [300])]
    assert all(all(row.checks.values()) for row in rows)
    assert all("scores_are_sharp" in row.checks for row in rows if row.context == [300])
    assert {row.experts_implementation for row in rows} == {"eager"} and rows[0].engine == "interpreter"
    for row in rows:
        assert 0 < row.attention_error < 0.03 and 0 < row.ffn_error < 0.03
        assert row.needles >= 2 and (row.logit_std is None or row.logit_std > 3)
    attention, ffn = (max(getattr(row, f"{name}_ratio") for row in rows) for name in ("attention", "ffn"))
    figure(f"nano, layer by layer: attention at most {attention:.2f}, ffn {ffn:.2f} x the distance of bfloat16")
    errors = {name: lambda value: value / 2 for name in ("attention_error", "ffn_error_bf16", "ffn_ratio", "logit_std")}
    require_kept(committed, folder_of(tmp_path), **errors, needles=lambda n: n + 1, checks=no)
    told = capsys.readouterr().out
    assert "layer  4 rows 1:" in told and "layers that failed" in told


def test_chosen_layers_alone_are_measured_over_the_same_residual(tmp_path: Path) -> None:
    experiment.main(load_config([*RUN, f"run_dir={tmp_path / 'all'}"]))
    experiment.main(load_config([*RUN, "experiment.layers=[2]", f"run_dir={tmp_path / 'one'}"]))
    whole = [row for row in rows_of(tmp_path / "all") if row.layer == 2]
    one = rows_of(tmp_path / "one")
    assert [row.layer for row in one] == [2, 2]
    assert [row.ffn_error for row in one] == [row.ffn_error for row in whole]


class Wrong:
    """An arm with a fault in what the layer gives."""

    def __init__(self, fault: Callable[[InterpreterArm, Contributions], Contributions]) -> None:
        self.fault = fault

    def __call__(self, *args: object) -> Arm:
        arm = InterpreterArm(*args)  # type: ignore[arg-type]
        sound = arm.run
        arm.run = lambda layer, x, ids: self.fault(arm, sound(layer, x, ids))  # type: ignore[method-assign]
        return arm


def three_percent(arm: InterpreterArm, sums: Contributions) -> Contributions:
    return Contributions(sums.attention * 1.03, sums.ffn)


def an_expert_too_much(arm: InterpreterArm, sums: Contributions) -> Contributions:
    return Contributions(sums.attention, sums.ffn + 0.03 * sums.ffn.roll(1, -1))


def nothing(arm: InterpreterArm, sums: Contributions) -> Contributions:
    return Contributions(sums.attention * torch.nan, sums.ffn)


def mixed_heads(arm: InterpreterArm, sums: Contributions) -> Contributions:
    arm.heads = arm.heads + 2**-7 * arm.heads.roll(1, 1)
    return sums


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (three_percent, "attention_within_bar"),
        (an_expert_too_much, "ffn_within_bar"),
        (nothing, "attention_within_bar"),
        (mixed_heads, "needles_returned"),
    ],
)
def test_a_layer_that_is_wrong_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[InterpreterArm, Contributions], Contributions],
    check: str,
) -> None:
    monkeypatch.setattr(experiment, "InterpreterArm", Wrong(fault))
    assert experiment.main(load_config([*RUN, "experiment.layers=[1]", f"run_dir={tmp_path}"])) == 1
    for row in rows_of(tmp_path):
        assert [name for name, passed in row.checks.items() if not passed] == [check]


def test_a_window_that_is_off_by_one_is_seen_by_the_needles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """300 keys of noise hide which of them are seen; a needle just outside of the window does not."""
    read = KVCache.read

    def wider(self: KVCache, blocks: np.ndarray, layer: int, head: int, lo: int, hi: int) -> object:
        k, v = read(self, blocks, layer, head, lo, hi)
        if self.geometry.layer_kinds[layer] == "sliding" and lo == 300 - self.geometry.window_keys:
            outside = read(self, blocks, layer, head, lo - 1, lo)
            k, v = k.copy(), v.copy()
            if not np.isnan(outside[0]).any() and (k[0] @ outside[0][0]) != 0:
                k[0], v[0] = outside[0][0], outside[1][0]  # in the place of the oldest key: the count stays
        return k, v

    monkeypatch.setattr(KVCache, "read", wider)
    status = experiment.main(load_config([*RUN, "experiment.layers=[1]", f"run_dir={tmp_path}"]))
    (row,) = (row for row in rows_of(tmp_path) if row.context == [300])
    assert status == 1 and not row.checks["needles_returned"]
    assert "key 43 of 300" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine=reference", "engine=reference has none"),
        ("engine=cuda", "no CUDA device"),
        ("experiment.layers=[5]", r"layer 5 must lie in 0\.\.4"),
        ("experiment.batches=[]", "experiment.batches is empty"),
        ("experiment.batches=[[0,0]]", "every row is inactive"),
        ("experiment.logit_std=1", "logit_std=1.0 must be at least 3"),
    ],
)
def test_what_cannot_be_measured_is_refused(override: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MkError, match=message):
        experiment.main(load_config([*RUN, override]))
