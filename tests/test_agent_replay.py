"""agent=replay: a recorded conversation, sent turn by turn to our server and to a stand-in for vLLM's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import agent_trial
from experiments.agents.trace import Trace
from mk.compose import load_config
from mk.errors import MkError
from mk.results.rows import read_rows
from mk.sampling import SamplingParams
from tests.promotion import committed, folder_of, repository, require_kept
from tests.server_rig import serving
from tests.small_runs import SERVED
from tests.test_serving_load import SITE

__all__ = ["committed", "repository"]

BUNDLED = Path(agent_trial.__file__).parent / "agents" / "traces" / "mend_intervals.json"
SMALL = [
    "experiment=agent_trial",
    "agent=replay",
    *SERVED,
    "experiment.warm=20",
    "agent.scale=0.5",
]


def short(folder: Path) -> str:
    """Three turns, as an override."""

    def turn(role: str, given: str, said: str, tokens: int) -> dict[str, Any]:
        tool = {"tool_call_id": "0"} if role == "tool" else {}
        message = {"role": "assistant", "content": said}
        return {"given": [{"role": role, "content": given, **tool}], "said": message, "tokens": tokens}

    lines = "a line of a file\n" * 12
    turns = [
        turn("user", lines, "I read it.", 8),
        turn("tool", lines, "Once more.", 4),
        turn("user", "Go on.", "So.", 6),
    ]
    path = folder / "short.json"
    path.write_text(json.dumps({"tools": [], "turns": turns}))
    return f"agent.trace={path}"


def test_each_request_holds_the_recorded_turns_before_it() -> None:
    trace = Trace.load(BUNDLED)
    asked = trace.bodies(0.5, SamplingParams())
    assert len(asked) == len(trace.turns) == 9
    for turn, before, after in zip(trace.turns, asked, asked[1:], strict=False):
        assert after["messages"][: len(before["messages"]) + 1] == [*before["messages"], turn.said]
        assert before["max_tokens"] == turn.tokens // 2 and before["ignore_eos"] and before["tool_choice"] == "none"
    last = asked[-1]["messages"]
    assert [message["role"] for message in last[:4]] == ["system", "user", "assistant", "tool"]
    names = {tool["function"]["name"] for tool in trace.tools}
    calls = [call for message in last for call in message.get("tool_calls", ())]
    assert {call["function"]["name"] for call in calls} == names
    # as a template that counts them has them, so that every engine renders the same prompt
    assert [call["id"] for call in calls] == [str(number) for number in range(8)]
    assert [message["tool_call_id"] for message in last if message["role"] == "tool"] == [call["id"] for call in calls]


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        (SamplingParams(), {"temperature": 0.0}),
        (SamplingParams(1.0, seed=7), {"temperature": 1.0, "seed": 7}),
        (SamplingParams(0.5, 40, 0.9, 3), {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "seed": 3}),
    ],
)
def test_each_request_asks_for_the_whole_sampling(sampling: SamplingParams, sent: dict[str, float]) -> None:
    names = ("temperature", "top_k", "top_p", "seed")
    for body in Trace.load(BUNDLED).bodies(0.5, sampling):
        assert {name: body[name] for name in names if name in body} == sent


def test_both_engines_get_the_conversation_and_their_rows_are_kept(
    committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    cfg = load_config([*SMALL, short(tmp_path), f"baseline.vllm.site={SITE}", f"run_dir={runs}"])
    assert agent_trial.main(cfg) == 0
    folder = folder_of(runs)
    ours, theirs = read_rows(folder / "rows.jsonl")
    assert (ours.engine, theirs.engine) == ("interpreter", "vllm") and ours.requests_hash == theirs.requests_hash
    for row in (ours, theirs):
        assert (row.agent, row.workload, row.answers, row.usage_completion_tokens) == ("replay", "short", 3, 4 + 2 + 3)
        assert row.ttft_ms and row.itl_p50_ms and row.tpot_ms and row.active_batch == pytest.approx(1.0)
    assert theirs.hit_tokens == 3 and theirs.ratio is None  # the stand-in counts characters
    assert "did not take and generate as many tokens" in capsys.readouterr().out
    told = [json.loads(line) for line in (folder / "transcript-interpreter.jsonl").read_text().splitlines()]
    assert [turn["tokens"] for turn in told] == [4, 2, 3] and told[1]["given"][0]["role"] == "tool"
    assert ours.hit_tokens == sum(turn["cached"] for turn in told) and told[0]["cached"] == 0
    for before, turn in itertools.pairwise(told):  # at least all whole blocks of the prompt before
        assert turn["cached"] >= before["prompt_tokens"] // 64 * 64 > 0
    names = ("hit_tokens", "usage_prompt_tokens", "ttft_ms", "itl_p50_ms", "wall_s")
    require_kept(committed, folder, **dict.fromkeys(names, lambda value: value + 1))


def test_a_named_server_gets_it_alone(tmp_path: Path) -> None:
    with serving(pages=200) as served:
        asked: list[list[int]] = []

        def script(history: Sequence[int]) -> dict[int, float]:
            asked.append(list(history))
            return {20: 5.0}

        served.overrides[""] = script
        place = [f"experiment.base_url={served.url}/v1", f"run_dir={tmp_path / 'runs'}"]
        assert agent_trial.main(load_config([*SMALL, short(tmp_path), *place])) == 0
        served.assert_idle()
    folder = folder_of(tmp_path / "runs")
    (row,) = read_rows(folder / "rows.jsonl")
    assert row.engine == "served" and row.model == "nano"
    assert row.hit_tokens and row.hit_tokens < row.usage_prompt_tokens
    # a rehearsal had the same lengths, each with the one before in it, and shared nothing with the conversation
    turns = [json.loads(line) for line in (folder / "transcript-served.jsonl").read_text().splitlines()]
    lengths = [turn["prompt_tokens"] for turn in turns]
    firsts = [history for history in asked if len(history) in lengths]
    assert [len(history) for history in firsts] == 2 * lengths and turns[0]["cached"] == 0
    rehearsed, replayed = firsts[:3], firsts[3:]
    assert all(after[: len(before)] == before for before, after in itertools.pairwise(rehearsed))
    assert rehearsed[0][:8] != replayed[0][:8]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no trace: JSONDecodeError"),
        ('{"turns": []}', "is no trace: KeyError"),
        ('{"tools": [], "turns": []}', "every turn is given something"),
        ('{"tools": [], "turns": [{"given": [], "said": {}, "tokens": 1}]}', "every turn is given something"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(MkError, match=says):
        agent_trial.main(load_config([*SMALL, f"agent.trace={path}", f"run_dir={tmp_path / 'runs'}"]))
    assert not (tmp_path / "runs").exists()


def test_its_configuration_is_the_full_model_on_a_card_beside_vllm() -> None:
    cfg = load_config(["experiment=agent_trial", "agent=replay"])
    assert (cfg.model.preset, cfg.engine.name, cfg.baseline.name) == ("north_mini_code", "cuda", "vllm")
    assert Path(cfg.agent.trace).resolve() == BUNDLED.resolve() and cfg.agent.scale == 1
    with pytest.raises(MkError, match="unknown option agent=human"):
        load_config(["experiment=agent_trial", "agent=human"])
