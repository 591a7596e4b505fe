"""The main job: what it prints, writes and compares, and how it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.prompts import sample_prompts, text_prompts
from experiments.quickstart import main
from mk.compose import load_config
from mk.config import config_hash
from mk.errors import MkError
from mk.graph import StepShape
from mk.interpreter import Machine
from mk.isa import ISA, Word
from mk.model import greedy_oracle
from mk.model.geometry import SLOT_BYTES
from mk.model.greedy_oracle import Divergence, GreedyOracle
from mk.model.opening import NANO, Model, open_model
from mk.model.packing import PackedWeights
from mk.model.reference import greedy_decode
from mk.model.tokenizer import load_tokenizer
from mk.results.recompute import different
from mk.results.rows import read_raw, read_rows
from mk.schedule.lower import lower
from mk.schedule.picture import draw_schedule, task_bytes
from tests.interpreter_rig import GEOMETRY, WAVE_ORDERS, source

Run = tuple[int, str, str, Path]


def run_folder(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


def quickstart(root: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> Run:
    """(exit status, stdout, stderr, run folder) of one run."""
    config = load_config([f"run_dir={root / 'runs'}", *overrides])
    status = main(config)
    out, err = capsys.readouterr()
    return status, out, err, run_folder(root / "runs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: `weights=random` makes them."""
    path = tmp_path_factory.mktemp("tiny")
    source().write_folder(path)
    return path


def tiny(folder: Path, *more: str) -> list[str]:
    return [f"model.path={folder}", "weights=random", "experiment.new_tokens=6", "experiment.ragged=null", *more]


def test_the_default_run_equals_transformers_at_batch_1_and_in_a_ragged_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([f"run_dir={tmp_path / 'runs'}"])
    status, out, err, folder = quickstart(tmp_path, capsys)
    assert status == 0 and err == ""
    assert "equal to transformers' greedy decode: 64/64 tokens, rows 1/1" in out
    assert "equal to transformers' greedy decode: 256/256 tokens, rows 4/4" in out
    assert "weights: checkpoint" in out and "  |     return" in out
    one, ragged = read_rows(folder / "rows.jsonl")
    assert (one.batch, one.equal_tokens, ragged.batch, ragged.equal_tokens) == (1, 64, 4, 256)
    window = 256
    assert any(context < window <= context + 64 for context in ragged.context)
    assert any(context > window for context in ragged.context)
    for row in (one, ragged):
        assert row.engine == "interpreter" and row.weights == "checkpoint" and row.dtype == "float32"
        assert row.checks == {"equal_to_transformers": True, "schedule_verified": True}
        assert row.config_hash == config_hash(config) and row.tok_s and row.tok_s > 0
    assert one.distinct_experts == 4 and ragged.distinct_experts and 4 < ragged.distinct_experts <= 16
    assert one.schedule_hash != ragged.schedule_hash and f"schedule {one.schedule_hash}" in out
    names = {path.name for path in folder.iterdir()}
    files = {"routing.npz", "routing-ragged.npz", "schedule.png", "schedule-ragged.png"}
    assert names == {"config.yaml", "meta.json", "rows.jsonl", "rows.csv", "raw.jsonl", *files}
    assert f"config_hash: {config_hash(config)}" in (folder / "config.yaml").read_text()


def test_a_wrong_token_is_an_error_that_says_where(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine computes with a damaged o_proj of the last layer; transformers has the true weights."""
    pack = PackedWeights.from_state

    def damaged(*args: Any, **options: Any) -> PackedWeights:
        packed = pack(*args, **options)
        entry = packed.layout.entry("o", GEOMETRY.layers - 1)
        packed.slots[entry.first_slot : entry.first_slot + entry.slots] *= -2
        return packed

    monkeypatch.setattr(PackedWeights, "from_state", damaged)
    overrides = tiny(folder, "batch.size=2", "experiment.prompts=[abc,'x=1']")
    status, out, err, run = quickstart(tmp_path, capsys, *overrides)
    assert status == 1 and "differs from transformers' greedy decode" in out
    assert "error: row " in err and "new token " in err and "logits there differ by " in err
    (row,) = read_rows(run / "rows.jsonl")
    assert row.checks["equal_to_transformers"] is False
    assert row.equal_tokens is not None and row.equal_tokens < 12


def test_random_weights_say_so_and_are_compared_with_the_same_weights(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _, run = quickstart(tmp_path, capsys, *tiny(folder, "batch.size=3", "batch.contexts=[0,70,9]"))
    assert status == 0 and out.count("weights: random") == 2
    assert "batch 3, context 0, 70, 9" in out and "row 0" not in out and "row 2, context 9" in out
    assert "equal to transformers' greedy decode: 12/12 tokens, rows 2/2" in out
    (row,) = read_rows(run / "rows.jsonl")
    assert row.weights == "random" and row.context == [0, 70, 9] and row.batch == 3


def test_where_transformers_does_not_fit_the_reference_stands_in_and_the_row_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy_oracle, "_LARGEST", 0)
    status, out, _, run = quickstart(tmp_path, capsys, *tiny(folder))
    assert status == 0 and "equal to the PyTorch reference's greedy decode: 6/6 tokens" in out
    (row,) = read_rows(run / "rows.jsonl")
    assert row.checks == {"equal_to_reference": True, "schedule_verified": True}


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("sampling=top_p", "sampling=top_p draws tokens"),
        ("routing=uniform", "routing=uniform replaces"),
        ("experiment.check=false", "experiment.check=false"),
    ],
)
def test_what_has_no_one_right_answer_is_not_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, why: str
) -> None:
    status, out, _, run = quickstart(tmp_path, capsys, *tiny(folder, override))
    assert status == 0 and f"not compared with a greedy decode: {why}" in out
    (row,) = read_rows(run / "rows.jsonl")
    assert row.checks == {"schedule_verified": True} and row.equal_tokens is None


def test_tokens_of_an_engine_that_rounds_may_differ_where_bfloat16_decides(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the kernel's numerics are as they come; then a difference is made up, inside the noise and beyond it."""
    more = ("batch.size=2", "experiment.prompts=[abc,'x=1']", "engine.numerics=kernel")
    status, out, err, run = quickstart(tmp_path / "a", capsys, *tiny(folder, *more))
    (row,) = read_rows(run / "rows.jsonl")
    assert status == 0 and "error" not in err and row.dtype == "bfloat16"
    assert row.checks == {"within_noise_of_transformers": True, "schedule_verified": True}
    assert row.differs_at is not None and len(row.differs_at) == 2
    sound, compare = GreedyOracle.noise, GreedyOracle.compare

    def other(self: Any, row: int, prompt: Any, tokens: list[int], eos: Any) -> Any:
        changed = [*tokens[:3], tokens[3] ^ 1, *tokens[4:]] if row else tokens
        return [d for d in compare(self, row, prompt, changed, eos) if d.index <= 3]

    monkeypatch.setattr(GreedyOracle, "compare", other)
    for factor, passes in ((1e9, True), (0, False)):
        monkeypatch.setattr(GreedyOracle, "noise", lambda *args, by=factor: sound(*args) * by)
        status, out, err, run = quickstart(tmp_path / str(passes), capsys, *tiny(folder, *more))
        (row,) = read_rows(run / "rows.jsonl")
        assert row.checks["within_noise_of_transformers"] is passes and status == int(not passes)
        assert row.differs_at is not None and row.differs_at[1] == 3
        assert row.widest_margin is not None and row.margin_noise is not None
        assert ("bfloat16 may change that by" in out) is passes and ("error: row 1, new token 3" in err) is not passes
        whose = "with transformers' forced onto the row's own"
        assert f"row 1, of the 2 tokens after it, {whose}, none differs" in out


def test_a_later_wrong_token_fails_behind_a_first_one_that_rounding_explains(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(self: Any, row: int, prompt: Any, tokens: list[int], eos: Any) -> list[Divergence]:
        return [Divergence(row, 1, tokens[1], 7, 1e-3), Divergence(row, 4, tokens[4], 8, 0.5)]

    monkeypatch.setattr(GreedyOracle, "compare", two)
    for most, passes in ((1.0, True), (1e-2, False)):
        monkeypatch.setattr(GreedyOracle, "noise", lambda *args, most=most: most)
        status, out, err, run = quickstart(tmp_path / str(passes), capsys, *tiny(folder, "engine.numerics=kernel"))
        (row,) = read_rows(run / "rows.jsonl")
        assert row.checks["within_noise_of_transformers"] is passes and status == int(not passes)
        assert (row.differs_at, row.equal_tokens, row.widest_margin, row.margin_noise) == ([1], 1, 0.5, most)
        assert "row 0, new token 1: " in out and "5/6" not in out and "1/6 tokens, rows 0/1" in out
        forced = "row 0, of the 4 tokens after it, with transformers' forced onto the row's own, "
        later = f"{forced}1 different, most of all new token 4: "
        assert (later in out) is passes and (f"error: {later}" in err) is not passes
        raw = read_raw(run / "raw.jsonl")[row.raw_sha256 or ""]
        assert list(different(row, raw)) == [] and len(raw["differences"]) == len(raw["noise"]) == 2


def test_the_noise_is_that_of_transformers_in_bfloat16(folder: Path, tmp_path: Path) -> None:
    cfg = load_config(tiny(folder))
    oracle = GreedyOracle(open_model(cfg.model, cfg.weights, tmp_path))
    prompt = [5, 9, 70, 3]
    tokens = oracle.decode(prompt, 8, [])
    noise = oracle.noise(prompt, tokens)
    exact = oracle.noise(prompt, tokens[:1])  # of the first position alone
    assert 0 <= exact <= noise and 0 < noise < 0.1


def test_the_trace_of_a_run_is_replayed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, recorded = quickstart(tmp_path / "a", capsys, *tiny(folder, "batch.size=2"))
    replay = ("batch.size=2", "routing=replay", f"routing.path={recorded / 'routing.npz'}")
    *_, again = quickstart(tmp_path / "b", capsys, *tiny(folder, *replay))
    with np.load(recorded / "routing.npz") as a, np.load(again / "routing.npz") as b:
        assert a["ids"].shape == (5, len(GEOMETRY.sparse_layers), 2, GEOMETRY.top_k)
        assert (a["ids"] == b["ids"]).all()
    (tmp_path / "c").mkdir()
    with pytest.raises(MkError, match="the trace has 5 steps, this run may take 6"):
        quickstart(tmp_path / "c", capsys, *tiny(folder, *replay, "experiment.new_tokens=7"))
    assert not list((tmp_path / "c").iterdir())


def test_a_replay_leaves_the_ragged_batch_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, recorded = quickstart(tmp_path / "a", capsys, *tiny(folder, "experiment.ragged=[9,20]"))
    assert (recorded / "routing-ragged.npz").exists()
    replay = ("experiment.ragged=[9,20]", "routing=replay", f"routing.path={recorded / 'routing.npz'}")
    status, out, _, again = quickstart(tmp_path / "b", capsys, *tiny(folder, *replay))
    assert status == 0 and "no ragged batch: the trace of routing=replay is of a single row" in out
    assert [row.batch for row in read_rows(again / "rows.jsonl")] == [1]


@pytest.mark.parametrize("stop", [MkError("numbers are not finite"), KeyboardInterrupt()])
def test_whatever_breaks_a_stream_off_its_line_ends(
    stop: BaseException,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, seen = Machine.step, []

    def third(*args: Any) -> Any:
        seen.append(1)
        if len(seen) == 3:
            raise stop
        return step(*args)

    monkeypatch.setattr(Machine, "step", third)
    with pytest.raises(type(stop)):
        quickstart(tmp_path, capsys, *tiny(folder))
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("  | ") and out.endswith("\n")


def test_the_reference_engine_needs_no_schedule(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(Machine, "step")
    status, out, _, run = quickstart(tmp_path, capsys, *tiny(folder, "engine=reference"))
    assert status == 0 and "engine: reference, float32\n" in out and "equal to transformers'" in out
    (row,) = read_rows(run / "rows.jsonl")
    assert row.engine == "reference" and row.schedule_hash is None
    assert not list(run.glob("schedule*"))


def test_one_token_is_prefill_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _, run = quickstart(tmp_path, capsys, *tiny(folder, "experiment.new_tokens=1"))
    assert status == 0 and "equal to transformers' greedy decode: 1/1 tokens" in out
    (row,) = read_rows(run / "rows.jsonl")
    assert row.tok_s is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment.new_tokens=0"], "experiment.new_tokens=0 must be at least 1"),
        (["engine=cuda"], "engine=cuda: "),
        (["model.path=/does/not/exist"], "no such folder"),
        (["experiment.prompt=''"], "prompt 0 is empty"),
        (["batch.size=3", "experiment.prompts=[a,b]"], r"experiment.prompts has 2 entries for batch.size=3"),
        (["batch.size=2", "batch.contexts=[0,0]"], "every row is inactive"),
        (["experiment.ragged=[5,1020]"], "a context of 1025 tokens exceeds the model's max_positions=1024"),
        (["sampling.seed=-1"], "sampling.seed=-1 must be an unsigned 64-bit number"),
        (["sampling.temperature=nan"], "sampling.temperature=nan is not a finite number"),
        (["engine.attention.split_keys=100"], "engine.attention.split_keys=100 is not"),
        (["engine.attention.max_splits=0"], "engine.attention.max_splits=0 must"),
        (["wave_order=custom", "wave_order.waves=[qkv,router]"], "wave_order.waves leaves out topk"),
        (["batch.contexts=[1020]"], "a context of 1025 tokens exceeds the model's max_positions=1024"),
        (["batch.contexts=[1000000000]"], "a context of 1000000000 tokens exceeds the model's max_positions=1024"),
        (["schedule=work_stealing", "schedule.moe_claimers=9", "placement=round_robin"], "moe_claimers=9 must"),
        (["routing=replay", "routing.path=/does/not/exist"], "no such file"),
        (["engine=reference", "engine.numerics=kernel"], "computes in float32"),
    ],
)
def test_a_wrong_input_is_refused_before_there_is_a_run_folder(
    folder: Path, tmp_path: Path, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(MkError, match=message) as caught:
        main(load_config([f"run_dir={tmp_path / 'runs'}", *tiny(folder, *overrides)]))
    assert caught.value.hint
    assert not (tmp_path / "runs").exists()


def test_prompts_have_the_lengths_that_are_asked_for() -> None:
    tokenizer = load_tokenizer(NANO)
    prompts = sample_prompts(tokenizer, [24, 0, 5000, 300])
    assert [len(prompt) for prompt in prompts] == [24, 0, 5000, 300]
    assert prompts[0] != prompts[3][:24] and prompts[0][0] == prompts[3][0] == tokenizer.bos
    assert text_prompts(tokenizer, ["a = 1"], 3) == [tokenizer.encode("a = 1", bos=True)] * 3


def test_the_oracle_names_the_first_difference_and_its_margin(folder: Path) -> None:
    model = Model(source(), folder, load_tokenizer(folder))
    prompt = list(range(40, 110))
    right = greedy_decode(GEOMETRY, source().tensor, prompt, 8)
    for oracle in (GreedyOracle(model), reference_oracle(model)):
        assert oracle.decode(prompt, 8, ()) == right
        assert oracle.compare(2, prompt, right, ()) == []
        wrong = [*right[:5], (right[5] + 1) % GEOMETRY.vocab, *right[6:]]
        found, *_ = oracle.compare(2, prompt, wrong, ())
        assert (found.row, found.index, found.got, found.expected) == (2, 5, wrong[5], right[5])
        assert 0 < found.margin < 10
        (early,) = oracle.compare(0, prompt, right, [right[3]])  # the oracle stops at what it takes for the end
        assert early.expected is None and early.index == 4


def test_after_its_first_difference_a_row_is_followed_on_its_own_tokens(folder: Path) -> None:
    """What is decoded rightly after a wrong token is no difference, and a second wrong one is; nor is what follows an
    end counted token by token."""
    model = Model(source(), folder, load_tokenizer(folder))
    prompt = list(range(40, 110))

    def right(tokens: list[int]) -> int:
        return greedy_decode(GEOMETRY, source().tensor, [*prompt, *tokens], 1)[0]

    def decoded(wrong: set[int]) -> list[int]:
        """Greedily, but for these places."""
        tokens: list[int] = []
        for index in range(8):
            tokens.append((right(tokens) + (index in wrong)) % GEOMETRY.vocab)
        return tokens

    for oracle in (GreedyOracle(model), reference_oracle(model)):
        for wrong in ({2}, {2, 3}, {0, 4, 7}):
            tokens = decoded(wrong)
            found = oracle.compare(1, prompt, tokens, ())
            assert {d.index for d in found} == wrong and all(d.margin > 0 for d in found)
            assert [(d.row, d.got, d.expected) for d in found] == [
                (1, tokens[d.index], right(tokens[: d.index])) for d in found
            ]
        tokens = decoded({2, 5})
        found = oracle.compare(1, prompt, tokens, [tokens[3]])  # and goes on after its end
        assert [(d.index, d.expected is None) for d in found] == [(2, False), (4, True)]


def reference_oracle(model: Model) -> GreedyOracle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(greedy_oracle, "_LARGEST", 0)
        oracle = GreedyOracle(model)
    assert oracle.name == "reference"
    return oracle


def test_a_model_without_a_folder_gets_a_tokenizer_of_its_size(tmp_path: Path) -> None:
    config = load_config(["model=slice", "weights=random", "model.window=vllm"])
    model = open_model(config.model, config.weights, tmp_path)
    assert model.weights_label == "random" and model.geometry.window_keys == 4097
    assert model.tokenizer.vocab == model.geometry.vocab == 16_384
    assert model.source.tensor("model.layers.1.mlp.gate.weight").dtype == torch.bfloat16


PLANS: list[tuple[str, dict[str, Any]]] = [
    ("row_owner", {"own_rows": True}),
    ("round_robin", {}),
    ("round_robin", {"attention_claimers": 2, "moe_claimers": 3}),
]


@pytest.mark.parametrize(("placement", "options"), PLANS)
def test_the_picture_shows_every_byte_of_the_step(placement: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Weights once, experts as many as were touched, and the K and V of a full bucket."""
    shape = StepShape(GEOMETRY, 3, 256, 5, **options)
    program = lower(shape, WAVE_ORDERS["default"], placement)
    streamed = task_bytes(program, distinct_experts=5)
    entries = shape.layout.entries()
    weights = sum(entry.slots * (5 / GEOMETRY.experts if entry.experts > 1 else 1) for entry in entries.values())
    keys = sum(256 if kind == "full" else 64 for kind in GEOMETRY.layer_kinds)
    kv = keys * 3 * GEOMETRY.kv_heads * GEOMETRY.head_dim * 2 * 2
    assert streamed.sum() == pytest.approx(weights * SLOT_BYTES + kv)
    sample = program.words[:, Word.OPCODE] == ISA.named("sample").opcode
    assert streamed[sample].sum() == 0
    draw_schedule(program, tmp_path / "a.png", "title", 5)
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 1000 and image.height > 500
        colours = {pixel for _, pixel in image.convert("RGB").getcolors(1 << 24) or []}
    assert {(0x1F, 0x4E, 0x9C), (0x4F, 0x8F, 0xD6), (0xD9, 0x54, 0x1E)} <= colours  # qkv, attention, down
