"""The code sandbox against code that means harm: each attack ends as it should, in seconds, and leaves nothing."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from evals.sandbox.probes import PROTECTIONS, SandboxReport, open_sandbox, probe, processes_named
from evals.sandbox.sandbox import Limits, RefusedError, Sandbox, _remove
from mk.errors import MkError

ROOT = Path(__file__).resolve().parent.parent
SHORT = Limits(wall_s=5.0, cpu_s=2, memory_mb=256, file_mb=2, processes=8)  # a busy machine needs some of that


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    for path in (folder, *folder.parents[:2]):  # pytest's own are closed to the sandbox's user
        path.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def opened(scratch: Path) -> tuple[Sandbox, SandboxReport]:
    if not sys.platform.startswith("linux"):
        pytest.skip("the sandbox is Linux's")
    return open_sandbox(scratch=scratch)


@pytest.fixture
def sandbox(opened: tuple[Sandbox, SandboxReport], scratch: Path):
    yield opened[0]
    assert list(scratch.iterdir()) == []  # nothing is left behind


def test_every_protection_was_attacked_and_held(opened: tuple[Sandbox, SandboxReport]) -> None:
    report = opened[1]
    assert set(report.held) == set(PROTECTIONS) and report.missing == []
    assert {"user", "files", "calls"} <= set(report.mechanisms)


def test_right_and_wrong_programs(sandbox: Sandbox) -> None:
    right = sandbox.run("print(sum(map(int, input().split())))", stdin="2 3\n", limits=SHORT)
    assert right.ok and right.stdout == "5\n" and right.stderr == ""
    wrong = sandbox.run("import sys; print('no', file=sys.stderr); sys.exit(3)", limits=SHORT)
    assert (wrong.why, wrong.code, wrong.stderr) == ("failed", 3, "no\n")
    files = sandbox.run("print(open('in').read())", files={"in": b"given"}, limits=SHORT)
    assert files.stdout == "given\n"


@pytest.mark.parametrize(
    ("program", "why", "said"),
    [
        ("while True: pass", "timeout", ""),
        ("import time; time.sleep(60)", "timeout", ""),
        ("import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass", "timeout", ""),
        ("held = []\nwhile True: held.append(bytearray(1 << 24))", "failed", "MemoryError"),
        ("import os\nwhile True: os.fork()", "failed", "BlockingIOError"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout", ""),
        ("import socket; socket.socket()", "failed", "PermissionError"),
        ("import socket; socket.socket(socket.AF_UNIX)", "failed", "PermissionError"),
        ("while True: print('x' * 65536)", "failed", "File too large"),
        ("open('file', 'wb').write(bytes(3 << 20))", "failed", "File too large"),
        ("import os; os.setsid()", "failed", "PermissionError"),
        ("import os; os.chmod('main.py', 0)", "failed", "PermissionError"),
        ("open('/proc/1/environ').read()", "failed", "PermissionError"),
        ("open('/dev/shm/left', 'w')", "failed", "PermissionError"),
        ("import os; os.kill(os.getpid(), 11)", "killed", ""),
        (
            "import os; os.mkdir('closed', 0); os.mkdir('open'); open('open/file', 'w'); os.symlink('/etc', 'etc')",
            "ok",
            "",
        ),
    ],
)
def test_attacks(sandbox: Sandbox, program: str, why: str, said: str) -> None:
    outcome = sandbox.run(program, limits=SHORT)
    assert outcome.why == why and said in outcome.stderr, outcome
    assert outcome.wall_s < SHORT.wall_s + 2 and len(outcome.stdout) <= SHORT.file_mb << 20


@pytest.mark.parametrize(
    "program",
    [
        "for _ in range(1500): os.mkdir('d'); os.chdir('d')",
        # beyond the longest path, with files and links out at every depth
        "for _ in range(300): os.mkdir('n' * 200); os.chdir('n' * 200); open('file', 'w'); os.symlink(root, 'link')",
        "for n in range(300): os.mkdir(str(n), 0); os.mkfifo(f'pipe{n}')",
        "os.makedirs('a/b/c'); os.mkdir('a/b/c/closed', 0); os.rename('main.py', 'a/b/c/main.py')",
        "os.mkdir('\\udcff\\n'); open(b'\\xff', 'w'); os.link('main.py', 'again'); os.unlink('main.py')",
    ],
)
def test_nothing_is_left_whatever_a_program_leaves(sandbox: Sandbox, tmp_path: Path, program: str) -> None:
    """The fixture looks; what links point to stays."""
    (tmp_path / "mine").write_text("x")
    outcome = sandbox.run(f"import os\nroot = {str(tmp_path)!r}\n{program}", limits=SHORT)
    assert outcome.ok, outcome
    assert (tmp_path / "mine").read_text() == "x"


def test_a_folder_that_fills_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rmdir, late = Path.rmdir, ["a/late", "late", "b"]

    def fill(path: Path) -> None:
        if late and (tmp_path / "top" / late[0]).parent == path:
            (tmp_path / "top" / late.pop(0)).write_text("x")
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", fill)
    (tmp_path / "top" / "a").mkdir(parents=True)
    _remove(tmp_path / "top")
    assert not late and not (tmp_path / "top").exists()
    (tmp_path / "top").mkdir()
    late += ["more"] * 100
    with pytest.raises(MkError, match="fills while it is removed"):
        _remove(tmp_path / "top")


def test_writes_outside_are_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    for path in (tmp_path, *tmp_path.parents[:2]):
        path.chmod(0o777 if path == tmp_path else 0o755)
    target.chmod(0o666)
    for line in (f"open({str(target)!r}, 'w')", f"import os; os.truncate({str(target)!r}, 0)", f"open({str(target)!r})",
                 f"import os; os.rename('main.py', {str(tmp_path / 'new')!r})"):  # fmt: skip
        outcome = sandbox.run(line, limits=SHORT)
        assert outcome.why == "failed" and ("PermissionError" in outcome.stderr or "OSError" in outcome.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["target"] and target.read_text() == "mine"


@pytest.mark.parametrize(
    "said", [b"x\n", b'{"failed": {"start": "no"}}\n', b'{"ended": 0, "late": false}\n', bytes(99_999)]
)
@pytest.mark.parametrize("missing", [[], ["namespaces"]])
def test_what_a_program_writes_is_no_report(scratch: Path, said: bytes, missing: list[str]) -> None:
    """Nor does it fill a pipe that nobody reads before the end; children have no other descriptors than it has."""
    program = f"""
import os
os.fork()
for number in range(3, 4096):
    try:
        os.write(number, {said!r})
        print(number, flush=True)
    except OSError:
        pass
os._exit(3)
"""
    outcome = Sandbox(missing, scratch).run(program, limits=SHORT)
    assert (outcome.why, outcome.code, outcome.stdout) == ("failed", 3, "")


def test_a_jail_that_is_ended_gives_a_verdict(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evals.sandbox.sandbox._parse_report", lambda data: {"failed": {}})
    outcome = Sandbox(scratch=scratch).run("print(1)", limits=SHORT)
    assert (outcome.why, outcome.code, outcome.stdout) == ("killed", None, "1\n")


def test_no_descendant_outlives_its_run(sandbox: Sandbox) -> None:
    name = f"left-{secrets.token_hex(6)}"
    program = f"""
import os, sys
for _ in range(3):
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", {name!r}])
print("done")
"""
    assert sandbox.run(program, limits=SHORT).stdout == "done\n"
    assert processes_named(name) == []


def test_the_environment_is_the_sandboxs(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "do not tell")
    outcome = sandbox.run("import os; print(dict(os.environ))", limits=SHORT)
    assert outcome.ok and "do not tell" not in outcome.stdout and "HOME" not in outcome.stdout


def test_the_packages_are_there(sandbox: Sandbox) -> None:
    assert sandbox.run("import numpy; print(numpy.arange(4) @ numpy.arange(4))").stdout == "14\n"


def test_without_namespaces_seccomp_and_landlock_still_hold(sandbox: Sandbox, scratch: Path) -> None:
    """As in a container that forbids them."""
    held = probe(Sandbox(["namespaces"], scratch))
    assert held["network"] and held["files"] and held["tree"] and held["environment"]


@pytest.mark.parametrize("missing", [[], ["namespaces"]])
def test_an_orphan_that_ends_does_not_end_the_run(scratch: Path, missing: list[str]) -> None:
    """Without namespaces it becomes a child of the jail, which waits for another."""
    program = "import os, time\nif os.fork() == 0:\n    if os.fork(): os._exit(0)\n    time.sleep(0.2); os._exit(1)\n"
    outcome = Sandbox(missing, scratch).run(f"{program}time.sleep(0.8); print('done')", limits=SHORT)
    assert (outcome.why, outcome.stdout) == ("ok", "done\n")
    outcome = Sandbox(missing, scratch).run(f"{program}time.sleep(60)", limits=Limits(wall_s=1.0))
    assert outcome.why == "timeout" and outcome.wall_s < 5


def test_a_missing_protection_is_found_and_refused(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evals.sandbox import probes

    root = os.geteuid() == 0  # who stays it, and else on a kernel without Landlock and seccomp
    skip, holes = (["user"], ["user", "processes"]) if root else (["files", "calls"], ["files", "network"])
    bare = Sandbox(["namespaces", *skip], scratch)
    monkeypatch.setattr(probes, "_with_what_there_is", lambda scratch: (bare, ["privileges"]))
    with pytest.raises(MkError, match="the sandbox lacks") as refused:
        open_sandbox(scratch=scratch)
    assert all(f"{hole} ({PROTECTIONS[hole]})" in str(refused.value) for hole in holes)
    assert refused.value.hint and "allow_missing=[" in refused.value.hint
    _, report = open_sandbox(list(PROTECTIONS), scratch)
    assert set(holes) <= set(report.missing) and report.held["wall"]
    with pytest.raises(MkError, match="allow_missing=netwrok"):
        open_sandbox(["netwrok"], scratch)


def test_a_mechanism_that_the_kernel_refuses_is_named_and_done_without(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of system calls for no architecture: as seccomp refuses there, so does its stand-in here."""
    run = Sandbox._run

    def without_seccomp(self: Sandbox, *arguments: object) -> object:
        if "calls" not in self._skip:
            raise RefusedError({"calls": "no table of system calls"})
        return run(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Sandbox, "_run", without_seccomp)
    _, report = open_sandbox(list(PROTECTIONS), scratch)
    assert "calls" not in report.mechanisms and "files" in report.mechanisms and report.held["files"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root tries what a user gets")
def test_a_user_gets_the_same() -> None:
    """Everything above as root; here as an unprivileged user, with namespaces by a user namespace."""

    def as_user(python: str, program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, "-B", "-c", program], cwd=ROOT, user=64_999, group=64_999, extra_groups=[],
                              env={}, capture_output=True, text=True, timeout=60)  # fmt: skip

    for python in (sys.executable, "/usr/bin/python3"):  # the first may lie in root's own folder
        try:
            if as_user(python, "import sys, evals; sys.exit(sys.version_info < (3, 11))").returncode == 0:
                break
        except OSError:
            continue
    else:
        pytest.skip("no Python that a user can run")
    out = as_user(python, "from evals.sandbox.probes import open_sandbox; print(open_sandbox()[1])")
    assert out.returncode == 0 and "'files'" in out.stdout and "False" not in out.stdout, out
