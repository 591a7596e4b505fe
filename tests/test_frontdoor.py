"""What a user sees at run.py: help, errors of one line and a hint, statuses, and no folder that was not asked for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import run as front_door
from mk.compose import load_config
from mk.config import GROUPS, config_hash, group_options, resolved
from mk.errors import MkError


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Puts a function in the place of the default experiment's main."""

    def put(main: Callable[..., object]) -> None:
        module = types.ModuleType("experiments.quickstart")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "experiments.quickstart", module)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    return put


def test_from_another_folder_the_command_prints_the_configuration_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(front_door.ROOT / "run.py"), "--cfg", "job", "schedule=work_stealing"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    config = load_config(["schedule=work_stealing"])
    assert OmegaConf.to_container(OmegaConf.create(done.stdout)) == resolved(config)
    assert config_hash(config) in done.stdout
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


def test_a_python_without_the_packages_goes_on_in_the_venv_or_names_the_command(tmp_path: Path) -> None:
    """-S hides site-packages; the copy of run.py stands beside no .venv, then beside one whose python echoes."""
    script = tmp_path / "run.py"
    script.write_text((front_door.ROOT / "run.py").read_text())
    command = [sys.executable, "-S", str(script), "--help"]
    bare = subprocess.run(command, capture_output=True, text=True)
    assert bare.returncode == 2
    assert bare.stderr.splitlines() == ["error: the packages this needs are not installed", "hint: make run"]

    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "venv:" "$@"\n')
    python.chmod(0o644)  # one that cannot be run is as good as none
    assert subprocess.run(command, capture_output=True, text=True).stderr == bare.stderr
    python.chmod(0o755)
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.split() == ["venv:", str(script), "--help"]


def test_help_lists_experiments_with_a_line_and_groups_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert front_door.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in group_options("experiment"):
        assert re.search(rf"^  {name}\*? +[A-Z]\S* \S+ \S+", text, re.MULTILINE), f"{name} has no line"
    for group in GROUPS:
        for option in group_options(group):
            assert re.search(rf"\b{option}\b", text)
    assert "no description" not in text


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (["model=nanoo"], "unknown option model=nanoo", "did you mean model=nano? model has nano"),
        (["modle=nano"], "unknown key modle", "did you mean model?"),
        (["model.pth=x"], "unknown key model.pth", "did you mean model.path?"),
        (["batch.size=two"], "batch.size: Value 'two'", "--help"),
        (["experiment=quikstart"], "unknown option experiment=quikstart", "experiment has accuracy"),
        (["experiment=zzz"], "unknown option experiment=zzz", "experiment has accuracy, accuracy_vllm"),
        (["--cgf", "job"], "unrecognized arguments: --cgf", "--help"),
        (["--cfg", "all"], "argument --cfg: invalid choice: 'all'", "--help"),
        (["nonsense"], "cannot read 'nonsense'", "key=value"),
        (["-m", "model=nano", "batch.size=1,none"], "batch.size: Value 'none'", "--help"),
    ],
)
def test_a_wrong_input_is_one_line_and_a_hint(
    argv: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert front_door.main(argv) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second.startswith("hint: ")
    assert hint in second
    assert out == ""


def test_the_experiment_gets_the_configuration_and_gives_the_status(quickstart) -> None:
    seen = []
    quickstart(lambda cfg: seen.append(cfg) or 3)
    assert front_door.main(["batch.size=2"]) == 3
    assert seen == [load_config(["batch.size=2"])]


def test_multirun_runs_every_combination_in_order(quickstart, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    quickstart(lambda cfg: seen.append((cfg.schedule.name, cfg.batch.size)))
    assert front_door.main(["-m", "schedule=static,work_stealing", "batch.size=1,2"]) == 0
    assert seen == [("static", 1), ("static", 2), ("work_stealing", 1), ("work_stealing", 2)]
    assert "[3/4] schedule=work_stealing batch.size=1" in capsys.readouterr().out


def test_multirun_goes_on_after_a_combination_that_fails(quickstart, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def fail(cfg) -> int:
        seen.append(cfg.batch.size)
        if cfg.batch.size == 2:
            raise MkError("no room", hint="batch.size=1")
        if cfg.batch.size == 3:
            raise ValueError("a defect")
        return 1 if cfg.batch.size == 4 else 0

    quickstart(fail)
    assert front_door.main(["-m", "batch.size=1,2,3,4,5"]) == 2
    assert seen == [1, 2, 3, 4, 5]
    err = capsys.readouterr().err
    assert "error: no room\nhint: batch.size=1\nerror: ValueError: a defect\nhint: " in err
    assert err.splitlines()[-1] == "3 of 5 combinations failed: 2, 3, 4"


def test_an_interrupt_ends_a_multirun(quickstart, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def interrupt(cfg) -> int:
        seen.append(cfg.batch.size)
        raise KeyboardInterrupt

    quickstart(interrupt)
    assert front_door.main(["-m", "batch.size=1,2"]) == 130
    assert seen == [1] and capsys.readouterr().err == "interrupted\n"


def test_multirun_starts_nothing_when_one_combination_is_wrong(quickstart) -> None:
    seen = []
    quickstart(seen.append)
    assert front_door.main(["-m", "batch.size=1,0"]) == 2
    assert seen == []


def test_an_error_of_the_experiment_is_told_like_any_other(quickstart, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(cfg: object) -> None:
        raise MkError("no kernel is built", hint="engine=interpreter")

    quickstart(refuse)
    assert front_door.main([]) == 2
    assert capsys.readouterr().err == "error: no kernel is built\nhint: engine=interpreter\n"


def test_a_defect_is_one_line_and_a_traceback_file(
    quickstart, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall(cfg: object) -> None:
        raise ValueError("two\nlines")

    quickstart(fall)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("MK_TRACEBACK", raising=False)
    assert front_door.main([]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: ValueError: two lines"
    (file,) = tmp_path.iterdir()
    assert str(file) in hint
    assert "in fall" in file.read_text()

    assert front_door.main(["debug=true"]) == 1
    assert "in fall" in capsys.readouterr().err
    monkeypatch.setenv("MK_TRACEBACK", "1")
    assert front_door.main([]) == 1
    assert "in fall" in capsys.readouterr().err


def test_an_experiment_without_its_file_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert front_door.main([]) == 2
    assert "experiments/quickstart.py" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["exists", "read_text"])
def test_a_venv_that_cannot_be_read_is_one_line_and_a_hint(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of set-up; denied by a stand-in, as root may read everything."""
    spec = importlib.util.spec_from_file_location("ci_setup", front_door.ROOT / ".ci" / "setup.py")
    assert spec is not None and spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    monkeypatch.setattr(setup, "set_up", lambda *args: pytest.fail("must not get here"))

    def denied(path: Path, *args: object) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, call, denied)
    with pytest.raises(SystemExit) as caught:
        setup.main(["--torch", "torch"])
    error, hint = str(caught.value.code).splitlines()
    assert error == f"error: no permission for {setup.STAMP}" and hint.startswith(f"hint: make {setup.VENV} yours")


def make(*args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *args], cwd=front_door.ROOT, env=env, capture_output=True, text=True)


def test_make_alone_is_help() -> None:
    text = make().stdout
    assert all(f"make {target} " in text for target in ("run", "test", "lint", "clean"))


def test_set_up_fails_early_on_an_old_python(tmp_path: Path) -> None:
    """A stand-in for an old interpreter: the Makefile's check sees version 3.8."""
    old = tmp_path / "python-old"
    old.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -c "import sys; sys.version_info = (3, 8, 0); $1"\n')
    old.chmod(0o755)
    done = make("run", f"PYTHON={old}")
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed" in done.stderr
    assert "is 3.8" in done.stderr


def test_ignored_files_leave_results_and_the_checkpoint_alone() -> None:
    paths = ["results/speed.jsonl", "mk/model/nano/model.safetensors", "configs/gpu/h200.yaml", ".venv/x", "runs/x"]
    command = ["git", "check-ignore", "--no-index", *paths]
    ignored = subprocess.run(command, cwd=front_door.ROOT, capture_output=True, text=True).stdout.split()
    assert ignored == [".venv/x", "runs/x"]
