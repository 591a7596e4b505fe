"""Real agents against the server, as a scripted model tells them to: OpenCode and Cline write a file and run it, Aider
edits one, LangChain calls a tool.

`make test-agents` installs the agents; elsewhere they are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.serve import opencode
from mk.engine.scripted import Replies, Reply, ScriptedEngine
from tests.interpreter_rig import NANO_GEOMETRY
from tests.server_rig import TOKENIZER, action, serving, thought

INSTALLED = Path(__file__).resolve().parent.parent / "build" / "agents"
OPENCODE = INSTALLED / "node_modules" / ".bin" / "opencode"
CLINE = INSTALLED / "node_modules" / ".bin" / "cline"
AIDER = INSTALLED / "aider" / "bin" / "aider"
LANGCHAIN = INSTALLED / "langchain" / "bin" / "python"
CONTEXT = 65536  # nano's tokens are short, and an agent's instructions are long


def scripted(replies: Sequence[Reply]) -> Any:
    """A server for one agent."""
    pages = {"full": 2 * CONTEXT // 64, "sliding": 1024}
    return serving(engine=ScriptedEngine(NANO_GEOMETRY, Replies(TOKENIZER, replies), 4, CONTEXT, pages))


def run(command: Sequence[str | Path], folder: Path, more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """An agent in a project's folder, with a home of its own."""
    home = {key: str(folder.parent / key) for key in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")}
    for path in home.values():
        Path(path).mkdir(exist_ok=True)
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **home, "PWD": str(folder), **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


@pytest.mark.skipif(not OPENCODE.exists(), reason="OpenCode is not installed: make test-agents")
def test_opencode_writes_a_file_and_runs_it(project: Path) -> None:
    script = project / "hello.py"
    write = ("write", {"filePath": str(script), "content": "print(6 * 7)\n"})
    execute = ("bash", {"command": f"python3 {script}", "description": "run it"})
    replies = [
        Reply("Generate a title", thought("", "Hello")),
        Reply("make hello.py", "I write it.<|END_THINKING|>" + action(write)),
        Reply("Wrote file", "I run it.<|END_THINKING|>" + action(execute)),
        Reply("42", thought("Good.", "It printed 42.")),
    ]
    with scripted(replies) as served:
        allowed = {"edit": "allow", "bash": "allow", "external_directory": "allow"}
        settings = {**opencode(served.url, served.service), "permission": allowed}
        (project / "opencode.json").write_text(json.dumps(settings))
        more = {
            "OPENCODE_CONFIG": str(project / "opencode.json"),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
        ran = run([OPENCODE, "run", "make hello.py and run it"], project, more)
        served.assert_idle()
    assert ran.returncode == 0 and script.exists(), ran.stdout + ran.stderr
    assert script.read_text() == "print(6 * 7)\n" and "It printed 42." in ran.stdout
    assert served.service.worker.core.totals.cached_tokens > 10_000  # turns begin with what the last one held


@pytest.mark.skipif(not CLINE.exists(), reason="Cline is not installed: make test-agents")
def test_cline_writes_a_file_and_runs_it(project: Path) -> None:
    script = project / "hello.py"
    write = ("editor", {"path": str(script), "new_text": "print(6 * 7)\n"})
    execute = ("run_commands", {"commands": [f"python3 {script}"]})
    replies = [
        Reply("make hello.py", "I write it.<|END_THINKING|>" + action(write)),
        Reply("File created", "I run it.<|END_THINKING|>" + action(execute)),
        Reply("42", thought("Good.", "It printed 42.")),
    ]
    with scripted(replies) as served:
        more = {"CLINE_NO_AUTO_UPDATE": "1", "CLINE_TELEMETRY_DISABLED": "1"}
        known = run(
            [CLINE, "auth", "-p", "openai", "-k", "none", "-m", "nano", "-b", f"{served.url}/v1"], project, more
        )
        assert known.returncode == 0, known.stdout + known.stderr
        ran = run([CLINE, "-t", "90", "make hello.py and run it"], project, more)
        served.assert_idle()
    assert ran.returncode == 0 and script.exists(), ran.stdout + ran.stderr
    assert script.read_text() == "print(6 * 7)\n" and "It printed 42." in ran.stdout
    assert served.service.worker.core.totals.cached_tokens > 10_000


@pytest.mark.skipif(not LANGCHAIN.exists(), reason="LangChain is not installed: make test-agents")
def test_langchain_calls_a_tool(project: Path) -> None:
    replies = [
        Reply("How warm is Oslo?", "I look.<|END_THINKING|>" + action(("weather", {"city": "Oslo"}))),
        Reply("12 degrees in Oslo", thought("Good.", "It is 12 degrees.")),
        Reply("greet me", thought("Politely.", "Good evening!")),
    ]
    with scripted(replies) as served:
        ran = run([LANGCHAIN, Path(__file__).parent / "langchain_agent.py", f"{served.url}/v1"], project, {})
        served.assert_idle()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = [json.loads(line) for line in ran.stdout.splitlines()]
    assert said == [[{"city": "Oslo"}], "It is 12 degrees.", "Good evening!"]


@pytest.mark.skipif(not AIDER.exists(), reason="Aider is not installed: make test-agents")
def test_aider_edits_a_file(project: Path) -> None:
    greeting = project / "greet.py"
    greeting.write_text('print("hello")\n')
    edit = 'greet.py\n```\nprint("good evening")\n```\n'
    with scripted([Reply("a greeting for the evening", thought("One line.", edit))]) as served:
        options = [
            "--no-check-update",
            "--analytics-disable",
            "--no-show-model-warnings",
            "--no-stream",
            "--yes-always",
        ]
        model = ["--model", "openai/nano", "--edit-format", "whole", "--map-tokens", "0"]
        message = ["--message", "print a greeting for the evening", greeting]
        more = {"OPENAI_API_BASE": f"{served.url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        ran = run([AIDER, *options, *model, *message], project, more)
        served.assert_idle()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert greeting.read_text() == 'print("good evening")\n', ran.stdout + ran.stderr
