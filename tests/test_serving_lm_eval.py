"""lm-evaluation-harness against the server, offline: tokens from its own endpoints, loglikelihoods, chat."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from tests.server_rig import TOKENIZER, Served, serving, thought
from tests.test_serving_logprobs import known, log_softmax


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as running:
        running.overrides["KNOWN"] = known
        yield running
        running.assert_idle()


def test_loglikelihoods_are_those_of_the_model(served: Served) -> None:
    url = f"{served.url}/v1/completions"
    harness = LocalCompletionsAPI(base_url=url, model="nano", tokenizer_backend="remote", max_length=512)
    pairs = [("KNOWN question", " one answer"), ("KNOWN question", " another"), ("KNOWN", " third")]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    for (context, continuation), (loglikelihood, _) in zip(pairs, harness.loglikelihood(asked), strict=True):
        # the harness asks for tokens without BOS
        prefix, whole = (TOKENIZER.encode(text) for text in (context, context + continuation))
        expected = sum(log_softmax(whole[:at])[whole[at]] for at in range(len(prefix), len(whole)))
        assert loglikelihood == pytest.approx(expected, abs=1e-5)


def test_chat_generation(served: Served) -> None:
    harness = LocalChatCompletion(base_url=f"{served.url}/v1/chat/completions", model="nano", max_length=512)
    question = served.says(thought("Question: hm", "The answer is 42.\n\nQuestion: next"))
    prompt = harness.apply_chat_template([{"role": "user", "content": question}])
    asked = Instance("generate_until", {}, (prompt, {"until": ["Question:"], "max_gen_toks": 60}), 0)
    assert harness.generate_until([asked]) == ["The answer is 42.\n\n"]
