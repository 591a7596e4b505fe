"""What a command leaves, and what an error quotes of a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from mk import processes
from mk.errors import MkError
from mk.processes import log_end, run_within, started, subreaper

STAY = "sh ./stay"


def gone(pid: int) -> bool:
    """Not even a zombie."""
    return not Path("/proc", str(pid)).exists()


@pytest.fixture(autouse=True)
def stay(tmp_path: Path) -> None:
    (tmp_path / "stay").write_text("echo $$ > here; mv here child; exec sleep 600\n")


def waited(path: Path) -> int:
    for _ in range(500):
        if path.exists():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} never came")


@pytest.mark.parametrize(
    "how",
    [
        f"{STAY} &",
        f"setsid {STAY} &",
        f"setsid env -i {STAY} &",
        f"(setsid setsid env HOME=/ {STAY} &)",
        f"(trap '' TERM HUP INT; setsid env -i {STAY} &)",
        f"setsid sh -c 'env -i setsid {STAY} & wait' &",
    ],
)
@pytest.mark.parametrize("end", ["by itself", "time limit", "interrupt"])
def test_nothing_that_a_command_started_is_left(how: str, end: str, tmp_path: Path) -> None:
    def look() -> None:
        if end == "interrupt" and (tmp_path / "child").exists():
            raise KeyboardInterrupt

    last = "while ! test -e child; do sleep 0.02; done" if end == "by itself" else "sleep 600"
    limit_s, command = 1.0 if end == "time limit" else 30, ["sh", "-c", f"{how}\n{last}"]
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    with pytest.raises(KeyboardInterrupt) if end == "interrupt" else nullcontext():
        ended, _ = run_within(limit_s, command, env, tmp_path / "log", tmp_path, look)
        assert ended == ("status 0" if end == "by itself" else end)
    assert gone(int((tmp_path / "child").read_text())), (tmp_path / "log").read_text()


def test_other_children_go_on_with_all_that_they_started(tmp_path: Path) -> None:
    """As a server does while an agent works, with a child in a session of its own and one that lost its parent."""
    log, before = tmp_path / "log", subreaper(None)
    server = f"setsid {STAY} &\n(sleep 600 & echo $! > there; mv there orphan)\nsleep 600"
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    alone = subprocess.Popen(["sleep", "600"])  # in this session
    try:
        with started(["sh", "-c", server], env, log, folder=tmp_path) as process:
            child, orphan = waited(tmp_path / "child"), waited(tmp_path / "orphan")
            assert run_within(30, ["sh", "-c", "sleep 0.1; exit 3"], env, tmp_path / "other", tmp_path)[0] == "status 3"
            assert process.poll() is None and alone.poll() is None and not gone(child) and not gone(orphan)
        os.kill(child, signal.SIGKILL)
        assert subreaper(None) == before
    finally:
        alone.kill()
        alone.wait()


@pytest.mark.parametrize("text", [None, "#!/no/such/interpreter\n", "no program\n"])
def test_what_cannot_be_executed_is_named(text: str | None, tmp_path: Path) -> None:
    program = tmp_path / "program"
    if text is not None:
        program.write_text(text)
        program.chmod(0o755)
    with pytest.raises(MkError, match=f"{program} cannot be executed: "):
        run_within(5, [str(program)], {}, tmp_path / "log", tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_front_door_ends_what_was_started(number: signal.Signals, tmp_path: Path) -> None:
    """run.py's handlers around a command; one that was ignored (nohup) stays so."""
    code = (
        "import run, signal, sys; from pathlib import Path; from mk.processes import run_within\n"
        "run.end_in_order()\n"
        "folder = Path(sys.argv[1])\n"
        f"command = ['sh', '-c', {f'setsid env -i {STAY} & sleep 600'!r}]\n"
        "run_within(600, command, dict(PATH=sys.argv[2]), folder / 'log', folder)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), os.environ["PATH"]]
    with started(command, os.environ, tmp_path / "log of run", folder=Path(__file__).parent.parent) as process:
        child = waited(tmp_path / "child")
        process.send_signal(number)
        assert process.wait(20) == 128 + number, (tmp_path / "log of run").read_text()
    assert gone(child)
    ask = "import run, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); run.end_in_order(); "
    ask += "assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN"
    assert subprocess.run([sys.executable, "-c", ask], cwd=Path(__file__).parent.parent).returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("one\n\n  two \n", "ends: one | two"),
        ("".join(f"{n}\n" for n in range(9)), "ends: 4 | 5 | 6 | 7 | 8"),
        ("x" * 5000 + "the end", "ends: " + "x" * (processes.CHARACTERS - 7) + "the end"),
        (b"\xff\xfe broken\n", "ends: \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} broken"),
        (b"\n" * processes.TAIL + b"last", "ends: last"),
    ],
)
def test_the_last_lines_that_say_something(text: str | bytes, said: str, tmp_path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert log_end(log) == f"its log {log} {said}"


def test_a_log_that_is_not_there_is_told(tmp_path) -> None:
    assert log_end(tmp_path / "none") == f"its log {tmp_path / 'none'} cannot be read: No such file or directory"
