"""Checkpoints: every way of storing the same tensors, refusals that name the tensor, and the hub without a network."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mk.errors import MkError
from mk.model import tensors
from mk.model.checkpoint import load_checkpoint
from mk.model.folder import write_weights
from mk.model.hub import INDEX, SINGLE, resolve_folder
from mk.model.random_weights import RandomWeights
from tests.tiny_model import tiny_geometry

GEOMETRY = tiny_geometry()
SOURCE = RandomWeights(GEOMETRY, seed=5)
COMMIT = "d11e61a842617a22dc328552fa5bb86231ee4f37"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    SOURCE.write_folder(tmp_path)
    write_weights(tmp_path, SOURCE)
    return tmp_path


def assert_holds_the_source(folder: Path) -> None:
    checkpoint = load_checkpoint(folder)
    assert checkpoint.label == "checkpoint" and checkpoint.geometry == GEOMETRY
    for name in tensors.tensor_shapes(GEOMETRY):
        assert torch.equal(checkpoint.tensor(name), SOURCE.tensor(name)), name


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite the single file with tensors added, replaced or (None) dropped; `__` stands for the dot of a name."""
    state = load_file(folder / SINGLE)
    for name, value in changes.items():
        state.pop(name.replace("__", "."), None)
        if value is not None:
            state[name.replace("__", ".")] = value
    save_file(state, folder / SINGLE)


def test_single_file(folder: Path) -> None:
    assert_holds_the_source(folder)


def test_shards_with_an_index(tmp_path: Path) -> None:
    SOURCE.write_folder(tmp_path)
    write_weights(tmp_path, SOURCE, shard_bytes=400_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and (tmp_path / INDEX).exists()
    assert all(shard.stat().st_size < 400_000 + 20_000 for shard in shards[1:])
    assert_holds_the_source(tmp_path)
    shards[1].unlink()
    with pytest.raises(MkError, match=f"{shards[1].name}: no such weight file"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("fused", [False, True])
def test_what_transformers_writes(folder: Path, tmp_path_factory: pytest.TempPathFactory, fused: bool) -> None:
    """By default transformers splits the experts again when it saves; unconverted, it writes them stacked."""
    from transformers import Cohere2MoeForCausalLM

    saved = tmp_path_factory.mktemp("saved")
    model = Cohere2MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(saved, save_original_format=not fused)
    stacked = any("gate_up_proj" in name for name in load_file(saved / SINGLE))
    assert stacked == fused
    assert_holds_the_source(saved)


def test_window_reading_is_the_callers(folder: Path) -> None:
    assert load_checkpoint(folder, window_includes_extra=True).geometry.window_keys == GEOMETRY.window + 1


BIAS = {"model__layers__1__self_attn__q_proj__bias": torch.zeros(1)}
HEAD = {"lm_head__weight": torch.zeros(GEOMETRY.vocab, GEOMETRY.hidden)}
EXTRA = {"model__layers__9__input_layernorm__weight": torch.zeros(1)}
MISSING = {"model__layers__2__mlp__experts__6__up_proj__weight": None}
SHAPE = {"model__layers__2__mlp__gate__weight": torch.zeros(8, GEOMETRY.hidden, dtype=torch.bfloat16)}
DTYPE = {"model__norm__weight": torch.ones(GEOMETRY.hidden)}
TWICE = {"model__layers__2__mlp__experts__down_proj": torch.zeros(7, GEOMETRY.hidden, 40, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (BIAS, "model.layers.1.self_attn.q_proj.bias: a bias is not supported"),
        (HEAD, "lm_head.weight: a separate head is not supported"),
        (EXTRA, "model.layers.9.input_layernorm.weight: unexpected tensor"),
        (MISSING, "model.layers.2.mlp.experts.6.up_proj.weight: missing from the checkpoint$"),
        (SHAPE, r"model.layers.2.mlp.gate.weight: has shape \[8, 80\], config.json implies \[7, 80\]"),
        (DTYPE, "model.norm.weight: is F32, only BF16"),
        (TWICE, "model.layers.2.mlp.experts.[0-9].down_proj.weight: stored twice"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    edit(folder, **change)
    with pytest.raises(MkError, match=message):
        load_checkpoint(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:-1000])
    with pytest.raises(MkError, match=f"{SINGLE}: not a complete safetensors file"):
        load_checkpoint(folder)


def test_an_unreadable_index_is_named(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weights": {}}))
    with pytest.raises(MkError, match=f"{INDEX}: not an index"):
        load_checkpoint(folder)


def test_no_weights_at_all(tmp_path: Path) -> None:
    SOURCE.write_folder(tmp_path)
    with pytest.raises(MkError, match=f"{SINGLE}: no such weight file"):
        load_checkpoint(tmp_path)


def test_disk_is_asked_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mk.model.memory.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(MkError, match="checkpoint needs .* GB of disk"):
        write_weights(tmp_path, SOURCE)


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:8]])
def test_a_hub_model_needs_a_pinned_revision(revision: str | None) -> None:
    with pytest.raises(MkError, match="owner/name: a hub model needs a pinned revision"):
        resolve_folder("owner/name", revision)


def test_neither_a_folder_nor_a_hub_id() -> None:
    with pytest.raises(MkError, match="./weights/nano: no such folder"):
        resolve_folder("./weights/nano", COMMIT)


class FakeHub:
    """huggingface_hub's `snapshot_download` over a folder that is `cached` or not, `online` or not."""

    def __init__(self, folder: Path, cached: bool, online: bool = True, size: int = 1000) -> None:
        self.folder, self.cached, self.online, self.size = folder, cached, online, size
        self.downloads = 0

    def __call__(self, repository, *, revision, allow_patterns, local_files_only=False, dry_run=False):
        from huggingface_hub.errors import LocalEntryNotFoundError

        assert (repository, revision) == ("owner/name", COMMIT)
        if local_files_only and not self.cached:
            raise LocalEntryNotFoundError("not cached")
        if not local_files_only and not self.online:
            raise OSError("Dry run cannot be performed") from ConnectionError("Name or service not known")
        if dry_run:
            return [SimpleNamespace(file_size=self.size, will_download=True)]
        self.downloads += not local_files_only
        return str(self.folder)


def test_a_complete_snapshot_needs_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(folder, cached=True, online=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    assert resolve_folder("owner/name", COMMIT) == folder
    (folder / SINGLE).unlink()  # an interrupted download
    with pytest.raises(MkError, match=r"owner/name@d11e61a8: could not be downloaded \(Name or service not known\)"):
        resolve_folder("owner/name", COMMIT)


def test_download_after_a_look_at_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(folder, cached=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    assert resolve_folder("owner/name", COMMIT) == folder and hub.downloads == 1
    hub.size = 10**18
    with pytest.raises(MkError, match="owner/name@d11e61a8 needs 1000000000.0 GB of disk"):
        resolve_folder("owner/name", COMMIT)
    assert hub.downloads == 1
