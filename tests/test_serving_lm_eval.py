"""lm-evaluation-harness against the server, offline: tokens from its own endpoints, loglikelihoods, chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

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


def harness(served: Served, folder: Path, model: str, path: str, task: Mapping[str, Any], chat: bool) -> Any:
    """The harness' scores of a task of its own kind, over documents in a file."""
    (folder / "toy.yaml").write_text(json.dumps({"task": "toy", **task}))  # JSON is YAML
    found = simple_evaluate(
        model,
        f"base_url={served.url}{path},model=nano,tokenizer_backend=remote,max_length=512",
        ["toy"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    return found["results"]["toy"]


def documents(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Their place, as a task names it."""
    (folder / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(folder / "toy.jsonl")}, "cache_dir": str(folder)}
    return {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}


def likelihood(context: str, continuation: str) -> float:
    prefix, whole = (TOKENIZER.encode(text) for text in (context, context + continuation))
    return sum(float(log_softmax(whole[:at])[whole[at]]) for at in range(len(prefix), len(whole)))


def test_a_task_of_choices(served: Served, tmp_path: Path) -> None:
    """Two questions, of which the model is right about one."""
    choices = [" one answer", " another", " a third"]
    rows = []
    for number, right in enumerate((True, False)):
        question = f"KNOWN question {number}"
        likeliest = int(np.argmax([likelihood(question, choice) for choice in choices]))
        answer = likeliest if right else (likeliest + 1) % 3
        rows.append({"question": question, "choices": choices, "answer": answer})
    task = {
        **documents(tmp_path, rows),
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
    }
    assert harness(served, tmp_path, "local-completions", "/v1/completions", task, False)["acc,none"] == 0.5


def test_a_chat_task(served: Served, tmp_path: Path) -> None:
    said = {served.says(thought("hm", "42")): "42", served.says(thought("hm", "44")): "43"}
    rows = [{"question": question, "answer": answer} for question, answer in said.items()]
    task = {
        **documents(tmp_path, rows),
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 60},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    path = "/v1/chat/completions"
    found = harness(served, tmp_path, "local-chat-completions", path, task, True)
    assert found["exact_match,none"] == 0.5
