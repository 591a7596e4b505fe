"""A real coding agent against the server: OpenCode writes a file and runs it, as a scripted model tells it to.

`make test-agents` installs it; elsewhere this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from experiments.serve import opencode
from mk.engine.scripted import Replies, Reply, ScriptedEngine
from tests.interpreter_rig import NANO_GEOMETRY
from tests.server_rig import TOKENIZER, action, serving, thought

AGENT = Path(__file__).resolve().parent.parent / "build" / "agents" / "node_modules" / ".bin" / "opencode"
CONTEXT = 65536  # nano's tokens are short, and the agent's instructions are long


def test_opencode_writes_a_file_and_runs_it(tmp_path: Path) -> None:
    if not AGENT.exists():
        pytest.skip("OpenCode is not installed: make test-agents")
    project = tmp_path / "project"
    project.mkdir()
    script = project / "hello.py"
    write = ("write", {"filePath": str(script), "content": "print(6 * 7)\n"})
    execute = ("bash", {"command": f"python3 {script}", "description": "run it"})
    replies = [
        Reply("Generate a title", thought("", "Hello")),
        Reply("make hello.py", "I write it.<|END_THINKING|>" + action(write)),
        Reply("Wrote file", "I run it.<|END_THINKING|>" + action(execute)),
        Reply("42", thought("Good.", "It printed 42.")),
    ]
    pages = {"full": 2 * CONTEXT // 64, "sliding": 1024}
    engine = ScriptedEngine(NANO_GEOMETRY, Replies(TOKENIZER, replies), 4, CONTEXT, pages)
    with serving(engine=engine) as served:
        allowed = {"edit": "allow", "bash": "allow", "external_directory": "allow"}
        settings = {**opencode(served.url, served.service), "permission": allowed}
        (project / "opencode.json").write_text(json.dumps(settings))
        subprocess.run(["git", "init", "-q", str(project)], check=True)
        home = {key: str(tmp_path / key) for key in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")}
        for folder in home.values():
            Path(folder).mkdir()
        home["OPENCODE_CONFIG"] = str(project / "opencode.json")
        quiet = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
        ran = subprocess.run(
            [AGENT, "run", "make hello.py and run it"],
            cwd=project,
            env={**os.environ, **home, **quiet, "PWD": str(project)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
        )
        served.assert_idle()
    assert ran.returncode == 0 and script.exists(), ran.stdout + ran.stderr
    assert script.read_text() == "print(6 * 7)\n" and "It printed 42." in ran.stdout
    assert served.service.worker.core.totals.cached_tokens > 10_000  # turns begin with what the last one held
