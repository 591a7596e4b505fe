"""Prefill's comparison with float32 on a CPU: a sound prefill passes, and each verdict is a no for what it is about."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from experiments import prefill_correctness as experiment
from experiments import prefill_needles, prefill_steps
from experiments.layer_arms import LayerTokens, ReferenceArm, TransformersArm
from experiments.prefill_figures import PARTS, Distance, Flips, PromptData
from experiments.prefill_layers import LayerMeasure, PrefillArm, Yardstick
from experiments.prefill_needles import positions
from experiments.prefill_rig import Rig
from experiments.prefill_steps import InterpreterStep, KernelStep
from experiments.prefill_streams import Streams, Told
from mk.compose import load_config
from mk.errors import MkError
from mk.kernel.build import Library
from mk.kv import KINDS, PageAllocator
from mk.model.geometry import PRESETS
from mk.model.packing import PackedWeights
from mk.model.reference import LayerOutput, Reference, reference_forward
from mk.results.promote import RAW_BYTES, promote
from mk.results.rows import Row, read_rows
from prefill.launch import Launcher
from prefill.triton_prefill import TritonPrefill
from tests.device_rig import fake_build, fake_device
from tests.interpreter_rig import random_tokens, source
from tests.parts_rig import InterpretingLibrary
from tests.prefill_rig import needs_interpreter
from tests.promotion import committed, folder_of, no, repository, require_kept
from tests.tiny_model import tiny_geometry

__all__ = ["committed", "fake_device", "repository"]

G = tiny_geometry(  # a dense layer that sees all keys, a sparse one that sees 64
    layers=2, layer_kinds=("full", "sliding"), mlp_kinds=("dense", "sparse"), rope=(True, True)
)
CPU = torch.device("cpu")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "open_weights", lambda cfg, device: source(G))


def run(folder: Path, *overrides: str) -> int:
    fixed = ["experiment=prefill_correctness", "model=nano", "weights=checkpoint", "gpu=cpu", "engine=interpreter"]
    changed = [f"experiment.{override}" for override in overrides]
    return experiment.main(load_config([*fixed, *changed, f"run_dir={folder}"]))


def rows_of(folder: Path) -> list[Row]:
    return [row for path in folder.glob("*/rows.jsonl") for row in read_rows(path)]


def failed(row: Row) -> list[str]:
    return [name for name, passed in row.checks.items() if not passed]


@needs_interpreter
def test_a_sound_prefill_passes(
    tiny: None,
    committed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    figure: Callable[[str], None],
) -> None:
    """Across the window's edge, in a few pages, packed, cut and continued; with a few of the needles. It is kept."""
    monkeypatch.setattr(prefill_needles, "positions", lambda length, window: sorted({0, length - 1}))
    assert run(tmp_path, "lengths=[1,84]", "cuts=[65]", "small_chunk=50") == 0
    short, long = rows_of(tmp_path)
    assert (short.context, long.context, long.prompt_tokens, long.batch) == ([1], [84], 84, 1)
    measured = {"attention_within_bar", "ffn_within_bar", "kv_within_bar", "needles_returned", "complete"}
    routed = {"router_within_bfloat16", "router_margin"}
    whole = {"logits_within_bar", "next_step_within_bar", "bits_packed", "bits_chunked"}
    assert set(short.checks) == measured | routed | whole
    assert set(long.checks) - set(short.checks) == {
        "scores_are_sharp", "free_router_within_bfloat16", "bits_continued"
    }  # fmt: skip
    assert not failed(short) and not failed(long)
    for row in (short, long):
        for name in ("attention", "ffn", "kv"):
            assert 1e-3 < getattr(row, f"{name}_error") < 0.03 and 0.1 < getattr(row, f"{name}_ratio") < 1.5
        assert 1e-4 < row.logits_error < 0.2 and 1e-4 < row.next_step_error < 0.2
    assert long.logit_std > 3 and long.needles == 4 and long.schedule_hash
    ratios = ", ".join(f"{name} {getattr(long, f'{name}_ratio'):.2f}" for name in ("attention", "ffn", "kv"))
    figure(f"prefill of a tiny model: {ratios} x the distance of bfloat16")
    names = ("attention_error", "ffn_error_bf16", "kv_ratio", "logits_error", "next_step_error_bf16")
    halves = {name: lambda value: value / 2 for name in (*names, "logit_std")}
    more = {
        name: lambda value: value + 1
        for name in ("layer", "needles", "router_flips", "router_margin", "free_flips_bf16")
    }
    require_kept(committed, folder_of(tmp_path), **halves, **more, checks=no)
    told = capsys.readouterr().out
    assert "layer  1, worst so far: attention" in told and "free-running, 84 tokens" in told


@needs_interpreter
def test_a_run_that_is_cut_off_leaves_what_it_measured(
    tiny: None, committed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first of two layers: a row a length, which says that it is not complete, and cannot be promoted."""
    measure = experiment.measure

    def broken(layer: int, *more: object) -> None:
        if layer == 1:
            raise KeyboardInterrupt
        measure(layer, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(experiment, "measure", broken)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "lengths=[1,3]", "cuts=[]", "whole=false")
    rows = read_rows(folder_of(tmp_path) / "rows.jsonl")
    with pytest.raises(MkError, match="failed complete"):
        promote(folder_of(tmp_path), committed / "results", committed)
    assert [(row.context, row.layer, failed(row)) for row in rows] == [([1], 0, ["complete"]), ([3], 0, ["complete"])]


@needs_interpreter
def test_a_checkpoint_is_fed_what_its_layers_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nano, the second layer alone; the reference goes as far as that."""
    fed: list[Tensor] = []
    measure = experiment.measure

    def watched(layer: int, x: Tensor, *more: object) -> None:
        fed.append(x)
        measure(layer, x, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(experiment, "measure", watched)
    assert run(tmp_path, "lengths=[3]", "cuts=[]", "layers=[1]", "whole=false") == 0
    (row,) = rows_of(tmp_path)
    assert row.layer == 1 and "scores_are_sharp" not in row.checks and "logits_within_bar" not in row.checks
    assert len(fed) == 1 and fed[0].shape == (3, 256) and fed[0].dtype == torch.bfloat16


# ---- the references


def test_streams_are_the_references() -> None:
    """Float32's logits and ids are those of a plain forward; bfloat16's are near them, its flips counted."""
    tokens, get = random_tokens(90, seed=2), source(G).tensor
    with torch.inference_mode():
        streams = Streams(G, get, tokens, CPU)
        for layer in range(G.layers):
            streams.layer(layer, ReferenceArm(Reference(G, get)), TransformersArm(G, get, layer, CPU))
        told = streams.told([89, 4])
    trace: list[LayerOutput] = []
    exact = reference_forward(G, get, torch.tensor(tokens), trace=trace)
    for position in (4, 89):
        assert torch.allclose(told.exact[position], exact[position], atol=1e-5)
        assert 1e-3 < told.noise(position) < 0.1
    assert torch.equal(told.ids[1].long(), trace[1].expert_ids)
    wrong = told.ids[:, :50].clone()
    wrong[1, 7] = (wrong[1, 7] + 1) % G.experts
    ours, theirs = told.flips(wrong)
    free, own = (ids[1, :50].sort().values for ids in (told.free_ids, told.ids))
    assert ours == 1 and theirs == int((free != own).any(-1).sum())


# ---- the measures


def test_one_wrong_token_of_many_is_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2000, 64, generator=generator)
    noise = 0.003 * torch.randn(2000, 64, generator=generator)
    yardstick = Yardstick(exact, (exact + noise).bfloat16())
    found = exact + noise.roll(1, 0)
    sound = yardstick.measure(found)
    assert 0.8 < sound.ratio < 1.2 and sound.whole[0] == pytest.approx(sound.whole[1], rel=0.2)
    found[1234] *= 1.02
    spoiled = yardstick.measure(found)
    assert spoiled.token == 1234 and spoiled.ratio > 1.5 and spoiled.whole[0] < 1.1 * sound.whole[0]
    assert yardstick.measure(found[:1000]).ratio < 1.2
    found[5, 0] = torch.nan
    assert not yardstick.measure(found).ratio <= 1.5 and yardstick.measure(found).token == 5


def test_flips_are_counted_with_their_margin() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.99, 1.0], [1.0, 2.0, 3.0, 4.0]])
    exact, other = torch.tensor([[0, 1], [0, 1], [3, 2]]), torch.tensor([[0, 1], [0, 2], [3, 2]])
    ones = torch.ones(3, 4)

    def tokens(choice: Tensor) -> LayerTokens:
        return LayerTokens(ones, ones, ones[None], ones[None], choice)

    measured = LayerMeasure(tokens(exact), logits, tokens(exact))
    flips = measured.flips(tokens(other.int()))
    assert (flips.tested, flips.rounded) == (1, 0) and flips.margin == pytest.approx(0.01 / 3, rel=1e-3)
    assert measured.flips(tokens(exact[:, [1, 0]])).tested == 0  # the order is no matter
    assert measured.flips(tokens(torch.tensor([[0, 3]]))).margin == pytest.approx(2 / 3)


def test_the_raw_data_of_all_layers_and_lengths_is_small_enough_to_keep() -> None:
    cfg = load_config(["experiment=prefill_correctness"])
    layers, lengths = PRESETS["north_mini_code"].layers, cfg.experiment.lengths
    data = PromptData("random", layers, True)
    pair = (0.00123456789, 0.00123456789)
    for layer in range(layers):
        data.take(layer, dict.fromkeys(PARTS, Distance(pair, pair, 8191)), Flips(12, 12, pair[0]), 18, 18, 3.14159265)
    data.take_logits(pair, pair, [pair[0]] * 2 * len(lengths))
    data.take_bits({"bits_packed": True, "bits_chunked": True, "bits_continued": True}, (1000, 1000))
    assert RAW_BYTES / 2 < len(lengths) * len(json.dumps(data.raw, separators=(",", ":"))) < RAW_BYTES


# ---- what is wrong fails


def attention(self: TritonPrefill, layer: int, where: object, sound=TritonPrefill.attention) -> None:
    sound(self, layer, where)
    self.launch.acts.attention.mul_(1.03)


def one_token(self: TritonPrefill, layer: int, where: object, sound=TritonPrefill.attention) -> None:
    sound(self, layer, where)
    self.launch.acts.attention[7] *= torch.nan


def key(self: TritonPrefill, layer: int, where: object, sound=TritonPrefill.attention) -> None:
    """Spoilt after it was used: a page that the next step would read."""
    sound(self, layer, where)
    for pool in self.pools.values():
        pool.mul_(1.02)


def ffn(self: Launcher, layer: int, sound=Launcher.ffn_sum) -> Tensor:
    return sound(self, layer) * 0.97


def router(self: Launcher, layer: int, forced: Tensor | None, sound=Launcher.route) -> Tensor:
    """Another choice than float32's, whatever is replayed."""
    chosen = sound(self, layer, forced)
    return chosen if forced is not None else (chosen + 1) % self.geometry.experts


@needs_interpreter
@pytest.mark.parametrize(
    ("owner", "method", "fault", "verdicts"),
    [
        (TritonPrefill, "attention", attention, ["attention_within_bar"]),
        (TritonPrefill, "attention", one_token, ["attention_within_bar"]),
        (TritonPrefill, "attention", key, ["kv_within_bar"]),
        (Launcher, "ffn_sum", ffn, ["ffn_within_bar"]),
        (Launcher, "route", router, ["router_within_bfloat16", "router_margin"]),
    ],
)
def test_a_layer_that_is_wrong_fails(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner, method: str, fault, verdicts: list[str]
) -> None:
    monkeypatch.setattr(owner, method, fault)
    monkeypatch.setattr(experiment, "find", lambda *args, **options: (1, []))
    assert run(tmp_path, "lengths=[9]", "cuts=[]", "layers=[1]", "whole=false") == 1
    (row,) = rows_of(tmp_path)
    assert failed(row) == verdicts


@needs_interpreter
@pytest.mark.parametrize("wider", [-1, 0, 1])
def test_needles_see_a_window_that_is_off_by_one(wider: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the very token where the key leaves it; prompts in two chunks."""
    weights = PackedWeights.from_state(source(G).tensor, G)
    arm = PrefillArm(Rig.for_prompts(weights, 1, 70, 66))
    monkeypatch.setattr(prefill_needles, "positions", lambda length, window: [0, 3])
    if wider:
        arm.prefill.launch.geometry = dataclasses.replace(G, window=G.window + wider)
    x = torch.randn(70, G.hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    count, lost = prefill_needles.find(arm, 1, x, seed=0)
    tokens = {-1: (63, 66), 0: (), 1: (64, 67)}[wider]
    names = [f"head {3 * i} key {(0, 3)[i]} of 70: 1 tokens from {token} on" for i, token in enumerate(tokens)]
    assert count == 2 and lost == names


def test_needles_stand_at_the_edges() -> None:
    found = positions(8192, 4096)
    assert {0, 1, 63, 64, 65, 4095, 4096, 4097, 8127, 8128, 8190, 8191} <= set(found) and found == sorted(set(found))
    assert positions(1, 4096) == [0] and positions(2, 4096) == [0, 1]


@needs_interpreter
def test_bits_that_depend_on_company_fail(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of a logit where prompts are packed, of a page where one is continued."""
    sound = TritonPrefill.forward

    def forward(self: TritonPrefill, pages: PageAllocator, prompts, expert_ids=None, taken=None) -> Tensor:
        logits = sound(self, pages, prompts, expert_ids, taken)
        if len(prompts) > 1:
            bits = logits[1].view(torch.int32)
            bits[3] ^= 1
        if prompts[0].start:
            pool, page = self.pools[KINDS[0]], int(pages.table[KINDS[0]][0, 0])
            pool[page, 0, 0, 0, :].view(torch.int16)[0] ^= 1
        return logits

    monkeypatch.setattr(TritonPrefill, "forward", forward)
    monkeypatch.setattr(experiment, "replay", lambda *args: (0.0, 0.0))
    monkeypatch.setattr(experiment, "measure", lambda layer, x, exact, rounded, arm, found: take_anything(found))
    assert run(tmp_path, "lengths=[2,5]", "cuts=[3]", "layers=[0]", "small_chunk=4") == 1
    short, long = rows_of(tmp_path)
    assert not failed(short) and set(failed(long)) == {"bits_packed", "bits_chunked", "bits_continued"}


def take_anything(found: dict[int, PromptData]) -> None:
    for of in found.values():
        of.take(0, dict.fromkeys(PARTS, Distance((0.0, 0.0), (0.0, 0.0), 0)), None, 0, 0, None)


@needs_interpreter
@pytest.mark.parametrize("machine", ["interpreter", "cuda"])
def test_the_next_step_reads_what_prefill_left(
    machine: str, fake_device: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near bfloat16's distance, and far from it where the pages are emptied. For the kernel a stand-in interprets the
    device's buffers."""
    cfg = load_config(["experiment=prefill_correctness", "model=nano", "weights=checkpoint", "gpu=cpu"])
    weights = PackedWeights.from_state(source(G).tensor, G)
    tokens, ids = random_tokens(12, seed=4), torch.arange(12)[:, None] % 4 + torch.arange(G.top_k)
    exact = reference_forward(G, source(G).tensor, torch.tensor(tokens), expert_ids=[None, ids])
    told = Told(tokens, torch.stack([torch.zeros_like(ids), ids]).int(), ids, dict(enumerate(exact)), {})
    step: InterpreterStep | KernelStep
    if machine == "interpreter":
        step = InterpreterStep(cfg, weights, 12)
    else:
        library = InterpretingLibrary()
        monkeypatch.setattr(Library, "open", lambda self: library)
        monkeypatch.setattr(prefill_steps, "build_for", lambda cfg, g, splits: fake_build(g, splits))
        step = KernelStep(cfg, weights, 12)
        library.runtime = step.runtime
    near = experiment.replay(step, told, 11)
    assert all(0 < error < 0.1 for error in near)
    sound = step.run

    def emptied(keys: int, token: int, ids: Tensor) -> Tensor:
        for pool in step.rig.pools.values():
            pool.zero_()
        return sound(keys, token, ids)

    monkeypatch.setattr(step, "run", emptied)
    logits, following = experiment.replay(step, told, 11)
    assert logits == near[0] and following > 2 * near[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prefill=torch", "not prefill=torch"),
        ("engine=cuda", "no CUDA device"),
        ("experiment.layers=[5]", r"layer 5 must lie in 0\.\.4"),
        ("experiment.layers=[]", "experiment.layers is empty"),
        ("experiment.lengths=[]", "different lengths of at least 1"),
        ("experiment.lengths=[5,5]", "different lengths of at least 1"),
        ("experiment.cuts=[9000]", "9000 does not cut a prompt of 8192 tokens"),
        ("experiment.small_chunk=0", "small_chunk=0 must be at least 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(override: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fixed = ["experiment=prefill_correctness", "model=nano", "weights=checkpoint", "gpu=cpu", "engine=interpreter"]
    with pytest.raises(MkError, match=message):
        experiment.main(load_config([*fixed, override]))
