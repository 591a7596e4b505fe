"""Mixed requests from many clients at once: nothing leaks, and every answer is what the request gets alone.

With the cache of generated blocks an answer may depend on which blocks of its conversation were still there, since a
prompt's numbers are those of decode steps only where it hits what they wrote. So the conversation alone is given the
same hits. SOAK multiplies the number of requests.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import pytest

from mk.batching.request import Request
from mk.engines.interpreted import MachineEngine
from mk.engines.scripted import ScriptedEngine
from mk.graph import LAYER_WAVES
from mk.model.geometry import PAGE
from mk.programs import Plan
from tests.engine_rig import assert_nothing_held, every_size
from tests.interpreter_rig import NANO_GEOMETRY, weights
from tests.server_rig import CONTEXT, TOKENIZER, WEATHER, Served, refused, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TIMES = int(os.environ.get("SOAK", "1"))
CLIENTS = 32
CANCELLED, INVALID = 0.3, 0.05
SESSION = 4  # requests that a client sends one after the other
WORDS = ["the", "page", "of", "every", "slot", "is", "held", "by", "one", "or", "two", "who", "read", "it"]
PREAMBLE = "A preamble that many requests begin with. " * 6
FAULTS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"temperature": "warm"}, 400),
    ({"model": "another"}, 404),
    ({"max_tokens": -1}, 400),
    ({"logit_bias": {"99999": 1}}, 400),
    ({"stop": ["x"] * 17}, 400),
)
# tokens whose text is encoded as themselves wherever they stand, so that a conversation goes on from its own tokens
STABLE = [
    token
    for token in range(TOKENIZER.vocab)
    if token not in TOKENIZER.special and (text := TOKENIZER.decode([token])).startswith(" ") and text[1:].isalpha()
]


def mixing(history: Sequence[int]) -> Mapping[int, float]:
    """Likely tokens that depend on the whole history; now and then the end of turn."""
    if history[-1] == TOKENIZER.marker("end_thinking"):
        return {TOKENIZER.marker("start_text"): 30.0}
    value = int(np.dot(history, np.arange(1, len(history) + 1)))
    likely = {STABLE[value * k % len(STABLE)]: 16.0 - 0.5 * k for k in range(1, 7)}
    return {**likely, TOKENIZER.eos[0]: 18.0} if value % 61 == 0 else likely


@dataclass(frozen=True)
class Mix:
    """words: of the longest prompt. answers: tokens that answers may have. long: of one in twenty, which is sure to
    become that long: where several meet, the pool is too small, and in between it holds what conversations go on from.
    """

    words: int
    answers: tuple[int, ...]
    long: int


@dataclass(frozen=True)
class Turn:
    """A request as it was sent and its answer. after: prompt tokens of the turn that it goes on from, 0 = of none."""

    path: str
    body: dict[str, Any]
    choices: list[Any]
    usage: dict[str, Any]
    after: int = 0

    @property
    def cached(self) -> int:
        """Prompt tokens that were hits."""
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


def words(rng: random.Random, mix: Mix) -> str:
    return " ".join(rng.choices(WORDS, k=rng.choice([3, 30, mix.words])))


def parameters(rng: random.Random, number: int, mix: Mix) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.choice(mix.answers), "seed": number, "temperature": rng.choice([0, 1.0])}
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "min_p": 0.05}
    if rng.random() < 0.05:
        body |= {"max_tokens": mix.long, "ignore_eos": True}
    return body


def single(rng: random.Random, number: int, mix: Mix) -> tuple[str, dict[str, Any]]:
    """A request that stands for itself."""
    prompt = (PREAMBLE if rng.random() < 0.5 else "") + words(rng, mix)
    body = {**parameters(rng, number, mix), "n": rng.choice([1, 1, 1, 2])}
    if rng.random() < 0.2:
        body["stop"] = [" the", "e"]
    logprobs = rng.random() < 0.3
    if rng.random() < 0.3:
        return TEXT, {**body, "prompt": prompt, **({"logprobs": 2, "echo": True} if logprobs else {})}
    if rng.random() < 0.2:
        body["tools"] = [WEATHER]
    return CHAT, {**body, "messages": [{"role": "user", "content": prompt}], "logprobs": logprobs}


def turn_of(rng: random.Random, number: int, mix: Mix, before: Turn | None, path: str) -> tuple[str, dict[str, Any]]:
    """A turn of a conversation. The number sets its beginning apart from every other conversation's."""
    said = words(rng, mix) if before else f"{PREAMBLE}{number}: {words(rng, mix)}"
    body = parameters(rng, number, mix)
    body["max_tokens"] = max(body["max_tokens"], mix.answers[-1])  # some blocks
    logprobs = rng.random() < 0.5
    if path == TEXT:
        begun = before.body["prompt"] + before.choices[0]["text"] + " and " if before else ""
        return path, {**body, "prompt": begun + said, "logprobs": 0 if logprobs else None}
    messages = [*before.body["messages"], _as_history(before.choices[0]["message"])] if before else []
    messages.append({"role": "user", "content": said})
    return path, {**body, "messages": messages, "reasoning_effort": "none", "logprobs": logprobs}


def _as_history(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": message["content"] or ""}


def session(served: Served, number: int, mix: Mix) -> list[Turn]:
    """What one client asks in turn; the answers that it waited for."""
    rng = random.Random(number)
    path = rng.choice([CHAT, TEXT, TEXT, None, None])  # of a conversation
    answered: list[Turn] = []
    before: Turn | None = None
    for request in range(number * SESSION, (number + 1) * SESSION):
        asked = turn_of(rng, request, mix, before, path) if path else single(rng, request, mix)
        after = before.usage["prompt_tokens"] if before else 0
        turn = ask(served, request, *asked)
        if turn is not None:
            answered.append(replace(turn, after=after))
        # one that was broken off leaves nobody knows what behind, and a long one no room
        before = turn if turn and path and turn.usage["total_tokens"] < served.service.context // 2 else None
    return answered


def undisturbed(served: Served, number: int, mix: Mix) -> list[Turn]:
    """A conversation when nobody else is there, so that nothing pushes out what its answers left."""
    rng, turns = random.Random(number), list[Turn]()
    for request in range(number * SESSION, (number + 1) * SESSION):
        before = turns[-1] if turns else None
        turn = wait_for(served, *turn_of(rng, request, mix, before, TEXT))
        turns.append(replace(turn, after=before.usage["prompt_tokens"] if before else 0))
    return turns


def ask(served: Served, number: int, path: str, body: dict[str, Any]) -> Turn | None:
    """None for a request that was broken off or was wrong."""
    fate = random.Random(number * 7 + 1)
    drawn = fate.random()
    if drawn < INVALID:
        fault, status = fate.choice(FAULTS)
        refused(served.post(path, {**body, **fault}), status)
        return None
    if drawn < INVALID + CANCELLED:
        leave(served, fate, path, body)
        return None
    return wait_for(served, path, body)


def wait_for(served: Served, path: str, body: dict[str, Any]) -> Turn:
    response = httpx.post(served.url + path, json=body, timeout=600)
    assert response.status_code == 200, response.text
    answer = response.json()
    return Turn(path, body, [_without_ids(choice) for choice in answer["choices"]], answer["usage"])


def leave(served: Served, fate: random.Random, path: str, body: dict[str, Any]) -> None:
    """Go away: while it waits, while it computes, or amid the answer."""
    body = {**body, "stream": fate.random() < 0.5}
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


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    for call in choice.get("message", {}).get("tool_calls", []):
        del call["id"]
    return choice


def assert_alone(served: Served, turns: Sequence[Turn]) -> None:
    """Each turn, asked again of a server that does nothing else. Where that has a cache, a turn gets as much of it."""
    cache = served.service.worker.core.cache
    most: int | None = None
    if cache is not None:
        match = cache.match
        cache.match = lambda hashes: match(hashes if most is None else hashes[:most])  # type: ignore[method-assign]
    for turn in turns:
        most = turn.cached // PAGE if turn.after else None
        alone = wait_for(served, turn.path, turn.body)
        assert alone.choices == turn.choices, turn
        assert cache is None or not turn.after or alone.cached == turn.cached


def all_requests() -> list[Request]:
    """That anything in this process holds."""
    return [kept for kept in gc.get_objects() if type(kept) is Request]


def soak(requests: int, mix: Mix, generated: bool, open_server: Callable[..., Any], **small: Any) -> str:
    """Send the requests to a server with a small pool, and what was answered to one without neighbours; a summary.

    small: of the first server. Conversations find blocks of their answers again only where it is not all too small.
    """
    others = all_requests()  # as another test's, that has failed
    with open_server(**small, policy={"cache_generated": generated}) as served:
        with ThreadPoolExecutor(CLIENTS) as pool:
            sessions = pool.map(lambda number: session(served, number, mix), range(requests // SESSION))
            turns = [turn for answered in sessions for turn in answered]
        if TIMES > 1:
            turns += undisturbed(served, requests // SESSION, mix)
        served.assert_idle()
        core = served.service.worker.core
        assert_nothing_held(core)
        del core
        gc.collect()
        assert not [kept for kept in all_requests() if not any(kept is other for other in others)]
    with open_server(policy={"cache": generated}) as alone:
        assert_alone(alone, turns)
    totals = served.service.worker.core.totals
    hits = sum(turn.cached > turn.after for turn in turns if turn.after)
    assert totals.cached_tokens and totals.finished["cancelled"] and (generated or not hits)
    if TIMES > 1:  # a slice may do without
        assert totals.preemptions and (hits > 0) == generated
    return (
        f"{len(turns)} of {requests} answered as alone, {totals.finished['cancelled']} sequences ended early, "
        f"{totals.preemptions} preemptions, {hits} hits on generated blocks"
    )


def scripted_server(pages: int = 96, rows: int = 4, policy: Mapping[str, Any] | None = None) -> Any:
    counts = {"full": pages, "sliding": pages}
    engine = ScriptedEngine(NANO_GEOMETRY, mixing, rows, CONTEXT, counts, sizes=every_size(rows))
    return serving(engine=engine, policy=policy)


def interpreter_server(pages: int = 40, rows: int = 3, policy: Mapping[str, Any] | None = None) -> Any:
    plan = Plan(2, LAYER_WAVES, "row_owner")
    counts = {"full": pages, "sliding": pages}
    engine = MachineEngine(
        weights(NANO_GEOMETRY), plan, rows, context=704, chunk=64, pages=counts, sizes=every_size(rows)
    )
    return serving(engine=engine, policy={"chunk": 64, **(policy or {})})


@pytest.mark.parametrize(("generated", "pages"), [(False, 40), (True, 160)], ids=["prompts cached", "answers too"])
def test_soak_on_a_scripted_model(generated: bool, pages: int, figure: Callable[[str], None]) -> None:
    mix = Mix(100, (1, 5, 40, 150), long=600)
    figure(f"soak, scripted: {soak(200 * TIMES, mix, generated, scripted_server, pages=pages, rows=32)}")


@pytest.mark.parametrize(("generated", "pages"), [(False, 16), (True, 52)], ids=["prompts cached", "answers too"])
def test_soak_on_the_interpreter(generated: bool, pages: int, figure: Callable[[str], None]) -> None:
    mix = Mix(30, (1, 5, 40, 90), long=500)
    figure(f"soak, interpreter: {soak(12 * TIMES, mix, generated, interpreter_server, pages=pages, rows=16)}")
