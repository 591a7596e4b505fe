"""Logprobs as lm-eval's loglikelihood and OpenAI's clients need them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from tests.server_rig import TOKENIZER, Served, chat, complete, refused, serving, thought
from tests.serving_faults import fault


def known(history: Sequence[int]) -> Mapping[int, float]:
    """Logits that depend on all tokens before."""
    value = sum((i + 1) * token for i, token in enumerate(history))
    return {300 + (value * k) % 500: 12.0 - k for k in range(1, 8)}


def log_softmax(history: Sequence[int]) -> np.ndarray:
    logits = np.zeros(TOKENIZER.vocab)
    for token, logit in known(history).items():
        logits[token] = logit
    return logits - np.log(np.exp(logits).sum())


@pytest.fixture(scope="module", params=[1, 3], ids=["token by token", "three at a time"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(deliver=request.param) as running:
        running.overrides["KNOWN"] = known
        yield running
        running.assert_idle()


@fault(33)
def test_loglikelihood_as_lm_eval_asks_for_it(served: Served) -> None:
    prompts = [TOKENIZER.encode(text, bos=True) for text in ("KNOWN first", "KNOWN second and longer", "KNOWN")]
    whole = complete(served, prompts, max_tokens=1, echo=True, logprobs=1, temperature=0)
    for prompt, choice in zip(prompts, whole["choices"], strict=True):
        logs = choice["logprobs"]
        assert len(logs["token_logprobs"]) == len(prompt) + 1 and logs["token_logprobs"][0] is None
        generated = max(known(prompt), key=lambda token: known(prompt)[token])
        for i, token in enumerate([*prompt, generated]):
            if i and (i == len(prompt) or "KNOWN" in TOKENIZER.decode(prompt[:i])):
                expected = log_softmax([*prompt, generated][:i])
                assert logs["token_logprobs"][i] == pytest.approx(expected[token], abs=1e-6)
                best = max(logs["top_logprobs"][i].values())
                assert best == pytest.approx(expected.max(), abs=1e-6)
    assert whole["usage"]["completion_tokens"] == 3


@fault(34)
def test_the_echos_tokens_add_up_to_its_text(served: Served) -> None:
    for prompt in ("KNOWN é — ďé", [*TOKENIZER.encode("KNOWN ab", bos=True), 16 + 0xC4]):
        choice = complete(served, prompt, max_tokens=5, echo=True, logprobs=0)["choices"][0]
        logs = choice["logprobs"]
        assert "".join(logs["tokens"]) == choice["text"]
        offsets = [sum(map(len, logs["tokens"][:i])) for i in range(len(logs["tokens"]))]
        assert logs["text_offset"] == offsets
        if isinstance(prompt, str):
            assert choice["text"].startswith(prompt)


def test_echo_without_logprobs_and_without_new_tokens(served: Served) -> None:
    choice = complete(served, "KNOWN abc", max_tokens=2, echo=True)["choices"][0]
    assert choice["text"].startswith("KNOWN abc") and choice["logprobs"] is None
    whole = complete(served, "KNOWN abc", max_tokens=0, echo=True, logprobs=1)
    assert whole["choices"][0]["text"] == "KNOWN abc" and whole["usage"]["completion_tokens"] == 0
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["prompt_tokens"]
    refused(served.post("/v1/completions", {"prompt": "a", "max_tokens": 0}), 400, "invalid_value", "max_tokens")


@fault(35)
def test_chat_logprobs_have_the_chat_shape(served: Served) -> None:
    question = served.says(thought("think", "héllo"))
    for top in (None, 0, 3):
        body = {} if top is None else {"top_logprobs": top}
        entries = chat(served, question, logprobs=True, **body).said.logprobs
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == "héllo".encode()
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == (top or 0) and math.isclose(entry["logprob"], 0, abs_tol=1e-6)
    assert chat(served, question).whole["choices"][0]["logprobs"] is None
    messages = [{"role": "user", "content": question}]
    refused(served.post("/v1/chat/completions", {"messages": messages, "top_logprobs": 2}), 400, param="top_logprobs")
    for wrong in (21, -1, "3"):
        body = {"messages": messages, "logprobs": True, "top_logprobs": wrong}
        refused(served.post("/v1/chat/completions", body), 400, param="top_logprobs")


def test_logprobs_end_where_the_text_does(served: Served) -> None:
    question = served.says(thought("", "one two three four"))
    said = chat(served, question, logprobs=True, stop=["three"]).said
    assert "".join(entry["token"] for entry in said.logprobs).startswith("one two")
    assert "four" not in "".join(entry["token"] for entry in said.logprobs)
