"""Sweeps by Hydra's launchers: every combination runs as it does alone, and the first failure is the exit status."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from mk import launched
from mk.errors import MkError
from mk.processes import below, processes
from mk.results.rows import read_rows
from mk.results.sources import ROOT

SMALL = ["experiment=placement_ablation", "model=nano", "gpu.sms=16", "experiment.batches=[1]", "experiment.context=64"]
SMALL += ["experiment.steps=8", "experiment.warmup=2", "experiment.check_tokens=8"]


def sweep(runs: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), "-m", *SMALL, f"run_dir={runs}", *overrides]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_combinations_run_in_processes_of_their_own(launcher: str, tmp_path: Path) -> None:
    ran = sweep(tmp_path, "wave_order=default,parted", f"hydra/launcher={launcher}")
    assert ran.returncode == 0, ran.stderr
    (folder,) = tmp_path.glob("*-launched-*")
    assert [(folder / f"status-{number}").read_text() for number in (0, 1)] == ["0", "0"]
    runs = [read_rows(run / "rows.jsonl") for run in tmp_path.glob("*-placement_ablation-*")]
    orders = sorted({row.wave_order for row in rows}.pop() for rows in runs)
    assert orders == ["default", "parted"]
    for rows in runs:  # by its own command, which runs it again
        assert f"wave_order={rows[0].wave_order}" in rows[0].command and "-m" not in rows[0].command.split()
    assert not {"multirun", "outputs", ".submitit"} & {path.name for path in ROOT.iterdir()}


def test_a_combination_that_fails_stops_no_other(tmp_path: Path) -> None:
    ran = sweep(tmp_path, "routing=uniform,checkpoint", "experiment.variants=['placement=row_owner']",
                "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")  # fmt: skip
    assert ran.returncode == 2 and "1 of 2 combinations failed: 2" in ran.stderr, ran.stderr
    assert len(list(tmp_path.glob("*-placement_ablation-*/rows.jsonl"))) == 1


def test_a_sweep_may_be_started_anywhere_and_kept_under_any_name(tmp_path: Path) -> None:
    runs = tmp_path / "a, b='c'"
    quoted = str(runs).replace("'", "\\'")
    command = [sys.executable, str(ROOT / "run.py"), "-m", *SMALL, f"run_dir='{quoted}'", "wave_order=default,parted"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([*command, "hydra/launcher=submitit_local"], cwd=tmp_path, env=env, capture_output=True,
                         text=True, timeout=240)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert len(list(runs.glob("*-placement_ablation-*/rows.jsonl"))) == 2


def test_a_launcher_that_fails_is_no_end_without_a_report(tmp_path: Path) -> None:
    ran = sweep(tmp_path, "wave_order=default,parted", "hydra/launcher=joblib", "hydra.launcher.n_jobs=none")
    assert ran.returncode == 1 and "2 of 2 combinations failed" in ran.stderr and "sweep folder: " in ran.stdout


def test_what_is_told_to_end_leaves_no_job(tmp_path: Path) -> None:
    mark = f"run_dir={tmp_path}"
    large = ["experiment.batches=[8]", "model=north_mini_code", "gpu.sms=132", "wave_order=default,parted"]
    command = [sys.executable, str(ROOT / "run.py"), "-m", *SMALL, *large, mark, "hydra/launcher=submitit_local"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not list(tmp_path.glob("*/.submitit/*/*_log.out")) and time.monotonic() < end:
        time.sleep(0.1)
    started = below([process.pid], processes()) - {process.pid}
    assert started
    process.terminate()
    assert process.wait(30) == 143
    time.sleep(0.2)
    assert not [pid for pid in started if pid in processes() and _state(pid) != "Z"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "Z"


@pytest.mark.parametrize(
    ("own", "multirun", "says"),
    [
        (["hydra/launcher=joblib"], False, "hydra/launcher=joblib: one run is not launched"),
        (["hydra/launcher=slurm"], True, "unknown launcher hydra/launcher=slurm"),
        (["hydra/launcher=joblib", "hydra.sweep.dir=x"], True, "hydra.sweep.dir=x: only a launcher is taken"),
        (["hydra.launcher.n_jobs=2"], True, "hydra.launcher.n_jobs=2: only a launcher is taken"),
        (["hydra/launcher=joblib", "hydra/launcher=ray"], True, "two launchers"),
    ],
)
def test_what_launches_nothing_is_refused(own: list[str], multirun: bool, says: str) -> None:
    with pytest.raises(MkError, match=says):
        launched.check([], own, multirun)


def test_an_order_that_would_be_drawn_anew_is_refused() -> None:
    with pytest.raises(MkError, match=r"gpu.sms=shuffle\(2,4\): a launcher draws another order"):
        launched.check(["schedule=static", "gpu.sms=shuffle(2,4)"], ["hydra/launcher=joblib"], True)


@pytest.mark.parametrize("override", ['experiment.prompt="random.shuffle(x)"', "gpu.sms=2,4", "gpu.sms=range(2,4)"])
def test_any_other_order_is_taken(override: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    launched.check([override], ["hydra/launcher=joblib"], True)


def test_a_launcher_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MkError, match="hydra/launcher=ray is not installed") as caught:
        launched.check([], ["hydra/launcher=ray"], True)
    assert caught.value.hint == "pip install -e '.[ray]'"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(launched.PLUGINS.values()) <= set(project["optional-dependencies"])
