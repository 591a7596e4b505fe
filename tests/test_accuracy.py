"""The evaluation's core: seeds, resuming, refusals, figures; against scripts, a stand-in for a server, and nano."""

from __future__ import annotations

import dataclasses
import json
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
from evals.offline import split_reply
from evals.preflight import estimate, require_affordable
from evals.report import raw_answers, summarise, theirs, write_report, write_scores
from evals.runner import Runner, grade
from evals.samples import FILE, SampleStore, read_samples
from experiments.accuracy import main
from mk.compose import load_config
from mk.errors import MkError
from mk.model.opening import NANO
from mk.model.tokenizer import load_tokenizer
from mk.rows import read_rows
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
    runner = Runner(aime, engine, SAMPLED, SampleStore(tmp_path / FILE, "scripted", "m"))
    answers = runner.run(aime.problems, 3)
    assert [(a.run, a.problem.id) for a in answers] == [(run, f"p{n}") for run in range(3) for n in range(4)]
    assert sorted({request.sampling.seed for request in engine.requests}) == [7, 8, 9] and runner.sent == 12
    assert all(request.max_tokens == 64000 and request.sampling.top_p == 0.95 for request in engine.requests)
    scores = grade(aime, answers, 3, None)
    result = summarise(aime, raw_answers(answers, scores, 2.0), scores, runner.requests)
    assert result.figures == [{"score": 0.5}] * 3 and (result.mean, result.sd) == (0.5, 0.0)
    assert (result.answers, result.truncated, result.completion_tokens, result.tok_s) == (12, 3, 60, 30.0)
    assert [sample.completion.content for sample in read_samples(tmp_path) if sample.problem == "p1"] == [
        r"\boxed{1}"
    ] * 3


def test_requests_are_equal_by_their_hash_and_carry_no_stops(aime: Benchmark) -> None:
    request = Request(next(aime.conversation(aime.problems[0])), 8, SAMPLED)
    assert set(request.body()) == {"messages", "max_tokens", "temperature", "top_p", "seed"}
    assert request.digest == Request(next(aime.conversation(aime.problems[0])), 8, SAMPLED).digest
    others = [dataclasses.replace(request, max_tokens=9), dataclasses.replace(request, sampling=SamplingParams())]
    assert len({request.digest, *(other.digest for other in others)}) == 3


def test_what_broke_off_goes_on_from_its_samples(aime: Benchmark, tmp_path: Path) -> None:
    broken, resumed = tmp_path / "broken", tmp_path / "resumed"
    broken.mkdir(), resumed.mkdir()
    runner = Runner(aime, Scripted(first_half, dies_after=5), SAMPLED, SampleStore(broken / FILE, "scripted", "m"))
    with pytest.raises(MkError, match="the server is gone"):
        runner.run(aime.problems, 2)
    with (broken / FILE).open("a") as file:
        file.write('{"engine": "scri')  # a line that was cut off
    assert len(read_samples(broken)) == 5
    store = SampleStore(resumed / FILE, "scripted", "m")
    store.resume(broken)
    engine = Scripted(first_half)
    answers = Runner(aime, engine, SAMPLED, store).run(aime.problems, 2)
    assert len(engine.requests) == 3 and len(answers) == len(read_samples(resumed)) == 8
    assert list(map(aime.figures, grade(aime, answers, 2, None))) == [{"score": 0.5}] * 2
    # stored answers to other requests are no answers to these
    again = SampleStore(tmp_path / "again.jsonl", "scripted", "m")
    again.resume(broken)
    engine = Scripted(first_half)
    Runner(aime, engine, dataclasses.replace(SAMPLED, seed=100), again).run(aime.problems, 2)
    assert len(engine.requests) == 8
    with pytest.raises(MkError, match="not other on m"):
        SampleStore(tmp_path / "third.jsonl", "other", "m").resume(broken)
    (broken / FILE).write_text("{}\n{}\n")
    with pytest.raises(MkError, match=r"samples.jsonl:1: not a sample"):
        read_samples(broken)


def test_steps_are_asked_one_after_the_other_and_resumed_in_the_middle(tmp_path: Path) -> None:
    bench = scicode(tmp_path, [SCICODE_ROW])
    engine = Scripted(lambda request: f"```python\ncode_{request.prompt.messages[-1]['content'].count('code_')}\n```")
    store = SampleStore(tmp_path / FILE, "scripted", "m")
    (answers,) = Runner(bench, engine, SAMPLED, store).run(bench.problems, 1)
    assert answers.contents == ["```python\ncode_0\n```", "```python\ncode_1\n```"]
    half = SampleStore(tmp_path / "half.jsonl", "scripted", "m")
    half.add(0, "900", 0, 7, engine.requests[0].digest, answers.completions[0])
    engine = Scripted(lambda request: "second")
    (resumed,) = Runner(bench, engine, SAMPLED, half).run(bench.problems, 1)
    assert resumed.contents == ["```python\ncode_0\n```", "second"] and len(engine.requests) == 1


def test_the_preflight_refuses_what_would_take_too_long(aime: Benchmark) -> None:
    engine = Scripted(first_half)
    found = estimate(aime, aime.problems, 7, engine, SAMPLED)
    assert found.requests == 28 and len(engine.requests) == 2
    assert all(request.max_tokens == 32 for request in engine.requests)
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
        runner = Runner(aime, Scripted(script), SAMPLED, SampleStore(folder / FILE, name, "m"))
        answers = runner.run(aime.problems, 2)
        scores = grade(aime, answers, 2, None)
        result = summarise(aime, raw_answers(answers, scores, 1.0), scores, runner.requests)
        write_scores(folder, scores)
        write_report(folder, result)
        folders.append(folder)
        results.append((scores, result.requests_hash))
    mine = [[score.correct for score in run] for run in results[0][0]]
    found = bootstrap_difference(mine, theirs(folders[1], *results[0]))
    assert found.mean == 0.5 and 0 <= found.low < 0.5 < found.high <= 1
    with pytest.raises(MkError, match="was asked other requests"):
        theirs(folders[1], results[0][0], "0")
    with pytest.raises(MkError, match="no finished evaluation"):
        theirs(tmp_path, *results[0])


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


def test_content_is_what_comes_after_the_thoughts() -> None:
    tokenizer = load_tokenizer(NANO)
    marker, text = tokenizer.marker, tokenizer.encode
    ends = marker("end_thinking"), marker("start_text"), marker("end_text")
    whole = [*text("I think"), ends[0], ends[1], *text("42"), ends[2], marker("end_turn")]
    assert split_reply(tokenizer, whole) == ("I think", "42")
    assert split_reply(tokenizer, text("42, I think")) == ("42, I think", "")  # truncated in a thought: no answer
    assert split_reply(tokenizer, [ends[0], ends[1], *text("cut")]) == ("", "cut")


class Server(BaseHTTPRequestHandler):
    """Answers as an OpenAI server would, right every time, until it has answered `limit` requests."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    limit = 100
    takes_s = 0.0  # an answer; a refusal comes at once

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if len(self.bodies) >= self.limit:
            self.send_error(503)
            return
        self.bodies.append(body)
        time.sleep(self.takes_s)
        number = body["messages"][-1]["content"].split("\n")[0].removeprefix("number ")
        message = {"role": "assistant", "reasoning_content": r"\boxed{9}", "content": rf"\boxed{{{number}}}"}
        usage = {"prompt_tokens": 5, "completion_tokens": 7}
        reply = json.dumps(
            {"id": f"r{number}", "usage": usage, "choices": [{"message": message, "finish_reason": "stop"}]}
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Server, "bodies", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}/v1"
        httpd.shutdown()


def served(root: Path, url: str) -> list[str]:
    return ["experiment=accuracy", "benchmark=aime2025", "benchmark.count=4", "benchmark.sha256=null",
            f"experiment.data_dir={root}", f"run_dir={root / 'runs'}", f"experiment.base_url={url}",
            "experiment.limit=4", "experiment.runs=2"]  # fmt: skip


def test_a_server_answers_in_the_engines_place(aime: Benchmark, committed: Path, tmp_path: Path, server: str) -> None:
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
    asked = Server.bodies[4:]  # after the probe's
    assert sorted(body["seed"] for body in asked) == [0] * 4 + [1] * 4
    assert all(body["temperature"] == 1.0 and body["top_p"] == 0.95 and "stop" not in body for body in asked)


def test_a_server_that_dies_gives_no_score_and_a_way_on(
    aime: Benchmark, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "limit", 4 + 3)
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
    assert len(Server.bodies) == 4 + 8 - kept
    with pytest.raises(MkError, match="does not answer"):
        main(load_config(served(tmp_path, "http://127.0.0.1:9/v1")))


def overrides(root: Path, *more: str) -> list[str]:
    return ["experiment=accuracy", "benchmark=nano_code", f"run_dir={root}", "experiment.limit=6", *more]


def test_nano_code_greedy_is_transformers_greedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(load_config(overrides(tmp_path, "benchmark.max_tokens=12"))) == 0
    out = capsys.readouterr().out
    assert "equal to transformers: yes" in out and "weights: checkpoint" in out
    (folder,) = tmp_path.iterdir()
    (row,) = read_rows(folder / "rows.jsonl")
    assert row.checks == {
        "samples_are_requests": True, "answers_are_requests": True, "seeds_differ": True, "equal_to_transformers": True,
    }  # fmt: skip
    assert (row.benchmark, row.answers, row.truncated, row.usage_completion_tokens) == ("nano_code", 6, 6, 72)
    assert json.loads((folder / "report.json").read_text())["data"]["hash_known"] is True


def test_sampled_runs_differ_and_go_on(committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampled = ["sampling=top_p", "benchmark.max_tokens=8", "experiment.runs=3"]
    assert main(load_config(overrides(tmp_path / "one", *sampled))) == 0
    (folder,) = (tmp_path / "one").iterdir()
    samples = read_samples(folder)
    assert {sample.seed for sample in samples} == {0, 1, 2} and len(samples) == 18
    by_run = [[s.completion.token_ids for s in samples if s.run == run] for run in range(3)]
    assert by_run[0] != by_run[1] != by_run[2]
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    (folder / FILE).write_text("".join(lines[:10]))
    resume = f"experiment.resume={folder}"
    assert main(load_config(overrides(tmp_path / "two", *sampled, resume, f"experiment.compare={folder}"))) == 0
    (second,) = (tmp_path / "two").iterdir()
    ids = {sample.key: sample.completion.token_ids for sample in samples}
    assert {sample.key: sample.completion.token_ids for sample in read_samples(second)} == ids
    assert "resumed: 10 samples" in capsys.readouterr().out
    (row,) = read_rows(second / "rows.jsonl")
    assert row.score_difference == 0 and row.tok_s is None
    names = ("score_difference", "score_difference_low", "score_difference_high")
    require_kept(committed, second, **dict.fromkeys(names, lambda value: value + 1))


def test_a_toy_needs_a_limit_for_what_it_cannot_solve(aime: Benchmark, tmp_path: Path) -> None:
    config = ["experiment=accuracy", "benchmark=aime2025", "benchmark.count=4", "benchmark.sha256=null",
              f"experiment.data_dir={tmp_path}", f"run_dir={tmp_path / 'runs'}"]  # fmt: skip
    with pytest.raises(MkError, match="only proves the pipeline") as refused:
        main(load_config(config))
    assert refused.value.hint and "experiment.limit=2" in refused.value.hint
    limited = [*config, "experiment.limit=2", "experiment.check=false"]
    with pytest.raises(MkError, match="experiment.max_hours is 0.001"):
        main(load_config([*limited, "benchmark.max_tokens=3000", "experiment.max_hours=0.001"]))
    assert main(load_config([*limited, "benchmark.max_tokens=8"])) == 0
