"""Mixed requests from many clients at once: nothing leaks, and every answer is what the request gets alone.

SOAK multiplies the number of requests.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mk.engines import MachineEngine
from mk.graph import LAYER_WAVES
from mk.programs import Plan
from tests.interpreter_rig import NANO_GEOMETRY, weights
from tests.server_rig import WEATHER, Served, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TIMES = int(os.environ.get("SOAK", "1"))
CLIENTS = 32
CANCELLED, INVALID = 0.3, 0.05
WORDS = ["the", "page", "of", "every", "slot", "is", "held", "by", "one", "or", "two", "who", "read", "it"]


def mixing(history: Sequence[int]) -> Mapping[int, float]:
    """Likely tokens that depend on the whole history; now and then the end of turn."""
    value = sum((i + 1) * token for i, token in enumerate(history))
    likely = {16 + value * k % 1300: 6.0 - 0.5 * k for k in range(1, 7)}
    return {**likely, 4: 8.0} if value % 61 == 0 else likely


def request(number: int, longest: int) -> tuple[str, dict[str, Any]]:
    rng = random.Random(number)
    words = " ".join(rng.choices(WORDS, k=rng.choice([3, 30, longest])))
    shared = "A preamble that many requests begin with. " * 6 if rng.random() < 0.5 else ""
    body: dict[str, Any] = {"max_tokens": rng.choice([1, 5, 40, 200]), "seed": number, "n": rng.choice([1, 1, 1, 2])}
    body["temperature"] = rng.choice([0, 1.0])
    if rng.random() < 0.3:
        body["logprobs"] = True
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "min_p": 0.05}
    if rng.random() < 0.2:
        body["stop"] = [" the", "e"]
    if rng.random() < 0.3:
        if "logprobs" in body:
            body |= {"logprobs": 2, "echo": True}
        return TEXT, {**body, "prompt": shared + words}
    if rng.random() < 0.2:
        body["tools"] = [WEATHER]
    return CHAT, {**body, "messages": [{"role": "user", "content": shared + words}]}


def ask(served: Served, number: int, longest: int) -> list[Any] | None:
    """The choices; None for a request that was broken off or was wrong."""
    path, body = request(number, longest)
    fate = random.Random(number * 7 + 1)
    drawn = fate.random()
    if drawn < INVALID:
        assert served.post(path, {**body, "temperature": "warm"}).status_code == 400
        return None
    if drawn < INVALID + CANCELLED:
        body["stream"] = fate.random() < 0.5
        patience = fate.choice([0.01, 0.1, 0.5])
        try:
            with (
                httpx.Client(timeout=patience) as client,
                client.stream("POST", served.url + path, json=body) as answer,
            ):
                for _ in zip(answer.iter_lines(), range(fate.randrange(20)), strict=False):
                    pass
        except httpx.HTTPError:
            pass
        return None
    response = httpx.post(served.url + path, json=body, timeout=600)
    assert response.status_code == 200, response.text
    return [_without_ids(choice) for choice in response.json()["choices"]]


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice.get("message", {}).get("tool_calls", []):
        del call["id"]
    return choice


def interpreter(rows: int, pages: int) -> MachineEngine:
    plan = Plan(2, LAYER_WAVES, "row_owner")
    counts = {"full": pages, "sliding": pages}
    return MachineEngine(weights(NANO_GEOMETRY), plan, rows, context=448, chunk=64, pages=counts)


def soak(count: int, longest: int, open_server: Callable[..., Any], **small: Any) -> tuple[Served, int]:
    with open_server(**small, policy={"cache_generated": False}) as served, ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(lambda number: ask(served, number, longest), range(count)))
        served.assert_idle()
    with open_server(policy={"cache": False}) as alone:
        for number, answer in enumerate(found):
            if answer is not None:
                assert answer == ask(alone, number, longest), number
    return served, sum(answer is not None for answer in found)


def test_soak_on_a_scripted_model(figure: Callable[[str], None]) -> None:
    served, answered = soak(200 * TIMES, 250, scripted_server, pages=33, rows=12)
    totals = served.service.worker.core.totals
    assert totals.preemptions and totals.cached_tokens and totals.finished["cancelled"]
    figure(
        f"soak, scripted: {answered} answers equal to those alone, {totals.preemptions} preemptions, "
        f"{totals.finished['cancelled']} sequences broken off"
    )


@contextmanager
def scripted_server(**options: Any) -> Iterator[Served]:
    with serving(**options) as served:
        served.overrides["e"] = mixing  # a letter of every prompt
        yield served


@pytest.mark.timeout(600)
def test_soak_on_the_interpreter(figure: Callable[[str], None]) -> None:
    def open_server(pages: int = 40, rows: int = 3, policy: Any = None) -> Any:
        return serving(engine=interpreter(rows, pages), policy={"chunk": 64, **policy})

    served, answered = soak(10 * TIMES, 40, open_server, pages=11, rows=6)
    totals = served.service.worker.core.totals
    figure(f"soak, interpreter: {answered} answers equal to those alone, {totals.preemptions} preemptions")
    assert answered
