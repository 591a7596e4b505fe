"""The engine behind an endpoint: replies that are none, and servers that are silent."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from evals.benchmarks.base import Prompt
from evals.completion import Request
from evals.served import ServedEngine, parse_reply
from mk.errors import MkError
from mk.results.sources import ROOT
from mk.sampling import SamplingParams


@pytest.mark.parametrize(
    "change",
    [{"content": 5}, {"content": [{"text": "4"}]}, {"reasoning": 1}, {"prompt_tokens": "x"}, {"completion_tokens": -3}],
    ids=["number", "parts", "reasoning", "tokens", "less than none"],
)
def test_a_reply_that_no_openai_server_gives_is_refused(change: dict[str, Any]) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    message = {"content": "4"}
    reply = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
    assert parse_reply(reply, 0.1).content == "4"
    (usage if change.keys() <= usage.keys() else message).update(change)
    with pytest.raises(MkError, match="not a reply of an OpenAI server"):
        parse_reply(reply, 0.1)


class Silent(BaseHTTPRequestHandler):
    """Says which model it serves; of an answer it gives a byte now and then, or nothing."""

    protocol_version = "HTTP/1.1"
    drip = False

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(200):
            time.sleep(0.05)
            if self.drip:
                with contextlib.suppress(OSError):
                    self.wfile.write(b" ")

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def silent() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as httpd:
        httpd.daemon_threads, httpd.block_on_close = True, False
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd
        httpd.shutdown()


ASKING = """
import sys
from evals.completion import Request
from evals.benchmarks.base import Prompt
from evals.served import ServedEngine
from mk.sampling import SamplingParams
engine = ServedEngine(sys.argv[1], None, 2, 600.0)
engine.submit("one", Request(Prompt(text="2 + 2 ="), 8, SamplingParams()))
print("asked", flush=True)
engine.collect()
"""


def test_an_interrupt_does_not_wait_for_a_server_that_never_answers(silent: ThreadingHTTPServer) -> None:
    url = f"http://127.0.0.1:{silent.server_port}/v1"
    asking = subprocess.Popen(
        [sys.executable, "-c", ASKING, url], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert asking.stdout is not None and asking.stdout.readline() == "asked\n"
        asking.send_signal(signal.SIGINT)
        assert asking.wait(30) != 0
    finally:
        asking.kill()


def test_an_answer_has_to_be_whole_in_time(silent: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not count as an answer: each read alone would be in time."""
    monkeypatch.setattr(Silent, "drip", True)
    engine = ServedEngine(f"http://127.0.0.1:{silent.server_port}/v1", None, 1, 0.5)
    engine.submit("one", Request(Prompt(text="2 + 2 ="), 8, SamplingParams()))
    with pytest.raises(MkError, match="no whole answer in 0.5 s"):
        engine.collect()
