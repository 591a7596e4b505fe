"""Real agents against the server, as a scripted model tells them to: OpenCode, Cline and Aider solve one task of
experiment=agent_trial and fail at another, LangChain calls a tool.

`make agents` installs them (LangChain: `make test-agents`); elsewhere they are skipped.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import agent_trial
from experiments.agents.programs import INSTALLED, Place
from experiments.agents.trace import Trace
from mk.compose import load_config
from mk.engines.scripted import Reply
from mk.results.rows import Row, read_rows
from tests.agent_tasks import ASKED, RANGES
from tests.promotion import folder_of
from tests.server_rig import action, serving, thought

OPENCODE = INSTALLED / "node_modules" / ".bin" / "opencode"
CLINE = INSTALLED / "node_modules" / ".bin" / "cline"
AIDER = INSTALLED / "aider" / "bin" / "aider"
LANGCHAIN = INSTALLED / "langchain" / "bin" / "python"
CONTEXT = 65536  # nano's tokens are short, and an agent's instructions are long
WRONG = "def share(cents, people):\n    return {}\n"
MODEL = [
    *("model=nano", "weights=checkpoint", "gpu=cpu", "engine=scripted", "prefill=torch", "wave_order=default"),
    *("server=default", f"server.context={CONTEXT}", f"server.kv_tokens.full={2 * CONTEXT}"),
    *(f"server.kv_tokens.sliding={CONTEXT}", "baseline=none", "experiment.warm=0", "experiment.limit_s=120"),
]


def tried(root: Path, agent: str, program: Path, replies: Sequence[tuple[str, str]]) -> tuple[list[Row], Path]:
    """(rows, run folder) of two tasks, over a server of its own."""
    script = root / "script.json"
    script.write_text(json.dumps([{"when": when, "say": say} for when, say in replies]))
    more = [f"agent={agent}", f"agent.program={program}", f"engine.script={script}", f"run_dir={root / 'runs'}"]
    tasks = "experiment.tasks=[write_ranges,mend_ledger]"
    assert agent_trial.main(load_config(["experiment=agent_trial", *MODEL, *more, tasks])) == 0
    folder = folder_of(root / "runs")
    return read_rows(folder / "rows.jsonl"), folder


def require_one_solved(rows: Sequence[Row], folder: Path, agent: str, version: str, turns: tuple[int, int]) -> None:
    solved, failed = rows
    assert (solved.success, failed.success) == (True, False), folder
    for row, least in zip(rows, turns, strict=True):
        assert row.agent == agent and version in (row.agent_version or "") and row.ended == "status 0"
        assert row.turns and row.turns >= least and row.answers == row.turns and row.ttft_ms and row.itl_p50_ms
    told = folder / "transcripts"
    assert "+def parse_ranges(text):" in (told / "scripted-write_ranges" / "final.diff").read_text()
    assert f"+{WRONG.splitlines()[1]}" in (told / "scripted-mend_ledger" / "final.diff").read_text()
    trace = Trace.load(told / "scripted-write_ranges" / "trace.json")
    assert len(trace.turns) >= turns[0] - 1  # one may be of a title
    assert ASKED["write_ranges"] in json.dumps(trace.turns[0].given)


@pytest.mark.skipif(not OPENCODE.exists(), reason="OpenCode is not installed: make agents")
def test_opencode_solves_a_task_and_fails_at_another(tmp_path: Path) -> None:
    def do(name: str, **arguments: str) -> str:
        return "I do it.<|END_THINKING|>" + action((name, arguments))

    command = "python3 -c 'import ranges; print(ranges.parse_ranges(\"40-42\"))'"
    replies = [  # the request for a title gets the first reply too
        (ASKED["write_ranges"], do("write", filePath="ranges.py", content=RANGES)),
        ("Wrote file", do("bash", command=command, description="try it")),
        ("[40, 41, 42]", thought("Good.", "It reads ranges.")),
        (ASKED["mend_ledger"], do("read", filePath="ledger.py")),
        ("def balances", do("write", filePath="ledger.py", content=WRONG)),
    ]
    rows, folder = tried(tmp_path, "opencode", OPENCODE, replies)
    require_one_solved(rows, folder, "opencode", "1.18.33", (4, 4))
    assert (rows[0].hit_tokens or 0) > 10_000  # turns begin with what the last one held


@pytest.mark.skipif(not CLINE.exists(), reason="Cline is not installed: make agents")
def test_cline_solves_a_task_and_fails_at_another(tmp_path: Path) -> None:
    def command(text: str) -> str:
        return "I do it.<|END_THINKING|>" + action(("run_commands", {"commands": [text]}))

    def write(name: str, text: str) -> str:
        return command(f"cat > {name} <<'END'\n{text}END\necho written {name}")

    replies = [
        (ASKED["write_ranges"], write("ranges.py", RANGES)),
        ("written ranges.py", thought("Good.", "It reads ranges.")),
        (ASKED["mend_ledger"], write("ledger.py", WRONG)),
        ("written ledger.py", thought("Good.", "It is mended.")),
    ]
    rows, folder = tried(tmp_path, "cline", CLINE, replies)
    require_one_solved(rows, folder, "cline", "3.0.65", (2, 2))
    assert (rows[0].hit_tokens or 0) > 9_000


@pytest.mark.skipif(not AIDER.exists(), reason="Aider is not installed: make agents")
def test_aider_solves_a_task_and_fails_at_another(tmp_path: Path) -> None:
    replies = [
        (ASKED["write_ranges"], thought("A new file.", f"ranges.py\n```\n{RANGES}```\n")),
        (ASKED["mend_ledger"], thought("One file.", f"ledger.py\n```\n{WRONG}```\n")),
    ]
    rows, folder = tried(tmp_path, "aider", AIDER, replies)
    require_one_solved(rows, folder, "aider", "0.86.2", (1, 1))


@pytest.mark.skipif(not LANGCHAIN.exists(), reason="LangChain is not installed: make test-agents")
def test_langchain_calls_a_tool(tmp_path: Path) -> None:
    replies = [
        ("How warm is Oslo?", "I look.<|END_THINKING|>" + action(("weather", {"city": "Oslo"}))),
        ("12 degrees in Oslo", thought("Good.", "It is 12 degrees.")),
        ("greet me", thought("Politely.", "Good evening!")),
    ]
    with serving() as served:
        for when, say in replies:
            served.replies.add(Reply(when, say))
        url = f"{served.url}/v1"
        program = Path(__file__).parent / "langchain_agent.py"
        env = Place(tmp_path, tmp_path / "home", url, "nano", CONTEXT).environment()
        ran = subprocess.run([LANGCHAIN, program, url], env=env, capture_output=True, text=True, timeout=120)
        served.assert_idle()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said: list[Any] = [json.loads(line) for line in ran.stdout.splitlines()]
    assert said == [[{"city": "Oslo"}], "It is 12 degrees.", "Good evening!"]
