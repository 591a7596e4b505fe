"""transformers' own steps as a baseline: they predict what its forward does, and stand in rows beside the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import transformers_decode
from experiments.baselines.transformers_steps import TransformersSteps, load
from experiments.forced_routing import distinct_experts
from mk.compose import load_config
from mk.errors import MkError
from mk.model.greedy_oracle import transformers_state
from mk.model.random_weights import RandomWeights
from mk.results.rows import read_rows
from tests.device_rig import FakeLibrary, fake_device
from tests.interpreter_rig import NANO_GEOMETRY
from tests.test_vllm_baseline import SMALL, rows_of_no_kernel
from tests.tiny_model import tiny_geometry

__all__ = ["fake_device", "rows_of_no_kernel"]

CPU = torch.device("cpu")
TOKENS = torch.randint(1, 293, (100,), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def weights() -> RandomWeights:
    return RandomWeights(
        tiny_geometry(), 5, CPU, std=0.1, qk_scale=3.0
    )  # so much that layers outweigh the tied embedding


@pytest.fixture(scope="module")
def predicted(weights: RandomWeights) -> list[int]:
    """The token after each, by transformers' own forward over all of them, past the window of 64."""
    from transformers.models.cohere2_moe.configuration_cohere2_moe import Cohere2MoeConfig
    from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeForCausalLM

    config = Cohere2MoeConfig(**weights.geometry.to_hf_config())
    assert config.sliding_window == weights.geometry.window_keys == 64
    config._attn_implementation = "eager"
    model = Cohere2MoeForCausalLM(config).float().eval()
    model.load_state_dict(transformers_state(weights.geometry, weights.tensor))
    with torch.no_grad():
        tokens: list[int] = model(TOKENS[None]).logits[0].argmax(-1).tolist()
    return tokens


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_steps_predict_what_forward_does(weights: RandomWeights, predicted: list[int], experts: str) -> None:
    bench = TransformersSteps(load(weights, CPU, torch.float32), weights.geometry, 1, 100, experts, steps=1)
    found = []
    for position, token in enumerate(TOKENS):
        bench.begin(token[None], position)
        bench.run()
        found.append(int(bench.tokens))
    assert found == predicted and len(set(found)) > 8
    fed_back = TransformersSteps(bench.model, weights.geometry, 1, 100, experts, steps=3)
    fed_back.begin(TOKENS[:1], 0)
    for _ in range(3):
        fed_back.run()
    alone = TransformersSteps(bench.model, weights.geometry, 1, 100, experts, steps=1)
    token = int(TOKENS[0])
    for position in range(3):
        alone.begin(torch.tensor([token]), position)
        alone.run()
        token = int(alone.tokens)
    assert int(fed_back.tokens) == token


def test_ids_of_a_table_are_taken_and_recorded(weights: RandomWeights) -> None:
    g = weights.geometry
    table = torch.stack([torch.randperm(g.experts)[: g.top_k] for _ in range(6 * g.layers * 3)])
    table = table.view(6, g.layers, 3, g.top_k)
    model = load(weights, CPU, torch.float32)
    bench = TransformersSteps(model, g, 3, 80, "grouped_mm", table)
    bench.begin(torch.tensor([1, 2, 3]), 70)  # the window is behind it
    for _ in range(6):
        bench.run()
    sparse = list(g.sparse_layers)
    assert torch.equal(bench.taken[:, sparse], table[:, sparse]) and int(bench.position) == 76
    assert distinct_experts(bench.taken, g) == distinct_experts(table, g)
    forced = bench.tokens.clone()
    again = TransformersSteps(model, g, 3, 80, "grouped_mm", table.flip(0))
    again.cache.fill(0.5, 1)
    again.begin(torch.tensor([1, 2, 3]), 70)
    for _ in range(6):
        again.run()
    assert not torch.equal(again.tokens, forced)


def config(folder: Path, *more: str) -> list[str]:
    nano = ["model=nano", "weights=random", "experiment.check_tokens=20", *SMALL, f"run_dir={folder}"]
    return ["experiment=transformers_decode", *nano, "experiment.routings=[uniform]", *more]


@pytest.fixture
def stand_in(fake_device: FakeLibrary, rows_of_no_kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run on a CPU one by one, and a millisecond passes with each."""
    monkeypatch.setattr(transformers_decode, "DEVICE", CPU)
    monkeypatch.setattr(TransformersSteps, "capture", lambda self: None)


@pytest.mark.usefixtures("stand_in")
def test_rows_beside_the_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert transformers_decode.main(load_config(config(tmp_path, "experiment.steps=24"))) == 0
    (path,) = tmp_path.glob("*/rows.jsonl")
    rows = read_rows(path)
    theirs = [row for row in rows if row.engine == "transformers"]
    assert [(row.batch, row.routing, row.steps) for row in theirs] == [(1, "uniform", 24), (2, "uniform", 24)]
    assert all(
        row.checks == {"experts_counted": True} and row.moe_backend in ("grouped_mm", "batched_mm") for row in theirs
    )
    assert all(row.ratio and row.ratio_to in {r.digest for r in rows if r.engine == "cuda"} for row in theirs)
    assert theirs[0].distinct_experts == NANO_GEOMETRY.top_k and all(row.p50_ms == 1.0 for row in theirs)
    assert "transformers / kernel" in capsys.readouterr().out


@pytest.mark.usefixtures("stand_in")
def test_what_cannot_be_measured_is_named_and_the_kernels_rows_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise MkError("transformers' step cannot be captured")

    monkeypatch.setattr(transformers_decode, "measure", fails)
    assert transformers_decode.main(load_config(config(tmp_path))) == 1
    (path,) = tmp_path.glob("*/rows.jsonl")
    assert {row.engine for row in read_rows(path)} == {"cuda"}
    said = capsys.readouterr().out
    assert "batch 2, batched_mm: transformers' step cannot be captured" in said and said.count("missing") == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment.experts=[eager]", "experiment.experts"),
        ("experiment.routings=[]", "experiment.routings is empty"),
        ("weights=checkpoint", "measures random weights"),
    ],
)
def test_what_it_does_not_measure_is_refused(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(MkError, match=message):
        transformers_decode.main(load_config(config(tmp_path, override)))
