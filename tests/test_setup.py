"""The set-up behind `make`: when it runs, when it refuses, and whose torch it keeps. Nothing is installed here."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import tomllib
import types
from collections import namedtuple
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """.ci/setup.py, loaded to work on a copy of the files it reads."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".ci").mkdir()
    for name in ("pyproject.toml", "constraints.txt", ".ci/setup.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    spec = importlib.util.spec_from_file_location("ci_setup", tmp_path / ".ci" / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calls(setup: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Stands in for the installing; records its arguments and leaves what a finished one leaves."""
    seen: list[tuple[str, str]] = []

    def pretend(torch: str, pip_args: str) -> None:
        seen.append((torch, pip_args))
        stamp = {"fingerprint": setup.fingerprint(), "torch": torch, "pip_args": pip_args}
        setup.STAMP.write_text(json.dumps(stamp))
        setup.PYTHON.parent.mkdir(exist_ok=True)
        setup.PYTHON.touch()

    monkeypatch.setattr(setup, "set_up", pretend)
    return seen


def test_a_second_call_installs_nothing(setup, calls) -> None:
    setup.main(["--torch", "torch==2.13.0"])
    setup.main(["--torch", "torch==2.13.0"])
    assert calls == [("torch==2.13.0", "")]


def test_a_lost_interpreter_is_made_again(setup, calls) -> None:
    setup.main(["--torch", "torch==2.13.0"])
    setup.PYTHON.unlink()
    setup.main(["--torch", "torch==2.13.0"])
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", ".ci/setup.py"])
def test_a_changed_requirement_is_installed(setup, calls, name: str) -> None:
    setup.main(["--torch", "torch==2.13.0"])
    with (setup.ROOT / name).open("a") as file:
        file.write("# changed\n")
    setup.main(["--torch", "torch==2.13.0"])
    assert len(calls) == 2


def test_a_build_chosen_by_hand_stays_until_another_is_chosen(setup, calls) -> None:
    chosen = ("torch==2.13.0+cpu", "--extra-index-url file:///wheels")
    setup.main(["--asked", "--torch", chosen[0], f"--pip-args={chosen[1]}"])
    setup.main(["--torch", "torch==2.13.0"])
    assert calls == [chosen]
    (setup.ROOT / "constraints.txt").write_text("numpy==2.0\n")
    setup.main(["--torch", "torch==2.13.0"])
    assert calls == [chosen, chosen]
    setup.main(["--asked", "--torch", "torch==2.12.0"])
    assert calls[-1] == ("torch==2.12.0", "")


def test_pins_follow_the_torch_that_was_chosen(setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "installed", lambda *names: {"torch": "2.12.1+cu130", "triton": "3.6.0"})
    before = (setup.ROOT / "constraints.txt").read_text().splitlines()
    pins = setup.constraints().read_text().splitlines()
    assert {"torch==2.12.1+cu130", "triton==3.6.0"} == set(pins) - set(before)
    assert {line.split("==")[0] for line in set(before) - set(pins)} == {"torch", "triton"}


@pytest.mark.parametrize(
    ("torch", "free_gb", "passes"),
    [("torch==2.13.0", 10, False), ("torch==2.13.0+cpu", 10, True), ("torch==2.13.0+cpu", 4, False)],
)
def test_a_full_disk_is_seen_before_anything_is_fetched(
    setup, monkeypatch: pytest.MonkeyPatch, torch: str, free_gb: int, passes: bool
) -> None:
    monkeypatch.setattr(setup.sys, "platform", "linux")
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda path: Usage(0, 0, free_gb * 1e9))
    if passes:
        setup.check_machine(torch, "")
    else:
        with pytest.raises(SystemExit, match=rf"error: {free_gb}\.0 GB free .* needs \d+ GB\nhint: "):
            setup.check_machine(torch, "")


def test_constraints_pin_every_direct_dependency(setup) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"], *setup.DATA]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_an_install_has_every_file_that_the_packages_read() -> None:
    """setuptools takes Python files by itself, and leaves out what no pattern of package-data names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns, packages = settings["package-data"]["*"], settings["packages"]["find"]["include"]
    for folder in ("mk", "configs", "prefill", "experiments", "evals"):
        assert any(fnmatch.fnmatch(folder, package) for package in packages)
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                assert any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns), path
