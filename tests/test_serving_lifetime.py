"""Requests whose client has gone, leaks, concurrency, keys, the end of the server: faults that other servers had."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mk.server import launch
from tests.server_rig import CONTEXT, TOKENIZER, Script, Served, chat, events, refused, serving, thought
from tests.serving_faults import fault

CHAT = "/v1/chat/completions"
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", params=[1, 5], ids=["token by token", "five at a time"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(deliver=request.param) as running:
        yield running
        running.assert_idle()


def slowly(history: Sequence[int]) -> Mapping[int, float]:
    time.sleep(0.02)
    return {300 + len(history) % 7: 30.0}


def endless(served: Served) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": served.runs(slowly)}], "max_tokens": CONTEXT - 200}


@fault(36)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_frees_its_slot(served: Served, stream: bool) -> None:
    body = {**endless(served), "stream": stream}
    with (
        pytest.raises(httpx.TimeoutException),
        httpx.Client(timeout=0.3) as client,
        client.stream("POST", served.url + CHAT, json=body) as response,
    ):
        for _ in response.iter_lines():
            if served.gauge("mk_requests_running"):
                raise httpx.ReadTimeout("gone")
    served.assert_idle()
    tokens = served.gauge("mk_generated_tokens_total")
    time.sleep(0.1)
    assert served.gauge("mk_generated_tokens_total") == tokens < 200


@fault(36)
def test_a_client_that_goes_while_it_waits_leaves_the_queue(served: Served) -> None:
    async def crowd() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            body = endless(served)
            asked = [asyncio.create_task(client.post(served.url + CHAT, json=body)) for _ in range(7)]
            while await asyncio.to_thread(served.gauge, "mk_requests_waiting") != 3:
                await asyncio.sleep(0.01)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(crowd())
    served.assert_idle()


@fault(37)
def test_nothing_stays_behind_after_many_requests_and_errors(served: Served) -> None:
    question = served.says(thought("a", "b"))

    def ask(number: int) -> int:
        body: dict[str, object] = {"messages": [{"role": "user", "content": question}], "stream": number % 2 == 0}
        if number % 5 == 0:
            body["temperature"] = "hot"
        return served.post(CHAT, body).status_code

    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(ask, range(100)))
    assert codes.count(400) == 20 and codes.count(200) == 80
    served.assert_idle()


@fault(40)
def test_an_answer_is_the_same_alone_and_among_others(served: Served) -> None:
    def mixing(history: Sequence[int]) -> Mapping[int, float]:
        value = sum((i + 1) * token for i, token in enumerate(history))
        return {100 + value * k % 1000: 4.0 for k in range(1, 9)}

    question = served.runs(mixing)
    bodies = [
        {
            "messages": [{"role": "user", "content": f"{question} {i % 5}"}],
            "max_tokens": 40 + i,
            "seed": i,
            "logprobs": True,
            "temperature": 1.0,
            "reasoning_effort": "none",
        }
        for i in range(16)
    ]
    alone = [served.post(CHAT, body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: served.post(CHAT, body).json()["choices"], bodies))
    assert together == alone
    assert len({str(choices) for choices in alone}) == 16


@fault(41)
def test_the_key_guards_every_route_but_health() -> None:
    with serving(api_key="secret") as locked:
        for method, path in (
            ("POST", CHAT), ("POST", "/v1/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
            ("GET", "/metrics"), ("GET", "/v1/models"), ("GET", "/version"), ("GET", "/tokenizer_info"),
            ("GET", "/nothing"), ("OPTIONS", CHAT), ("GET", "/openapi.json"),
        ):  # fmt: skip
            for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
                refused(httpx.request(method, locked.url + path, headers=headers), 401, "invalid_api_key")
        assert locked.get("/health").status_code == 200
        preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
        assert httpx.options(locked.url + CHAT, headers=preflight).status_code != 401
        assert locked.get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


def with_empty_key(served: Served) -> int:
    """httpx refuses to send this header; lm-eval's client does."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"))
    connection.request("GET", "/v1/models", headers={"Authorization": "Bearer "})
    return connection.getresponse().status


@fault(41)
def test_an_empty_key_passes_where_none_is_set(served: Served) -> None:
    assert with_empty_key(served) == 200
    with serving(api_key="secret") as locked:
        assert with_empty_key(locked) == 401


def test_metrics_count(served: Served) -> None:
    names = ("mk_prompt_tokens_total", "mk_generated_tokens_total", "mk_prefix_hit_tokens_total")
    seconds = [f"mk_{name}_seconds" for name in ("time_to_first_token", "time_per_output_token", "request_duration")]

    def gauges() -> dict[str, float]:
        return {name: served.gauge(name) for name in (*names, *(f"{name}_count" for name in seconds))}

    before = gauges()
    answer = chat(served, served.says(thought("a", "b c d")))
    grown = {name: value - before[name] for name, value in gauges().items()}
    for name, counted in (("prompt", "prompt_tokens"), ("generated", "completion_tokens")):
        assert grown[f"mk_{name}_tokens_total"] == 2 * answer.usage[counted] > 0
    assert all(grown[f"{name}_count"] == 2 for name in seconds)  # asked both ways
    assert 0 < served.gauge("mk_time_per_output_token_seconds_sum") < served.gauge("mk_request_duration_seconds_sum")
    chat(served, "word " * 200 + served.says("x"), max_tokens=1)
    after = gauges()
    assert after["mk_prefix_hit_tokens_total"] >= 64
    assert after["mk_time_per_output_token_seconds_count"] == before["mk_time_per_output_token_seconds_count"] + 2
    assert served.gauge("mk_kv_pages") == 192 and served.gauge("mk_inter_token_latency_seconds_count") > 0


def test_the_pages_and_preemptions_of_running_requests_are_told() -> None:
    """Four prompts of 7 blocks fit into 32 pages, their answers of 3 more do not: somebody gives way, nobody fails."""

    def briefly(history: Sequence[int]) -> Mapping[int, float]:
        time.sleep(0.002)
        return {300 + len(history) % 7: 30.0}

    with serving(pages=32) as tight, ThreadPoolExecutor(4) as pool:
        question = TOKENIZER.encode(tight.runs(briefly))
        prompts = [[400 + i] * (64 * 7 - 1 - len(question)) + question for i in range(4)]
        assert tight.gauge("mk_kv_pages") == 64 and tight.gauge("mk_kv_pages_in_use") == 0
        asked = [{"prompt": prompt, "max_tokens": 64 * 3, "ignore_eos": True} for prompt in prompts]
        waiting = [pool.submit(tight.post, "/v1/completions", body) for body in asked]
        tight.wait_until(lambda: tight.gauge("mk_kv_pages_in_use") >= 28)
        assert all(answer.result().json()["usage"]["completion_tokens"] == 64 * 3 for answer in waiting)
        assert tight.gauge("mk_preemptions_total") == tight.service.worker.core.totals.preemptions > 0
        tight.assert_idle()
        assert tight.gauge("mk_kv_pages_in_use") == 0


def start(port: int, *overrides: str) -> subprocess.Popen[str]:
    command = [sys.executable, "run.py", "experiment=serve", f"server.port={port}", *overrides]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MK_API_KEY": ""},
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def error_of(payload: str) -> str:
    error = json.loads(payload)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "server_error" and error["code"] == "unavailable"
    return str(error["message"])


def test_the_command_serves_nano_and_ends_when_told_to() -> None:
    """The interpreter behind it all: a greedy answer, a busy port, an interrupt amid answers, and a second one."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with start(port) as server, ThreadPoolExecutor(1) as pool:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline() for _ in range(4)]
            assert f"serving nano at {url}/v1" in lines[0] and "context 8192" in lines[1] and "curl" in lines[3]
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
            first, again = (httpx.post(url + CHAT, json=body, timeout=60).json() for _ in range(2))
            assert first["choices"] == again["choices"] and first["usage"]["completion_tokens"] == 12
            with start(port) as second:
                output, _ = second.communicate(timeout=60)
                assert second.returncode == 2 and "error: " in output and "hint: server.port=" in output
            body |= {"max_tokens": 7000, "ignore_eos": True}
            whole = pool.submit(httpx.post, url + CHAT, json=body, timeout=60)
            with httpx.stream("POST", url + CHAT, json={**body, "stream": True}, timeout=60) as answer:
                got = (line for line in answer.iter_lines() if line)
                next(got)
                server.send_signal(signal.SIGINT)
                until = time.monotonic() + 1.5
                while time.monotonic() < until:  # it lets the answers go on, for server.drain_s=10
                    assert "choices" in next(got)
                server.send_signal(signal.SIGINT)
                *_, last = got
            assert error_of(last.removeprefix("data: ")) == "the server is shutting down"
            assert refused(whole.result(), 503, "unavailable") == "the server is shutting down"
            rest, _ = server.communicate(timeout=15)
            assert server.returncode == 0 and "Traceback" not in rest and "Cancel" not in rest
        finally:
            server.kill()


@pytest.fixture
def ended_amid_answers(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., list[httpx.Response]]]:
    """What clients got from a server that was told to end while it answered them."""

    def end(drain_s: float, *asked: tuple[Script, dict[str, object]]) -> list[httpx.Response]:
        with ThreadPoolExecutor(len(asked)) as pool:
            with serving(drain_s=drain_s) as served:
                bodies = [
                    {"messages": [{"role": "user", "content": served.runs(script)}], **body} for script, body in asked
                ]
                waiting = [pool.submit(served.post, CHAT, body) for body in bodies]
                served.wait_until(lambda: served.gauge("mk_requests_running") == len(asked))
            assert not served.service.worker._thread.is_alive()
            return [answer.result() for answer in waiting]

    yield end
    assert not caplog.records, caplog.text


def test_a_drain_outlasts_a_short_answer(ended_amid_answers: Callable[..., list[httpx.Response]]) -> None:
    """As many seconds as it may: it does not wait for longer than the answers take, either."""
    body = {"max_tokens": 60, "ignore_eos": True}
    began = time.monotonic()
    whole, streamed = ended_amid_answers(30, (slowly, body), (slowly, {**body, "stream": True}))
    assert time.monotonic() - began < 15
    assert whole.json()["usage"]["completion_tokens"] == 60
    assert events(streamed)[-1]["choices"][0]["finish_reason"] == "length"


def test_an_answer_that_outlasts_the_drain_ends_with_an_error(
    ended_amid_answers: Callable[..., list[httpx.Response]],
) -> None:
    body = {"max_tokens": CONTEXT - 200, "ignore_eos": True}
    whole, streamed = ended_amid_answers(0.3, (slowly, body), (slowly, {**body, "stream": True}))
    assert refused(whole, 503, "unavailable") == "the server is shutting down"
    assert error_of(json.dumps(events(streamed)[-1])) == "the server is shutting down"


def test_a_client_that_does_not_read_holds_no_server_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "LAST_WORDS_S", 0.2)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with serving(drain_s=0.2) as served:
            question = served.runs(lambda history: {300 + len(history) % 7: 30.0})
            body = {"messages": [{"role": "user", "content": question}], "stream": True, "n": 4, "logprobs": True}
            body |= {"top_logprobs": 20, "chat_template_kwargs": {"reasoning": False}, "max_tokens": 900}
            content = json.dumps(body).encode()
            host, port = served.url.removeprefix("http://").split(":")
            deaf.connect((host, int(port)))
            deaf.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" % CHAT.encode())
            deaf.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
            served.wait_until(lambda: served.gauge("mk_generated_tokens_total") == 3600)  # megabytes to send
            began = time.monotonic()
        assert time.monotonic() - began < 5
    assert not caplog.records, caplog.text


def test_sigterm_ends_an_idle_server() -> None:
    port = free_port()
    with start(port) as server:
        try:
            assert server.stdout is not None and "serving nano" in server.stdout.readline()
            server.terminate()
            assert server.wait(15) == 0
        finally:
            server.kill()
