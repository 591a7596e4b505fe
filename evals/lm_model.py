"""An engine as a model of lm-evaluation-harness: of our benchmarks (`harness.py`), and of its own generative tasks.

Every answer goes into the sample store, with id, usage, finish, seed and latency. The harness repeats a request by
listing it several times; the i-th is sent with seed + i. A task's stop strings are not sent, because one could fire
inside a thought: what follows the first is cut from the content afterwards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.api_models import JsonChatStr

from evals.benchmarks.base import Conversation, Prompt
from evals.runner import Job, Runner
from mk.errors import MkError

CONVERSATION = "conversation"  # among an instance's arguments: what makes one, of a task that asks more than once


@register_model("mk-engine")
class EngineModel(LM):
    """Generates; likelihoods are not an OpenAI server's to give."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Any]:
        """In the order of the requests: the contents of a conversation, of a plain task its one content, cut."""
        repeats: Counter[str] = Counter()
        jobs = []
        for instance in requests:
            name = _name(instance)
            jobs.append(Job(repeats[name], name, _conversation(instance)))
            repeats[name] += 1
        answers = self._runner.run(jobs)
        return [
            each.contents if CONVERSATION in instance.args[1] else cut(each.contents[0], _stops(instance.args[1]))
            for instance, each in zip(requests, answers, strict=True)
        ]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise MkError("this model generates and gives no likelihoods", hint="a task of output_type generate_until")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise MkError("this model generates and gives no likelihoods", hint="a task of output_type generate_until")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Any:  # lm_eval says str, and hashes it and passes it on
        """The conversation itself: the server has the template."""
        return JsonChatStr(json.dumps(chat_history, ensure_ascii=False))

    @property
    def tokenizer_name(self) -> str:
        return "the engine's own"  # names lm_eval's cache of requests


def cut(content: str, stops: Sequence[str]) -> str:
    """The content up to the first stop string in it."""
    found = [place for stop in stops if stop and (place := content.find(stop)) >= 0]
    return content[: min(found)] if found else content


def _name(instance: Instance) -> str:
    if CONVERSATION in instance.args[1]:
        return str(instance.doc["id"])
    return f"{instance.task_name}-{instance.doc_id}-{instance.idx}"


def _conversation(instance: Instance) -> Conversation:
    asked, arguments = instance.args[0], instance.args[1]
    if CONVERSATION in arguments:
        made: Conversation = arguments[CONVERSATION]()
        return made
    return _once(Prompt(tuple(json.loads(asked.prompt))) if isinstance(asked, JsonChatStr) else Prompt(text=asked))


def _once(prompt: Prompt) -> Conversation:
    yield prompt


def _stops(arguments: Mapping[str, Any]) -> list[str]:
    until = arguments.get("until", [])
    return [until] if isinstance(until, str) else list(until)
