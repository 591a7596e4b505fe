"""What the proxy between an agent and its server passes on and keeps: odd requests, usage, streams, traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.agents.exchange import Exchange
from experiments.agents.figures import figures, raw_task
from experiments.agents.proxy import recording
from experiments.agents.task import sampling
from experiments.agents.trace import Trace
from experiments.load_client import Answer
from mk.results.rows import Row, read_raw
from mk.sampling import SamplingParams
from tests.agent_tasks import RANGES
from tests.promotion import committed, repository
from tests.test_agent_tasks import FIRST, ONE, orders, served, transcript, tried, write

__all__ = ["committed", "repository"]


@pytest.mark.parametrize(
    "odd",
    [
        {"stream_options": 5},
        {"stream_options": [["include_usage", True]]},
        {"stream_options": "all"},
        {"stream_options": False},
        {"stream": "yes"},
        {"temperature": "warm"},
        {"temperature": {"of": [1, 2]}},
        {"messages": 5},
        5,
        [[1, 2]],
        "[" * 100_000,
        b"\xff",
    ],
    ids=lambda odd: str(odd)[:40],
)
def test_a_request_that_a_server_refuses_comes_to_it_as_it_is(odd: Any) -> None:
    body: Any = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    if isinstance(odd, dict):
        content = json.dumps(body | odd).encode()
    else:
        content = odd if isinstance(odd, bytes) else (odd if isinstance(odd, str) else json.dumps(odd)).encode()
    with served() as running, recording(f"{running.url}/v1") as (proxy, url):
        said = [
            httpx.post(f"{base}/chat/completions", content=content, headers={"content-type": "application/json"})
            for base in (f"{running.url}/v1", url)
        ]
    direct, through = said
    assert (through.status_code, through.text) == (direct.status_code, direct.text)
    assert 400 <= direct.status_code < 500
    assert not isinstance(odd, dict) or [exchange.status for exchange in proxy.exchanges] == [direct.status_code]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([None], "the server's own"),
        ([0, 0.0, 0.7], "temperature 0, temperature 0.7"),
        (["warm"], "temperature 'warm'"),
        ([True, [1], {"a": 2}], "temperature True, temperature [1], temperature {'a': 2}"),
        ([10**400], "temperature 1" + "0" * 39),
        ([float("nan"), float("-inf")], "temperature -inf, temperature nan"),
    ],
)
def test_whatever_temperature_an_agent_asks_for_is_told(values: list[Any], told: str) -> None:
    assert sampling([exchange(temperature=value) for value in values]) == told


def test_a_task_whose_requests_are_refused_has_a_row(tmp_path: Path) -> None:
    """Of an agent that asks for what nobody serves, and then ends."""
    program = tmp_path / "odd"
    body = json.dumps({"model": "nano", "messages": [], "stream": True, "stream_options": 5, "temperature": "warm"})
    program.write_text(
        f"""#!{sys.executable}
import json, os, sys, urllib.request
if sys.argv[1] == "--version": sys.exit(print("odd 1"))
(provider,) = json.load(open(os.environ["OPENCODE_CONFIG"]))["provider"].values()
headers = {{"Content-Type": "application/json"}}
url = provider["options"]["baseURL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, {body.encode()!r}, headers))
"""
    )
    program.chmod(0o755)
    tasks = "experiment.tasks=[write_ranges,mend_ledger]"
    with served() as running:
        _, rows, folder = tried(running.url, tmp_path, tasks, f"agent.program={program}")
    assert [(row.turns, row.sampling, row.ended) for row in rows] == [(1, "temperature 'warm'", "status 1")] * 2
    assert transcript(folder, "served-write_ranges")[1][0]["status"] in (400, 422)


def exchange(**body: Any) -> Exchange:
    return Exchange("chat/completions", {"stream": True, **body}, Answer(1.0), 200)


def chunk(text: str, tokens: int | None, **more: Any) -> bytes:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text, **more}}], **usage})}".encode()


LAST = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}'


def test_an_agent_is_shown_the_usage_that_it_asked_for() -> None:
    for options, chunks, last in [
        ({}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ]:
        of = exchange(stream_options=options)
        shown = of.take_line(chunk("\u2028a", 2), 2.0)
        assert json.loads(shown[6:])["choices"][0]["delta"]["content"] == "\u2028a"
        assert (b"usage" in shown, bool(of.take_line(LAST, 3.0))) == (chunks, last)
        assert of.take_line(b": a comment", 3.0) == b": a comment" and not of.whole
        assert of.take_line(b"data: [DONE]", 3.0) == b"data: [DONE]" and of.whole
        assert of.answer.arrivals == [(2.0, 2), (3.0, 1)] and of.timed


def test_an_answer_is_put_together_as_an_agent_sends_it_back() -> None:
    of = exchange()
    of.take_line(chunk("", 1, reasoning_content="hm"), 2.0)
    call = {"index": 1, "id": "b", "type": "function", "function": {"name": "read", "arguments": '{"a'}}
    first = {"index": 0, "id": "a", "type": "function", "function": {"name": "list", "arguments": "{}"}}
    of.take_line(chunk("So", 2, tool_calls=[first, call]), 2.0)
    of.take_line(chunk(".", 3, tool_calls=[{"index": 1, "function": {"arguments": '": 1}'}}]), 2.0)
    assert of.message == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "list", "arguments": "{}"}},
            {"id": "b", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}},
        ],
    }


def test_what_is_not_counted_as_it_comes_or_not_streamed_is_not_timed() -> None:
    uncounted, broken, failed = exchange(), exchange(), exchange()
    for line in (chunk("a", None), chunk("b", None), LAST, b"data: [DONE]"):
        uncounted.take_line(line, 2.0)
    broken.take_line(chunk("a", 1), 2.0)
    for line in (chunk("a", 1), b'data: {"error": {"message": "out of pages"}}', b"data: [DONE]"):
        failed.take_line(line, 2.0)
    plain = exchange(stream=False)
    reply = {"message": {"content": "So.", "tool_calls": None}, "finish_reason": "stop"}
    plain.take_whole({"choices": [reply], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}, 3.0)
    assert [of.whole for of in (uncounted, broken, failed, plain)] == [True, False, False, True]
    assert [of.timed for of in (uncounted, broken, failed, plain)] == [False, True, True, False]
    assert "out of pages" in str(failed.error)
    raw = json.loads(json.dumps(raw_task([uncounted, broken, failed, plain], "status 0", 1.5, {"ran": 2, "failed": 1})))
    found = figures(Row.__new__(Row), raw)
    assert (found["turns"], found["answers"], found["usage_completion_tokens"]) == (4, 2, 3 + 1 + 1 + 4)
    assert found["usage_prompt_tokens"] == 7 + 7 + 7 + 5 and not found["success"] and found["ttft_ms"] == 1000.0
    assert "hit_tokens" not in found and found["checks"] == {"was_asked": True, "tokens_counted": True}


def test_an_answer_that_is_not_streamed_goes_through(tmp_path: Path) -> None:
    with served((FIRST, orders("whole", "more")), ("go on", orders(write("ranges.py", RANGES)))) as running:
        _, (row,), folder = tried(running.url, tmp_path, ONE)
    (raw,) = read_raw(folder / "raw.jsonl").values()
    assert row.success and row.answers == 2 and len(raw["timeline"]["tokens"]) == 1 and len(raw["tokens"]) == 2


def test_figures_of_no_usage_and_no_test() -> None:
    of = exchange()
    for line in (chunk("a", None), b"data: [DONE]"):
        of.take_line(line, 2.0)
    found = figures(Row.__new__(Row), raw_task([of], "time limit", 1.0, None))
    assert not found["success"] and not found["checks"]["tokens_counted"]
    assert not figures(Row.__new__(Row), raw_task([of], "status 0", 1.0, {"ran": 0, "failed": 0}))["success"]


def test_a_trace_is_the_longest_conversation() -> None:
    def asked(*messages: tuple[str, str], say: str) -> Exchange:
        of = exchange(
            messages=[{"role": role, "content": text} for role, text in messages], tools=[{"type": "function"}]
        )
        for line in (chunk(say, 2), b"data: [DONE]"):
            of.take_line(line, 2.0)
        return of

    first = [("system", "s"), ("user", "u")]
    title = asked(("user", "a title"), say="Title")
    one = asked(*first, say="one")
    two = asked(*first, ("assistant", "one"), ("tool", "t"), say="two")
    cut = exchange(messages=[*two.body["messages"], {"role": "user", "content": "cut off"}])
    other = asked(("system", "s2"), ("user", "u"), ("assistant", "one"), ("user", "x"), say="other")
    trace = Trace.record("of", [title, one, two, cut, other])
    assert trace is not None and [len(turn.given) for turn in trace.turns] == [2, 1]
    assert [turn.said["content"] for turn in trace.turns] == ["one", "two"] and trace.tools == [{"type": "function"}]
    assert trace.bodies(1, SamplingParams())[1]["messages"] == two.body["messages"]
    assert Trace.record("none", [cut]) is None
