"""Every experiment in one process at its smallest size: its rows are of the schema, and every leaf of the configuration
is read by something."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from mk.compose import experiment_main, load_config, to_yaml, vary
from mk.config import Config, group_options
from mk.errors import MkError
from mk.programs import Plan
from mk.results.kept import config_problems, read_configs
from mk.results.recompute import different
from mk.results.rows import SCHEMA, read_raw, read_rows
from mk.results.sources import ROOT
from tests.leaf_reads import all_leaves, leaves_of, watched
from tests.promotion import folder_of
from tests.small_runs import AGAIN, READ_ELSEWHERE, REFUSED, ROWLESS, SMALL

needs_no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card, which these do not need")


def test_every_experiment_is_run_refused_or_named() -> None:
    assert sorted([*SMALL, *REFUSED, *ROWLESS]) == sorted(group_options("experiment"))
    assert all((ROOT / why.split(": ")[1]).exists() for why in ROWLESS.values())


@needs_no_card
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_cpu_cannot_run_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    more = ["benchmark=nano_code"] if name == "accuracy_vllm" else []
    with pytest.raises(MkError, match=REFUSED[name]):
        experiment_main(name)(load_config([f"experiment={name}", *more, f"run_dir={tmp_path / 'runs'}"]))
    assert not list(tmp_path.rglob("rows.jsonl"))


def measured() -> Path:
    """Kept rows for the simulator to be judged by: the fewest that there are."""
    folders = (ROOT / "results" / "h200").glob("*-plan_ablation-*")
    return min(folders, key=lambda folder: len(read_rows(folder / "rows.jsonl")))


def small_run(name: str, overrides: Sequence[str], root: Path) -> tuple[Config, set[str]]:
    """The configuration of a run that ended well, and the leaves that it read."""
    with watched() as read:
        config = load_config([f"experiment={name}", *overrides, f"run_dir={root}"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            assert not experiment_main(name)(config)
    return config, read


@needs_no_card
@pytest.mark.timeout(600)
def test_every_experiment_runs_small_and_every_leaf_is_read(tmp_path: Path, subtests: pytest.Subtests) -> None:
    rows = measured()
    by_name: dict[str, set[str]] = {}
    own: dict[str, set[str]] = {}
    for name, overrides in (*SMALL.items(), *AGAIN.items()):
        root = tmp_path / f"{name}{len(overrides)}"
        with subtests.test(root.name):
            given = [override.format(measured=rows) if "{m" in override else override for override in overrides]
            config, leaves = small_run(name, given, root)
            own[name] = leaves_of(config.experiment)
            by_name[name] = by_name.get(name, set()) | leaves
            folder = folder_of(root)
            found, raw = read_rows(folder / "rows.jsonl"), read_raw(folder / "raw.jsonl")
            configs = read_configs(folder)
            for row in found:
                assert list(config_problems(row, configs)) == []
                assert row.schema == SCHEMA and row.digest == row.computed_digest() and all(row.checks.values())
                assert list(different(row, raw[row.raw_sha256 or ""])) == []
            assert found and (folder / "rows.csv").exists()
    for name, leaves in own.items():
        with subtests.test(f"{name} reads what is its own"):
            assert sorted(leaves - by_name[name] - READ_ELSEWHERE.keys()) == []
    read = set().union(*by_name.values())
    assert sorted(all_leaves() - read - READ_ELSEWHERE.keys()) == [], "leaves that nothing reads"
    assert sorted(READ_ELSEWHERE.keys() & read) == [], "read here, so not to be listed"
    assert len(read) > 100


@pytest.mark.parametrize("leaf", READ_ELSEWHERE)
def test_what_these_runs_do_not_read_is_read_where_it_is_said_to_be(leaf: str) -> None:
    assert leaf in all_leaves()
    tree = ast.parse((ROOT / READ_ELSEWHERE[leaf]).read_text())
    reads = {of.attr for of in ast.walk(tree) if isinstance(of, ast.Attribute) and isinstance(of.ctx, ast.Load)}
    assert leaf.split(".")[1] in reads


def test_a_leaf_is_read_when_code_uses_it_and_not_when_it_is_printed_or_copied() -> None:
    config = load_config(["gpu=h200"])
    with watched() as read:
        vary(config, ["batch.size=2"])
        to_yaml(config)
        assert dataclasses.replace(config.gpu, sms=3) != config.gpu and copy.deepcopy(config) == config
        assert read == set()
        assert Plan.from_config(config) is not None
        assert {"GpuConfig.sms", "WaveOrderConfig.waves", "AttentionConfig.split_keys"} <= read
        assert "RingConfig.window_kb" not in read
    assert config.engine.ring.window_kb and "RingConfig.window_kb" not in read
