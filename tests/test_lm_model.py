"""An engine as lm-evaluation-harness sees it: its own evaluator runs a task of ours and gets the known score."""

from __future__ import annotations

from pathlib import Path

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from evals.completion import Request
from evals.lm_model import EngineModel, cut
from evals.runner import Runner
from evals.samples import FILE, SampleStore, read_samples
from mk.errors import MkError
from mk.sampling import SamplingParams
from tests.test_accuracy import Scripted

TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def answer(request: Request) -> str:
    """Right about the first of two sums, with a stop string behind it."""
    assert "stop" not in request.body() and request.max_tokens == 100
    return {"1 + 1 =": "2. And so on.", "2 + 2 =": "5."}[str(request.prompt.text)]


def test_the_harness_scores_what_the_engine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "sums.jsonl"
    data.write_text('{"question": "1 + 1 =", "answer": "2"}\n{"question": "2 + 2 =", "answer": "4"}\n')
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.replace("DATA", str(data)))
    store = SampleStore(tmp_path / FILE, "scripted", "m")
    engine = Scripted(answer)
    model = EngineModel(Runner(engine, SamplingParams(1.0, seed=3), 100, store))
    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    found = lm_eval.simple_evaluate(model=model, tasks=["sums"], task_manager=manager, bootstrap_iters=0)
    assert found["results"]["sums"]["exact_match,none"] == 0.5
    assert [(sample.seed, sample.completion.content) for sample in read_samples(tmp_path)][::-1] == [
        (3, "2. And so on."), (3, "5."),
    ]  # fmt: skip
    lm_eval.simple_evaluate(model=model, tasks=["sums"], task_manager=manager, bootstrap_iters=0)
    assert len(engine.requests) == 2  # the second time every answer is in the store
    with pytest.raises(MkError, match="no likelihoods"):
        model.loglikelihood([])


def test_a_conversation_goes_to_the_engine_as_messages(tmp_path: Path) -> None:
    """With the harness' chat template on, which is then the server's own."""
    asked: list[Request] = []

    def listen(request: Request) -> str:
        asked.append(request)
        return "2"

    model = EngineModel(Runner(Scripted(listen), SamplingParams(), 100, SampleStore(tmp_path / FILE, "scripted", "m")))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ß"}]
    instance = Instance("generate_until", {}, (model.apply_chat_template(messages), {"until": []}), 0)
    assert model.generate_until([instance]) == ["2"]
    assert asked[0].body()["messages"] == messages and asked[0].prompt.text is None


def test_contents_are_cut_at_the_first_stop() -> None:
    assert cut("a. b\n\nc", ["\n\n", "."]) == "a" and cut("abc", ["x", ""]) == "abc"
