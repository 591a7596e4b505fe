"""The evaluation's core: seeds, resuming, refusals, figures; against scripts and a stand-in for a foreign server."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from evals.benchmarks import open_benchmark
from evals.benchmarks.base import Benchmark
from evals.completion import Completion, Request
from evals.figures import bootstrap_difference, mean_and_sd
from evals.harness import evaluate
from evals.preflight import estimate, require_affordable
from evals.report import Finished, raw_answers, summarise, write_report, write_scores
from evals.runner import Answers, Job, Runner
from evals.samples import FILE, SampleStore, read_samples
from experiments.accuracy import main
from mk.compose import load_config
from mk.errors import MkError
from mk.results.rows import read_rows
from mk.sampling import SamplingParams
from tests.promotion import committed, no, repository, require_kept
from tests.test_benchmarks import SCICODE_ROW, scicode

__all__ = ["committed", "repository"]

SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=7)


class Scripted:
    """Answers what a function of the request says, newest first; dies after `dies_after` answers."""

    name = "scripted"
    parallel = 2

    def __init__(self, script: Callable[[Request], str], dies_after: int | None = None) -> None:
        self.requests: list[Request] = []
        self._script, self._left = script, dies_after
        self._waiting: deque[tuple[Hashable, Request]] = deque()

    def submit(self, key: Hashable, request: Request) -> None:
        self.requests.append(request)
        self._waiting.append((key, request))

    def collect(self) -> list[tuple[Hashable, Completion]]:
        if self._left == 0:
            raise MkError("the server is gone")
        self._left = None if self._left is None else self._left - 1
        key, request = self._waiting.pop()
        content = self._script(request)
        return [(key, Completion(content, "", "stop" if content else "length", 10, 5, 0.1))]

    def close(self) -> None:
        self._waiting.clear()


@pytest.fixture
def aime(tmp_path: Path) -> Benchmark:
    rows = [{"id": f"p{n}", "problem": f"number {n}", "answer": str(n)} for n in range(4)]
    (tmp_path / "aime2025.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(["benchmark=aime2025", "benchmark.count=4", "benchmark.sha256=null"]).benchmark
    return open_benchmark(config, tmp_path)


def first_half(request: Request) -> str:
    """Right about 0 and 1, and nothing but a thought of 3."""
    problem = request.prompt.messages[-1]["content"].split("\n")[0]
    return {"number 0": r"\boxed{000}", "number 1": r"\boxed{1}", "number 2": r"\boxed{1}"}.get(problem, "")


def test_runs_have_their_own_seeds_and_the_known_score(aime: Benchmark, tmp_path: Path) -> None:
    engine = Scripted(first_half)
    store = SampleStore(tmp_path / FILE, "scripted", "m")
    runner = Runner(engine, SAMPLED, 64000, store)
    found = evaluate(aime, aime.problems, 3, runner)
    assert [[score.unit for score in run] for run in found.scores] == [[f"p{n}" for n in range(4)]] * 3
    asked = [(request.sampling.seed, request.prompt.messages[0]["content"]) for request in engine.requests]
    assert len(set(asked)) == len(asked) == runner.sent == 12 and {seed for seed, _ in asked} == {7, 8, 9}
    assert all(request.max_tokens == 64000 and request.sampling.top_p == 0.95 for request in engine.requests)
    assert found.results["results"]["aime2025"]["score,none"] == 0.5
    raw = raw_answers([sample.completion for sample in store], found.scores, 2.0)
    result = summarise(aime, raw, found.scores, runner.requests)
    assert result.figures == [{"score": 0.5}] * 3 and (result.mean, result.sd) == (0.5, 0.0)
    assert (result.answers, result.truncated, result.completion_tokens, result.wall_s) == (12, 3, 60, 2.0)
    assert [sample.completion.content for sample in read_samples(tmp_path) if sample.problem == "p1"] == [
        r"\boxed{1}"
    ] * 3


def test_requests_are_equal_by_their_hash_and_carry_no_stops(aime: Benchmark) -> None:
    request = Request(next(aime.conversation(aime.problems[0])), 8, SAMPLED)
    fields = {"messages", "max_tokens", "temperature", "top_p", "seed"}
    assert set(request.body()) == {*fields, "return_token_ids"}
    assert set(dataclasses.replace(request, token_ids=False).body()) == fields
    assert request.digest == Request(next(aime.conversation(aime.problems[0])), 8, SAMPLED).digest
    others = [dataclasses.replace(request, max_tokens=9), dataclasses.replace(request, sampling=SamplingParams())]
    assert len({request.digest, *(other.digest for other in others)}) == 3


def test_what_broke_off_goes_on_from_its_samples(aime: Benchmark, tmp_path: Path) -> None:
    broken, resumed = tmp_path / "broken", tmp_path / "resumed"
    broken.mkdir(), resumed.mkdir()
    runner = Runner(Scripted(first_half, dies_after=5), SAMPLED, 64000, SampleStore(broken / FILE, "scripted", "m"))
    with pytest.raises(MkError, match="the server is gone"):
        evaluate(aime, aime.problems, 2, runner)
    with (broken / FILE).open("a") as file:
        file.write('{"engine": "scri')  # a line that was cut off
    assert len(read_samples(broken)) == 5
    with (broken / FILE).open("ab") as file:
        file.write("\u00e9".encode()[:1])  # in the middle of a character
    assert len(read_samples(broken)) == 5
    store = SampleStore(resumed / FILE, "scripted", "m")
    store.resume(broken)
    engine = Scripted(first_half)
    found = evaluate(aime, aime.problems, 2, Runner(engine, SAMPLED, 64000, store))
    assert len(engine.requests) == 3 and len(read_samples(resumed)) == 8
    assert list(map(aime.figures, found.scores)) == [{"score": 0.5}] * 2
    # stored answers to other requests are no answers to these
    again = SampleStore(tmp_path / "again.jsonl", "scripted", "m")
    again.resume(broken)
    engine = Scripted(first_half)
    evaluate(aime, aime.problems, 2, Runner(engine, dataclasses.replace(SAMPLED, seed=100), 64000, again))
    assert len(engine.requests) == 8
    with pytest.raises(MkError, match="not other on m"):
        SampleStore(tmp_path / "third.jsonl", "other", "m").resume(broken)
    (broken / FILE).write_text("{}\n{}\n")
    with pytest.raises(MkError, match=r"samples.jsonl:1: not a sample"):
        read_samples(broken)


def converse(bench: Benchmark, runner: Runner) -> list[Answers]:
    return runner.run([Job(0, problem.id, bench.conversation(problem)) for problem in bench.problems])


def test_steps_are_asked_one_after_the_other_and_resumed_in_the_middle(tmp_path: Path) -> None:
    bench = scicode(tmp_path, [SCICODE_ROW])
    engine = Scripted(lambda request: f"```python\ncode_{request.prompt.messages[-1]['content'].count('code_')}\n```")
    store = SampleStore(tmp_path / FILE, "scripted", "m")
    (answers,) = converse(bench, Runner(engine, SAMPLED, 100, store))
    assert answers.contents == ["```python\ncode_0\n```", "```python\ncode_1\n```"]
    half = SampleStore(tmp_path / "half.jsonl", "scripted", "m")
    half.add(0, "900", 0, 7, engine.requests[0].digest, answers.completions[0])
    engine = Scripted(lambda request: "second")
    (resumed,) = converse(bench, Runner(engine, SAMPLED, 100, half))
    assert resumed.contents == ["```python\ncode_0\n```", "second"] and len(engine.requests) == 1


def test_the_preflight_refuses_what_would_take_too_long(aime: Benchmark) -> None:
    engine = Scripted(first_half)
    found = estimate(aime, aime.problems, 7, engine, SAMPLED)
    assert found.requests == 28 and len(engine.requests) == found.probed == 4 and found.cap == 64000
    assert estimate(aime, aime.problems, 7, Scripted(first_half), SAMPLED, context=8192).cap == 8192
    assert [request.max_tokens for request in engine.requests] == [2, 2, 32, 32]  # the first two are not timed
    slow = dataclasses.replace(found, hours=1.5)
    with pytest.raises(MkError, match=r"may take 1\.5 hours, experiment\.max_hours is 1") as refused:
        require_affordable(slow, 1.0)
    assert all(word in str(refused.value.hint) for word in ("limit=", "base_url=", "model="))
    require_affordable(slow, 2.0)


def test_the_difference_of_two_engines(aime: Benchmark, tmp_path: Path) -> None:
    folders = []
    results = []
    for name, script in (("a", first_half), ("b", lambda request: "")):
        folder = tmp_path / name
        folder.mkdir()
        store = SampleStore(folder / FILE, name, "m")
        runner = Runner(Scripted(script), SAMPLED, 64000, store)
        scores = evaluate(aime, aime.problems, 2, runner).scores
        raw = raw_answers([sample.completion for sample in store], scores, 1.0)
        result = summarise(aime, raw, scores, runner.requests)
        write_scores(folder, scores)
        write_report(folder, result)
        folders.append(folder)
        results.append((scores, result.requests_hash))
    mine = [[score.correct for score in run] for run in results[0][0]]
    found = bootstrap_difference(mine, Finished.read(folders[1]).of(*results[0]))
    assert found.mean == 0.5 and 0 <= found.low < 0.5 < found.high <= 1
    with pytest.raises(MkError, match="was asked other requests"):
        Finished.read(folders[1]).of(results[0][0], "0")
    with pytest.raises(MkError, match=f"experiment.compare={tmp_path} is no finished evaluation"):
        Finished.read(tmp_path)
    for name, text in (
        ("report.json", "{}"),
        ("scores.jsonl", "[]\n"),
        ("scores.jsonl", '{"run": "x"}\n'),
        ("scores.jsonl", ""),
    ):
        broken = shutil.copytree(folders[1], tmp_path / f"{name}{len(text)}")
        (broken / name).write_text(text)
        with pytest.raises(MkError, match="is no finished evaluation|has no score of|has no scores"):
            Finished.read(broken).of(*results[0])


def test_the_bootstrap_interval_covers_what_it_should() -> None:
    """Of two engines of equal skill, 95 % of the intervals hold 0: of 60, at least 50."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(60):
        ours, theirs = (rng.random((1, 200)) < 0.4 for _ in range(2))
        found = bootstrap_difference(ours.tolist(), theirs.tolist(), draws=400)
        held += found.low <= 0 <= found.high
        assert found.low < found.mean < found.high
    assert held >= 50
    assert mean_and_sd([0.2, 0.4]) == (pytest.approx(0.3), pytest.approx(0.1414, abs=1e-4))
    assert mean_and_sd([0.2]) == (0.2, None)


class Server(BaseHTTPRequestHandler):
    """Answers as an OpenAI server would, right every time, until it has answered `limit` requests."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    limit = 100
    takes_s = 0.0  # an answer; a refusal comes at once

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self.send_error(404)
            return
        self.reply({"data": [{"id": "theirs"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(self.bodies) >= self.limit:
            self.send_error(503)
            return
        self.bodies.append(body)
        self.keys.append(self.headers["Authorization"])
        time.sleep(self.takes_s)
        number = body["messages"][-1]["content"].split("\n")[0].removeprefix("number ")
        message = {"role": "assistant", "reasoning_content": r"\boxed{9}", "content": rf"\boxed{{{number}}}"}
        usage = {"prompt_tokens": 5, "completion_tokens": 7}
        self.reply({"id": f"r{number}", "usage": usage, "choices": [{"message": message, "finish_reason": "stop"}]})

    def reply(self, values: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(values).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Server, "bodies", [])
    monkeypatch.setattr(Server, "keys", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
        httpd.shutdown()


def served(root: Path, url: str) -> list[str]:
    return ["experiment=accuracy", "benchmark=aime2025", "benchmark.count=4", "benchmark.sha256=null",
            f"experiment.data_dir={root}", f"run_dir={root / 'runs'}", f"experiment.base_url={url}",
            "experiment.runs=2"]  # fmt: skip


def test_a_foreign_server_answers_without_ids_and_counts(
    aime: Benchmark,
    committed: Path,
    tmp_path: Path,
    server: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    assert main(load_config(served(tmp_path, server))) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    (row,) = read_rows(folder / "rows.jsonl")
    assert (row.engine, row.score, row.score_sd, row.answers, row.usage_completion_tokens) == (
        "served",
        1.0,
        0.0,
        8,
        56,
    )
    names = ("score", "score_sd", "answers", "truncated", "usage_completion_tokens", "wall_s", "tok_s")
    require_kept(committed, folder, **dict.fromkeys(names, lambda value: value + 1), scores=lambda _: [0.5], checks=no)
    sample = read_samples(folder)[0]
    assert sample.completion.response_id.startswith("r") and sample.completion.reasoning == r"\boxed{9}"
    asked = Server.bodies[8:]  # after the probe's
    assert sorted(body["seed"] for body in asked) == [0] * 4 + [1] * 4
    assert all(body["temperature"] == 1.0 and body["top_p"] == 0.95 and "stop" not in body for body in asked)
    assert {body["model"] for body in asked} == {"theirs"} and set(Server.keys) == {"Bearer a key"}
    out = capsys.readouterr().out
    assert row.tok_s == pytest.approx(row.usage_completion_tokens / row.wall_s) and "tokens/s" in out
    assert row.model == "theirs" and f"model: theirs\nengine: served at {server}" in out
    assert "the server counts no answers in /metrics" in out and "metrics_are_requests" not in row.checks
    with pytest.raises(MkError, match="does not serve ours, but theirs"):
        main(load_config([*served(tmp_path, server), "experiment.served_model=ours"]))


def test_a_server_that_dies_gives_no_score_and_a_way_on(
    aime: Benchmark, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "limit", 8 + 3)
    monkeypatch.setattr(Server, "takes_s", 0.2)
    with pytest.raises(MkError, match="answers 503") as broken:
        main(load_config([*served(tmp_path, server), "experiment.max_hours=10"]))
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / "rows.jsonl").exists() and f"experiment.resume={folder}" in str(broken.value.hint)
    kept = len(read_samples(folder))
    assert kept == 3  # what was being answered when it failed is not lost with it
    time.sleep(0.5)  # requests of the run that was given up may still be on their way
    monkeypatch.setattr(Server, "limit", 100)
    monkeypatch.setattr(Server, "bodies", [])
    monkeypatch.setattr(Server, "takes_s", 0.0)
    assert main(load_config([*served(tmp_path, server), f"experiment.resume={folder}"])) == 0
    assert len(Server.bodies) == 8 + 8 - kept
    with pytest.raises(MkError, match="does not answer"):
        main(load_config(served(tmp_path, "http://127.0.0.1:9/v1")))
