"""The evaluation's dealings with servers: refusals before one is asked, one that is killed, equal bytes for all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request

import evals.asked
import run as front_door
from evals.samples import read_samples
from mk.compose import load_config
from mk.errors import MkError
from mk.server.app import create_app
from mk.server.launch import listen
from tests.eval_rig import CHECKS, run, scripted
from tests.test_accuracy_benchmarks import AIME_REPLIES, aime

ROOT = Path(__file__).resolve().parent.parent


def command(*arguments: str) -> int:
    """The exit status of run.py, in this process."""
    return front_door.main(["experiment=accuracy", *arguments])


def test_what_cannot_or_must_not_be_done_is_exit_2_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = [f"experiment.data_dir={tmp_path}", f"run_dir={tmp_path / 'runs'}"]

    def refused(*arguments: str) -> str:
        assert command(*here, *arguments) == 2
        said = capsys.readouterr()
        assert said.err.count("error: ") == 1 and "hint: " in said.err
        return said.out + said.err

    data = aime(tmp_path)
    replies = scripted(tmp_path, AIME_REPLIES)
    slow = refused(*data, *replies, "experiment.max_hours=0.0001")
    assert "model: answers from a script" in slow and "engine: scripted, 4 requests at a time" in slow
    assert "at most 4 answers of 8192 tokens" in slow
    assert all(word in slow.split("hint:")[1] for word in ("limit=", "base_url=", "model="))
    assert "its score only proves the pipeline" in refused(*data)
    assert "gpqa.jsonl does not exist" in refused("benchmark=gpqa", *replies)
    assert "does not answer" in refused(*data, "experiment.base_url=http://127.0.0.1:9/v1")
    assert "has no paged KV" in refused(*data, "experiment.limit=1", "engine=reference")
    assert "nothing to score" in refused("benchmark=none")
    assert not (tmp_path / "runs").exists()


@contextmanager
def serve(root: Path, replies: list[str], port: int) -> Iterator[subprocess.Popen[str]]:
    """A server of a scripted model in a process of its own, which slowly says its answers."""
    arguments = [sys.executable, "run.py", "experiment=serve", f"server.port={port}", *replies]
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=dict(os.environ)
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving nano")
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_killed_server_gives_no_score_and_resume_goes_on(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    long = ("so " * 300, r"\boxed{0}")
    replies = scripted(tmp_path, [("What is 0", long[1]), ("What is 1", long[1]), ("What is", "".join(long))])
    overrides = [*aime(tmp_path), f"experiment.base_url=http://127.0.0.1:{port}/v1", "experiment.limit=4",
                 "batch.size=1"]  # fmt: skip
    runs = tmp_path / "runs"
    with serve(tmp_path, replies, port) as process:

        def kill_half_way() -> None:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                if any(len(path.read_text().splitlines()) >= 2 for path in runs.glob("*/samples.jsonl")):
                    break
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_half_way)
        killer.start()
        with pytest.raises(MkError, match="there is no score") as broken:
            run(tmp_path, *overrides)
        killer.join()
    (folder,) = runs.iterdir()
    kept = {sample.key: sample for sample in read_samples(folder)}
    assert 2 <= len(kept) < 4 and not (folder / "rows.jsonl").exists()
    assert f"experiment.resume={folder} goes on from the {len(kept)} samples" in str(broken.value.hint)
    with serve(tmp_path, replies, port):
        ran = run(tmp_path, *overrides, f"experiment.resume={folder}")
    assert ran.status == 0 and ran.row.checks == CHECKS and ran.row.engine == "served" and ran.row.score == 0.25
    assert ran.row.tok_s is None and len(ran.samples) == 4
    assert all(kept[sample.key] == sample for sample in ran.samples if sample.key in kept)


def test_every_engine_gets_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in server and another at a base_url hear equal bytes, and their rows have equal hashes."""
    heard: list[list[bytes]] = []

    def listening(*arguments: Any) -> FastAPI:
        app = create_app(*arguments)
        bodies: list[bytes] = []
        heard.append(bodies)

        @app.middleware("http")
        async def note(request: Request, call_next: Any) -> Any:
            if request.method == "POST":
                bodies.append(await request.body())
            return await call_next(request)

        return app

    monkeypatch.setattr(evals.asked, "create_app", listening)
    overrides = [*aime(tmp_path), *scripted(tmp_path, AIME_REPLIES), "experiment.runs=2"]
    first = run(tmp_path, *overrides)
    with evals.asked.own_server(load_config(["experiment=accuracy", *overrides])) as other:
        url = f"experiment.base_url={other.engine.url}"
        second = run(tmp_path, *overrides, "experiment.limit=4", url, f"experiment.compare={first.folder}")
    assert sorted(heard[0]) == sorted(heard[1]) and len(set(heard[0])) == 2 * 4 + 8
    assert first.row.requests_hash == second.row.requests_hash
    assert (first.row.engine, second.row.engine) == ("scripted", "served") and second.row.score_difference == 0.0
    assert all(b'"stop"' not in body for body in heard[0])
    third = run(tmp_path, *overrides, "sampling.seed=5")
    assert third.row.requests_hash != first.row.requests_hash
