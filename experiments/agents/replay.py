"""agent=replay: a recorded conversation, sent turn by turn to a server.

Each request holds all turns before it, with the tools and what they gave, and asks for as many tokens as the trace
says; whatever the model says, the recorded answer stands in the next request. So all engines do the same work, and a
prompt begins with what the server has computed already.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from experiments.agents.trace import Trace, Turn
from experiments.load_client import Answer
from experiments.load_report import Engine
from mk.config import Config
from mk.device import card_state
from mk.runs import RunFolder

CHAT = "/chat/completions"


def replay(cfg: Config, run: RunFolder, trace: Trace, engine: Engine) -> None:
    """A row of the whole trace, and a transcript."""
    assert cfg.agent.scale is not None
    asked = trace.bodies(cfg.agent.scale, cfg.sampling.temperature)
    before = card_state()
    answers = []
    with (run.path / f"transcript-{engine.name}.jsonl").open("w") as transcript:
        for turn, body in zip(trace.turns, asked, strict=True):
            answers.append(engine.client.ask(CHAT, body))
            transcript.write(json.dumps(told(len(answers), turn, answers[-1]), ensure_ascii=False) + "\n")
            transcript.flush()
    engine.append_load(
        answers,
        [body["max_tokens"] for body in asked],
        1,
        [before, card_state()],
        workload=trace.name,
        agent=cfg.agent.name,
        context=[answers[-1].prompt_tokens],
        batch=1,
        requests_hash=hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest(),
    )


def told(number: int, turn: Turn, answer: Answer) -> dict[str, Any]:
    """A line of the transcript: what went in, what came out, and what stands in its place from then on."""
    first, last = answer.arrivals[0][0], answer.arrivals[-1][0]
    return {
        "turn": number,
        "given": turn.given,
        "generated": answer.text,
        "recorded": turn.said,
        "prompt_tokens": answer.prompt_tokens,
        "cached": answer.cached,
        "tokens": answer.tokens,
        "ttft_ms": round((first - answer.sent) * 1e3, 3),
        "decode_ms": round((last - first) * 1e3, 3),
    }
