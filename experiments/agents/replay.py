"""agent=replay: a recorded conversation, sent turn by turn to a server.

Each request holds all turns before it, with the tools and what they gave, and asks for as many tokens as the trace
says; whatever the model says, the recorded answer stands in the next request. So all engines do the same work, and a
prompt begins with what the server has computed already. A rehearsal goes before, of random tokens.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch

from experiments import load
from experiments.agents.trace import Trace, Turn
from experiments.device_weights import open_weights
from experiments.load_client import Answer
from experiments.load_report import Engine
from experiments.opening import sampling_of
from mk.config import Config
from mk.device import card_state
from mk.results.runs import RunFolder

CHAT = "/chat/completions"


def replay(cfg: Config, run: RunFolder, trace: Trace, engine: Engine) -> None:
    """A row of the whole trace, and a transcript."""
    assert cfg.agent.scale is not None
    asked = trace.bodies(cfg.agent.scale, sampling_of(cfg))
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


def rehearse(cfg: Config, trace: Trace, engine: Engine) -> None:
    """As many turns of random tokens, each as long as the trace's and going on from the one before. So an engine has
    met each length of a prompt, and of what it has to compute of it, and nothing of the conversation: kernels that are
    compiled for a length, and programs lowered for it, are no part of what is measured."""
    assert cfg.agent.scale is not None
    asked = trace.bodies(cfg.agent.scale, sampling_of(cfg))
    counts = [engine.client.count(body["messages"], body["tools"]) for body in asked]
    draw, vocab = np.random.default_rng(cfg.experiment.seed), open_weights(cfg, torch.device("cpu")).geometry.vocab
    drawn = load.request(draw, max(counts), 1, vocab, sampling_of(cfg))
    for count, body in zip(counts, asked, strict=True):
        turn = {"prompt": drawn["prompt"][:count], "max_tokens": body["max_tokens"]}
        engine.client.ask(load.COMPLETIONS, drawn | turn)


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
