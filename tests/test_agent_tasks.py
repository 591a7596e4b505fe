"""experiment=agent_trial with a program: a stand-in for a coding agent, over a scripted model."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from experiments import agent_trial
from experiments.agents import programs, scoring
from experiments.agents.task import Task, diff, score
from experiments.agents.trace import Trace
from experiments.settings.serving import TASKS
from mk.compose import load_config
from mk.engines.scripted import Reply
from mk.errors import MkError
from mk.results.rows import Row, read_rows
from mk.sampling import SamplingParams
from tests.agent_tasks import ASKED, RANGES, SOLVED
from tests.promotion import committed, folder_of, no, repository, require_kept
from tests.server_rig import Served, serving, thought
from tests.small_runs import SERVED
from tests.test_serving_load import SITE

__all__ = ["committed", "repository"]

STAND_IN = Path(__file__).resolve().parent / "stand_in_agent.py"
SMALL = [
    "experiment=agent_trial",
    "agent=opencode",
    f"agent.program={STAND_IN}",
    "baseline=none",
    *SERVED,
    "experiment.warm=0",
    "experiment.limit_s=30",
]
ONE = "experiment.tasks=[write_ranges]"
FIRST = ASKED["write_ranges"]


def orders(*lines: str) -> str:
    return thought("", "\n".join(lines))


def write(name: str, text: str) -> str:
    return f"write {name} " + text.replace("\n", "\\n")


@contextmanager
def served(*replies: tuple[str, str]) -> Iterator[Served]:
    """A server in this process, which has nothing left to do at the end."""
    with serving(pages=200) as running:
        for when, say in replies:
            running.replies.add(Reply(when, say))
        yield running
        running.assert_idle()


def tried(url: str, root: Path, *overrides: str) -> tuple[int, list[Row], Path]:
    """(exit status, rows, run folder)"""
    place = [f"experiment.base_url={url}/v1", f"run_dir={root / 'runs'}"]
    status = agent_trial.main(load_config([*SMALL, *place, *overrides]))
    folder = folder_of(root / "runs")
    return status, read_rows(folder / "rows.jsonl"), folder


def transcript(folder: Path, name: str) -> tuple[str, list[dict[str, Any]]]:
    """(what the agent printed, its requests)"""
    told = folder / "transcripts" / name
    lines = (told / "requests.jsonl").read_text().splitlines()
    return (told / "agent.log").read_text(), [json.loads(line) for line in lines]


def runs(pid: int) -> bool:
    return Path("/proc", str(pid), "cmdline").exists() and Path("/proc", str(pid), "cmdline").read_bytes() != b""


# ---- the tasks ----


@pytest.mark.parametrize("name", sorted(path.name for path in TASKS.iterdir() if path.is_dir()))
def test_a_task_fails_as_it_is_found_and_passes_when_solved(name: str, tmp_path: Path) -> None:
    task, env = Task.load(name), {"HOME": str(tmp_path)}
    folder = shutil.copytree(task.start, tmp_path / "project")
    before = score(folder, task.test, env, tmp_path / "log")
    assert before is None or before["failed"] > 0
    for file, text in SOLVED[name].items():
        (folder / file).write_text(text)
    after = score(folder, task.test, env, tmp_path / "log")
    assert after is not None and after["ran"] >= 3 and after["failed"] == 0, (tmp_path / "log").read_text()
    assert ASKED[name] in task.prompt and sum(ASKED[name] in Task.load(other).prompt for other in SOLVED) == 1


FORGED = ['{"ran": 1, "failed": 0}', '{"nonce": "", "ran": 5, "failed": 0}']


def test_all_of_a_tasks_tests_are_counted() -> None:
    for path in TASKS.glob("*/test.py"):
        text = path.read_text()
        assert scoring.tests_in(path) == text.count("def test") > 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unittest.py", "def defaultTestLoader(): pass\n"),  # not the standard library's
        ("ranges.py", "import os\nos._exit(0)\n"),
        ("ranges.py", 'raise SystemExit(0)\nprint(\'{"ran": 1, "failed": 0}\')\n'),
        ("ranges.py", "def parse_ranges(text:\n"),
        *(
            ("ranges.py", f"import os, sys\n{text}\n")
            for text in (
                *(f"print({said!r}, flush=True); os._exit(0)" for said in FORGED),
                *(f"sys.stderr.write({said!r}); sys.stderr.flush(); os._exit(0)" for said in FORGED),
                f"[open(path, 'w').write({FORGED[1]!r}) for path in sys.argv[1:]]; os._exit(0)",
                f"import atexit; atexit.register(print, {FORGED[0]!r})\nsys.exit(0)",
                # no test is run, of a kind that has none
                "import unittest; unittest.TestCase.run = lambda self, result=None: None\nparse_ranges = None",
                "import unittest; unittest.TestLoader.getTestCaseNames = lambda *_: []\nparse_ranges = None",
                "def parse_ranges(text): os._exit(0)",
            )
        ),
    ],
)
def test_what_only_looks_solved_is_not(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    found = score(tmp_path, Task.load("write_ranges").test, {"HOME": str(tmp_path)}, tmp_path / "log")
    assert found is None


def test_a_diff_shows_what_came_went_and_changed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "same.py").write_text("same\n")
    (old / "gone.py").write_text("was\n")
    (new / "came.py").write_text("is")
    (new / "image").write_bytes(b"\xff\xfe")
    (new / ".hidden").write_text("of the agent\n")
    (new / "link").symlink_to("/etc/hostname")
    text = "".join(diff(old, new))
    assert "+is\n\\ No newline" in text and "-was\n" in text and "--- /dev/null\n+++ b/came.py" in text
    assert "+(2 bytes)" in text and not any(word in text for word in ("same", "hidden", "link"))


# ---- a whole trial ----


def test_tasks_are_tried_over_our_server_and_their_rows_are_kept(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is solved in two turns, one is not, one not even tried to."""
    script = [
        {"when": FIRST, "say": orders(write("ranges.py", RANGES), "more")},
        {"when": "wrote ranges.py", "say": orders("It is written.")},
        {"when": ASKED["mend_ledger"], "say": orders(write("ledger.py", "share = balances = None\n"))},
    ]
    (tmp_path / "script.json").write_text(json.dumps(script))
    scripted = ["engine=scripted", f"engine.script={tmp_path / 'script.json'}", f"run_dir={tmp_path / 'runs'}"]
    assert agent_trial.main(load_config([*SMALL, *scripted, "experiment.warm=20"])) == 0
    folder = folder_of(tmp_path / "runs")
    rows = read_rows(folder / "rows.jsonl")
    assert [(row.workload, row.success, row.turns, row.ended) for row in rows] == [
        ("write_ranges", True, 2, "status 0"),
        ("mend_ledger", False, 1, "status 0"),
        ("rename_lookup", False, 1, "status 0"),
    ]
    for row in rows:
        assert (row.engine, row.agent, row.agent_version) == ("scripted", "opencode", "1.0")
        assert row.answers == row.turns and row.usage_completion_tokens > 5 and row.wall_s > 0
        assert row.ttft_ms and row.itl_p50_ms and row.sampling == "temperature 0" and all(row.checks.values())
    said, asked = transcript(folder, "scripted-write_ranges")
    assert "It is written." in said and [turn["tokens"] for turn in asked] == [
        turn["tokens"] for turn in asked if turn["whole"] and turn["finish"] == "stop" and turn["ttft_ms"] > 0
    ]
    assert rows[0].hit_tokens == sum(turn["cached"] for turn in asked) > 0 == asked[0]["cached"]
    assert rows[0].usage_prompt_tokens == sum(turn["prompt_tokens"] for turn in asked)
    assert rows[0].context == [asked[1]["prompt_tokens"]] and "more" in asked[0]["answer"]["content"]
    assert "+def parse_ranges(text):" in (folder / "transcripts/scripted-write_ranges/final.diff").read_text()
    assert "OK" in (folder / "transcripts/scripted-write_ranges/test.log").read_text()
    assert (folder / "transcripts/scripted-rename_lookup/final.diff").read_text() == ""
    assert "opencode 1.0 over scripted: 1 of 3 tasks" in capsys.readouterr().out
    trace = Trace.load(folder / "transcripts/scripted-write_ranges/trace.json")
    assert [turn.tokens for turn in trace.turns] == [turn["tokens"] for turn in asked]
    assert trace.bodies(1, SamplingParams())[1]["messages"] == asked[1]["request"]["messages"]
    edits = dict.fromkeys(("turns", "usage_prompt_tokens", "hit_tokens", "wall_s", "ttft_ms"), lambda value: value + 1)
    edits |= {"success": lambda value: not value, "ended": lambda value: "status 9", "checks": no}
    require_kept(committed, folder, **edits)


def test_an_agent_is_tried_over_vllm_too_with_its_parsers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_VLLM", "parsers")
    (tmp_path / "script.json").write_text(json.dumps([{"when": FIRST, "say": orders(write("ranges.py", RANGES))}]))
    both = ["baseline=vllm", f"baseline.vllm.site={SITE}", "engine=scripted", f"run_dir={tmp_path / 'runs'}"]
    assert agent_trial.main(load_config([*SMALL, *both, f"engine.script={tmp_path / 'script.json'}", ONE])) == 0
    folder = folder_of(tmp_path / "runs")
    ours, theirs = read_rows(folder / "rows.jsonl")
    assert (ours.engine, ours.success, theirs.engine, theirs.success) == ("scripted", True, "vllm", False)
    assert theirs.usage_completion_tokens == 500 and theirs.hit_tokens == 1 and theirs.ratio is None and theirs.version
    assert (folder / "transcripts" / "vllm-write_ranges" / "requests.jsonl").exists()
    assert "over vllm: 0 of 1 tasks" in capsys.readouterr().out


@pytest.mark.parametrize("agent", programs.PROGRAMS)
def test_every_agent_is_told_the_server_and_the_prompt(agent: str, tmp_path: Path) -> None:
    with served((FIRST, orders(write("ranges.py", RANGES)))) as running:
        status, (row,), _ = tried(running.url, tmp_path, ONE, f"agent={agent}", f"agent.program={STAND_IN}")
    assert (status, row.success, row.agent, row.engine, row.model) == (0, True, agent, "served", "nano")


def test_an_agent_sees_an_environment_and_a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "the real key")
    with serving(api_key="the real key") as running:
        running.replies.add(Reply(FIRST, orders("run ls -A; git log --oneline", "more")))
        status, (row,), folder = tried(running.url, tmp_path, ONE)
    said, asked = transcript(folder, "served-write_ranges")
    environment = json.loads(said.splitlines()[0].removeprefix("environment "))
    assert not {"secret", "the real key"} & set(environment.values()) and "SOME_TOKEN" not in environment
    assert all(environment[name] != os.environ.get(name) for name in programs.OWN)
    assert not Path(environment["HOME"]).exists()  # any more
    given = asked[1]["request"]["messages"][-1]["content"]
    assert ".git" in given and "README.md" in given and "start" in given and "test.py" not in given
    assert status == 0 and row.turns == 2 and not row.success
    assert not [path for path in folder.rglob("*") if path.is_file() and b"the real key" in path.read_bytes()]


def test_what_was_recorded_can_be_sent_again(tmp_path: Path) -> None:
    with served((FIRST, orders("run seq 5", "more")), ("status 0", orders("Done."))) as running:
        _, (row,), folder = tried(running.url, tmp_path, ONE)
        trace = folder / "transcripts/served-write_ranges/trace.json"
        agent = ["agent=replay", f"agent.trace={trace}", f"experiment.base_url={running.url}/v1"]
        runs = tmp_path / "again"
        assert agent_trial.main(load_config([*SMALL[:1], *agent, *SMALL[3:], f"run_dir={runs}"])) == 0
    (again,) = read_rows(folder_of(runs) / "rows.jsonl")
    assert (again.agent, again.answers, again.workload) == ("replay", row.turns, "trace")
    assert again.usage_completion_tokens == row.usage_completion_tokens


def test_an_agent_that_takes_its_folder_away_fails(tmp_path: Path) -> None:
    with served((FIRST, orders("run rm -rf ../project"))) as running:
        status, (row,), folder = tried(running.url, tmp_path, ONE)
    assert (status, row.ended, row.success) == (0, "status 0", False)
    assert "-A print dialog." in (folder / "transcripts/served-write_ranges/final.diff").read_text()


# ---- ends ----


def test_an_agent_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    with served((FIRST, orders("stay"))) as running:
        status, (row,), folder = tried(running.url, tmp_path, ONE, "experiment.limit_s=2")
    assert (status, row.ended, row.success) == (0, "time limit", False) and 2 <= row.wall_s < 10
    assert "a child stays" in transcript(folder, "served-write_ranges")[0]
    assert not runs(child_of(folder))


def test_what_an_answer_had_brought_when_it_was_cut_off_is_counted(tmp_path: Path) -> None:
    def slow(history: Sequence[int]) -> dict[int, float]:
        time.sleep(0.02)
        return {20: 30.0}

    with served() as running:
        running.overrides[""] = slow
        status, (row,), _ = tried(running.url, tmp_path, ONE, "experiment.limit_s=2")
    assert (status, row.ended, row.turns, row.answers) == (0, "time limit", 1, 0)
    assert row.usage_prompt_tokens and 3 < (row.usage_completion_tokens or 0) < 150 and (row.itl_p50_ms or 0) > 15


def test_what_an_agent_leaves_behind_is_ended(tmp_path: Path) -> None:
    with served((FIRST, orders(write("ranges.py", RANGES), "leave"))) as running:
        status, (row,), folder = tried(running.url, tmp_path, ONE)
    assert (status, row.ended, row.success) == (0, "status 0", True)
    assert not runs(child_of(folder))


def child_of(folder: Path) -> int:
    """The stand-in's, by the diff."""
    text = (folder / "transcripts/served-write_ranges/final.diff").read_text()
    return int(next(line for line in text.split("+++ b/child\n")[1].splitlines() if line.startswith("+"))[1:])


def test_an_agent_that_dies_has_a_row(tmp_path: Path) -> None:
    with served((FIRST, orders(write("ranges.py", RANGES), "die"))) as running:
        status, (row,), _ = tried(running.url, tmp_path, ONE)
    assert (status, row.ended, row.turns, row.success) == (0, "signal 9", 1, True)  # by the test alone


def test_an_agent_that_never_asks_fails_a_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "mute"
    program.write_text("#!/bin/sh\necho mute 1\n")
    program.chmod(0o755)
    with served() as running:
        status, (row,), _ = tried(running.url, tmp_path, ONE, f"agent.program={program}")
    assert (status, row.turns, row.ended, row.checks["was_asked"]) == (1, 0, "status 0", False)
    assert row.ttft_ms is None and "FAILED: was_asked" in capsys.readouterr().out


@pytest.mark.parametrize("agent", programs.PROGRAMS)
def test_a_missing_agent_is_told_how_to_install(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "BESIDE_PATH", ())
    cfg = load_config([*SMALL[:1], f"agent={agent}", *SMALL[3:], f"run_dir={tmp_path / 'runs'}"])
    with pytest.raises(MkError, match=f"agent={agent}: there is no program {agent}") as caught:
        agent_trial.main(cfg)
    assert "make agents" in str(caught.value.hint) and not (tmp_path / "runs").exists()


def test_an_agent_that_cannot_be_set_up_is_told(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho no node here\nexit 3\n')
    program.chmod(0o755)
    with served() as running, pytest.raises(MkError, match="broken auth .*: status 3: no node here"):
        tried(running.url, tmp_path, ONE, "agent=cline", f"agent.program={program}")
    (log,) = tmp_path.rglob("agent-auth.log")
    assert log.read_text() == "no node here\n"


@pytest.mark.parametrize("agent", programs.PROGRAMS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/no/such/interpreter\n", "cannot be executed: No such file"),
        ("no program\n", "cannot be executed: Exec format error"),
        ("\x7fELF", "cannot be executed: Exec format error"),
        ("#!/bin/sh\necho no node here\nexit 3\n", "--version: status 3: no node here"),
        ("#!/bin/sh\nkill -9 $$\n", "--version: signal 9"),
    ],
)
def test_a_program_that_does_not_run_is_told_before_a_server_starts(
    agent: str, text: str, said: str, tmp_path: Path
) -> None:
    program = tmp_path / "broken"
    program.write_text(text)
    program.chmod(0o755)
    cfg = load_config([*SMALL, f"agent={agent}", f"agent.program={program}", f"run_dir={tmp_path / 'runs'}"])
    with pytest.raises(MkError, match=f"agent.program={program} does not run: .*{said}") as caught:
        agent_trial.main(cfg)
    assert "make agents" in str(caught.value.hint) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ('{"when": "hi", "say": "yes"}', "a list of replies, not"),
        ("[5]", "must be a mapping"),
        ('[{"when": "hi"}]', "say"),
        ('[{"when": "hi", "say": "yes", "then": 1}]', "then"),
        ('[{"when": 5, "say": "yes"}]', "a text to say at a text, not 'yes' at 5"),
        ('[{"when": "hi", "say": null}]', "not None at 'hi'"),
        ('[{"when": "hi", "say": ["yes"]}]', "a text to say"),
        ('[{"when": "hi", "say": [1, true, -1]}]', "a text to say"),
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_script_that_is_none_is_told_before_a_server_starts(text: str | None, said: str, tmp_path: Path) -> None:
    script = tmp_path / "replies.json"
    if text is not None:
        script.write_text(text)
    more = ["engine=scripted", f"engine.script={script}", f"run_dir={tmp_path / 'runs'}"]
    with pytest.raises(MkError, match=f"engine.script={script}: .*{said}") as caught:
        agent_trial.main(load_config([*SMALL, *more]))
    assert '"when"' in str(caught.value.hint) and not (tmp_path / "runs").exists()


def test_an_agent_has_to_be_chosen() -> None:
    with pytest.raises(MkError, match="needs an agent"):
        agent_trial.main(load_config(["experiment=agent_trial", "agent=none"]))
    with pytest.raises(MkError, match="experiment.tasks=write_novel is not one of") as caught:
        load_config(["experiment=agent_trial", "experiment.tasks=[write_novel]"])
    assert "write_ranges" in str(caught.value)
    with pytest.raises(MkError, match="experiment.tasks names 'write_ranges' twice"):
        load_config(["experiment=agent_trial", "experiment.tasks=[write_ranges,write_ranges]"])


@pytest.mark.parametrize("amid", [False, True], ids=["before an answer", "amid one"])
def test_a_server_that_goes_away_ends_the_trial(amid: bool, tmp_path: Path) -> None:
    class Dying(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "m", "max_model_len": 2048}]}).encode())

        def do_POST(self) -> None:
            if amid:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'data: {"choices": [{"index": 0, "delta": {"content": "I"}}]}\n\n')
            self.server.shutdown()
            self.server.server_close()
            self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Dying)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    with pytest.raises(MkError, match="the server went away while the agent worked"):
        tried(f"http://127.0.0.1:{server.server_port}", tmp_path, ONE, "experiment.limit_s=20")
    (requests,) = tmp_path.rglob("requests.jsonl")
    (turn,) = map(json.loads, requests.read_text().splitlines())
    assert turn["error"] and not turn["whole"] and turn["status"] == (200 if amid else 0)


def test_a_server_that_refuses_is_the_agents_to_deal_with(tmp_path: Path) -> None:
    """One request is beyond the context, as far as the server says; the agent ends, and so it is told."""
    with served((FIRST, orders("run seq 5000", "more"))) as running:
        status, (row,), folder = tried(running.url, tmp_path, ONE)
    _, asked = transcript(folder, "served-write_ranges")
    assert [turn["status"] for turn in asked] == [200, 400] and "context" in asked[1]["error"]
    assert (status, row.turns, row.answers, row.ended) == (0, 2, 1, "status 1")
