"""A task for a coding agent: a fresh folder, the agent headless in it, then the task's own test over what it left.

A task is a folder of `tasks/`: `start/` is what the agent finds, `prompt.md` what it is told, `test.py` what scores it,
which the agent never sees. Models' commands and code run with this user's rights, in no sandbox.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.served import ABOUT_S, fetch
from experiments.agents import scoring
from experiments.agents.exchange import Exchange
from experiments.agents.figures import raw_task
from experiments.agents.programs import DEFAULT_CONTEXT, PROGRAMS, Place, find
from experiments.agents.proxy import Proxy, recording
from experiments.agents.trace import Trace
from experiments.load_report import Engine
from experiments.settings.serving import TASKS
from mk.config import AgentConfig, Config
from mk.errors import MkError
from mk.processes import run_within
from mk.results.rows import Row
from mk.results.runs import RunFolder

SETUP_S, TEST_S = 60.0, 60.0  # that an agent's setting up, or its version, and a task's test may take
MOST_DIFF = 200_000  # bytes of a file that is shown in a diff
MOST_VALUE = 40  # characters of what an agent wrote in the place of a number


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    prompt: str
    start: Path
    test: Path

    @classmethod
    def load(cls, name: str) -> Task:
        folder = TASKS / name
        return cls(name, (folder / "prompt.md").read_text().strip(), folder / "start", folder / "test.py")


def run_task(cfg: Config, run: RunFolder, engine: Engine, task: Task, version: str) -> Row:
    """The row of a task. What the agent asked and was answered, what it printed, the diff and the test's output lie in
    the run folder, and the conversation as a trace for agent=replay. version: of the agent.

    Raises MkError where the server goes away, or the agent cannot be set up.
    """
    told = run.path / "transcripts" / f"{engine.name}-{task.name}"
    told.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="mk-agent-", ignore_cleanup_errors=True) as scratch:
        folder, home = Path(scratch).resolve() / "project", Path(scratch).resolve() / "home"
        shutil.copytree(task.start, folder)
        home.mkdir()
        with recording(engine.client.url) as (proxy, url):
            place = Place(folder, home, url, engine.client.model, engine.client.context or DEFAULT_CONTEXT)
            env = place.environment()
            repository(folder, env)
            try:
                ended, wall_s = run_agent(cfg, place, task.prompt, told, lambda: require_server(cfg, run, proxy))
            finally:
                write_exchanges(told / "requests.jsonl", proxy.exchanges)
        (told / "final.diff").write_text("".join(diff(task.start, folder)), errors="replace")
        test = score(folder, task.test, env, told / "test.log")
    trace = Trace.record(task.name, proxy.exchanges)
    if trace is not None:
        (told / "trace.json").write_text(trace.text())
    longest = max((exchange.answer.prompt_tokens for exchange in proxy.exchanges), default=0)
    return engine.append(
        raw_task(proxy.exchanges, ended, wall_s, test),
        workload=task.name,
        agent=cfg.agent.name,
        agent_version=version,
        sampling=sampling(proxy.exchanges),
        context=[longest],
        batch=1,
    )


def version_of(config: AgentConfig) -> str:
    """What the agent's program says that it is. Raises MkError where there is none, or it cannot be executed."""
    program = str(find(config))
    with tempfile.TemporaryDirectory(prefix="mk-agent-", ignore_cleanup_errors=True) as scratch:
        home = Path(scratch)
        place = Place(home, home, "http://127.0.0.1/v1", "none", DEFAULT_CONTEXT)  # nobody is asked
        env = {**place.environment(), **PROGRAMS[config.name](place, "", SETUP_S).env}
        try:
            said = call(program, ["--version"], env, home / "version.log", home)
        except MkError as error:
            raise MkError(
                f"agent.program={config.program} does not run: {error}",
                hint="make agents installs it in build/agents; agent.program=<path> names another",
            ) from error
    return said.split()[-1][:100] if said else "unknown"


def run_agent(cfg: Config, place: Place, prompt: str, told: Path, look: Callable[[], None]) -> tuple[str, float]:
    """(how it ended, seconds that it took). What it prints is in agent.log, and of a call to set it up in a log of that
    call's name."""
    limit_s, program = cfg.experiment.limit_s, str(find(cfg.agent))
    launch = PROGRAMS[cfg.agent.name](place, prompt, limit_s)
    env = {**place.environment(), **launch.env}
    for arguments in launch.before:
        call(program, arguments, env, told / f"agent-{arguments[0]}.log", place.folder)
    ended, wall_s = run_within(limit_s, [program, *launch.arguments], env, told / "agent.log", place.folder, look)
    look()
    return ended, wall_s


def call(program: str, arguments: Sequence[str], env: Mapping[str, str], log: Path, folder: Path) -> str:
    """What it printed. Raises MkError where it does not end with status 0."""
    ended, _ = run_within(SETUP_S, [program, *arguments], env, log, folder)
    said = log.read_text(errors="replace").strip()
    if ended != "status 0":
        raise MkError(f"{program} {' '.join(arguments)}: {ended}: {said[-500:]}", hint=f"agent.program={program}")
    return said


def require_server(cfg: Config, run: RunFolder, proxy: Proxy) -> None:
    """Raises MkError where a request of the agent met no server, and there is none."""
    if proxy.lost.is_set():
        proxy.lost.clear()
        try:
            fetch(f"{proxy.upstream}/models", None, ABOUT_S)
        except MkError as error:
            hint = f"its log is in {run.path}" if cfg.experiment.base_url is None else error.hint
            raise MkError(f"the server went away while the agent worked: {error}", hint=hint) from error


def repository(folder: Path, env: dict[str, str]) -> None:
    """What agents expect a project to be, with its files committed. Raises MkError where git does not do it."""
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        try:
            subprocess.run(["git", *command], cwd=folder, env=env, check=True, capture_output=True, timeout=SETUP_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise MkError(f"git {command[0]} in a task's folder: {error}", hint="agents need git") from error


def score(folder: Path, test: Path, env: dict[str, str], log: Path) -> dict[str, int] | None:
    """What `scoring.py` says of the folder; None where it does not come to its end, or to other tests than there are,
    or there is no folder any more."""
    if not folder.is_dir():
        return None
    nonce = secrets.token_hex()
    with tempfile.TemporaryDirectory(prefix="mk-verdict-") as scratch:
        path = Path(scratch) / "verdict"
        path.write_text(nonce)
        command = [sys.executable, "-I", "-B", scoring.__file__, str(test), str(path)]
        with path.open() as verdict:  # that has no name any more when it is given
            ended, _ = run_within(TEST_S, command, env, log, folder)
            said = verdict.read()
    try:
        found = json.loads(said)
        told = {name: int(found[name]) for name in ("ran", "failed")}
        sound = ended == "status 0" and found["nonce"] == nonce and told["ran"] == scoring.tests_in(test)
    except (ValueError, LookupError, TypeError):
        return None
    return told if sound else None


def diff(before: Path, after: Path) -> Iterator[str]:
    """Lines of a unified diff of two folders, without what agents keep for themselves."""
    texts = [files(before), files(after)]
    for name in sorted({*texts[0], *texts[1]}):
        old, new = (text.get(name) for text in texts)
        if old != new:
            names = (f"a/{name}" if old is not None else "/dev/null", f"b/{name}" if new is not None else "/dev/null")
            lines = [(text or "").splitlines(keepends=True) for text in (old, new)]
            for line in difflib.unified_diff(*lines, *names):
                yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def files(folder: Path) -> dict[str, str]:
    """Texts by path, hidden files and caches left out; of a file that is no text, or a long one, its size."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if (
            any(part.startswith(".") or part == "__pycache__" for part in name.parts)
            or path.is_symlink()
            or not path.is_file()
        ):
            continue
        size = path.stat().st_size
        found[name.as_posix()] = f"({size} bytes)\n"
        if size <= MOST_DIFF:
            with contextlib.suppress(UnicodeDecodeError, OSError):
                found[name.as_posix()] = path.read_bytes().decode()
    return found


def write_exchanges(path: Path, exchanges: Sequence[Exchange]) -> None:
    """A line each: what was asked, what came, and when."""
    with path.open("w") as file:
        for number, exchange in enumerate(exchanges, start=1):
            file.write(json.dumps(told_of(number, exchange, exchanges[0].answer.sent)) + "\n")


def told_of(number: int, exchange: Exchange, begun: float) -> dict[str, Any]:
    answer = exchange.answer
    times = [time for time, _ in answer.arrivals]
    return {
        "turn": number,
        "path": exchange.path,
        "request": exchange.body,
        "status": exchange.status,
        "answer": exchange.message,
        "finish": exchange.finish,
        "whole": exchange.whole,
        "error": exchange.error,
        "prompt_tokens": answer.prompt_tokens,
        "cached": answer.cached,
        "tokens": answer.tokens,
        "sent_s": round(answer.sent - begun, 3),
        "ttft_ms": round((times[0] - answer.sent) * 1e3, 3) if exchange.timed else None,
        "decode_ms": round((times[-1] - times[0]) * 1e3, 3) if exchange.timed else None,
    }


def sampling(exchanges: Sequence[Exchange]) -> str:
    """What the agent asked for, of a row; of what is no number, as it was written."""
    asked = [exchange.body.get("temperature") for exchange in exchanges]
    return ", ".join(
        sorted({"the server's own" if value is None else f"temperature {brief(value)}" for value in asked})
    )


def brief(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)[:MOST_VALUE]
