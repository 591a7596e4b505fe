"""An engine as a model of lm-evaluation-harness, for its own generative tasks: `lm_eval.simple_evaluate(model=...)`.

Samples go into the same store as our benchmarks', with id, usage, finish, seed and latency. A task's stop strings are
not sent, because one could fire inside a thought: what follows the first is cut from the content afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from evals.benchmarks.base import Prompt
from evals.completion import Completion, Engine, Request
from evals.samples import SampleStore
from mk.errors import MkError
from mk.sampling import SamplingParams


@register_model("mk-engine")
class EngineModel(LM):
    """Generates; likelihoods are not an OpenAI server's to give."""

    def __init__(
        self, engine: Engine, sampling: SamplingParams, max_tokens: int, store: SampleStore, run: int = 0
    ) -> None:
        """run: its samples' in the store. max_tokens: of every answer, whatever the task says, reasoning included."""
        super().__init__()
        self._engine, self._store, self._run = engine, store, run
        self._sampling, self._max_tokens = sampling, max_tokens

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The contents in the order of the requests, each up to the first of its stop strings."""
        answers: dict[int, Completion] = {}
        asked = [Request(_prompt(instance.args[0]), self._max_tokens, self._sampling) for instance in requests]
        names = [f"{instance.task_name}-{instance.doc_id}-{instance.idx}" for instance in requests]
        for index, request in enumerate(asked):
            stored = self._store.find(self._run, names[index], 0, request.digest)
            if stored is None:
                self._engine.submit(index, request)
            else:
                answers[index] = stored
        try:
            while len(answers) < len(asked):
                for index, completion in self._engine.collect():
                    assert isinstance(index, int)
                    answers[index] = completion
                    seed, digest = self._sampling.seed, asked[index].digest
                    self._store.add(self._run, names[index], 0, seed, digest, completion)
        finally:
            self._engine.close()
        return [
            cut(answers[index].content, _stops(instance.args[1]))
            for index, instance in enumerate(requests)
        ]  # fmt: skip

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise MkError("this model generates and gives no likelihoods", hint="a task of output_type generate_until")

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise MkError("this model generates and gives no likelihoods", hint="a task of output_type generate_until")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> Any:  # lm_eval says str, and only passes it on
        """The conversation itself: the server has the template."""
        return tuple(chat_history)

    @property
    def tokenizer_name(self) -> str:
        return "the engine's own"  # names lm_eval's cache of requests


def cut(content: str, stops: Sequence[str]) -> str:
    """The content up to the first stop string in it."""
    found = [place for stop in stops if stop and (place := content.find(stop)) >= 0]
    return content[: min(found)] if found else content


def _prompt(context: Any) -> Prompt:
    return Prompt(text=context) if isinstance(context, str) else Prompt(tuple(context))


def _stops(arguments: Any) -> list[str]:
    until = arguments.get("until", [])
    return [until] if isinstance(until, str) else list(until)
