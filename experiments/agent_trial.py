"""Send a recorded conversation of a coding agent (agent=replay) to our server and to vLLM's, turn by turn.

Each request holds all turns before it, with the tools and what they gave, and asks for as many tokens as the trace
says; whatever the model says, the recorded answer stands in the next request. So both engines do the same work, and a
prompt begins with what the server has computed already. A transcript of each engine lies in the run folder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments import load
from experiments.baselines.vllm_process import card_state
from experiments.device_weights import open_weights
from experiments.load_client import Answer
from experiments.load_report import Engine, check_engines, measure_engines
from mk.config import Config
from mk.errors import MkError
from mk.runs import RunFolder
from mk.sampling import SamplingParams

CHAT = "/chat/completions"
WARM_TOKENS, CONTINUED_TOKENS = 8, 301  # generated, and of the continuation's own


@dataclass(frozen=True, slots=True)
class Turn:
    """given: messages that are new, of user and tools. said: the recorded answer. tokens: that are generated."""

    given: list[dict[str, Any]]
    said: dict[str, Any]
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    tools: list[dict[str, Any]]
    turns: list[Turn]

    @classmethod
    def load(cls, path: Path) -> Trace:
        """From {"tools": [...], "turns": [{"given": [...], "said": {...}, "tokens": n}, ...]}. Raises MkError."""
        try:
            found = json.loads(path.read_text())
            turns = [Turn(list(turn["given"]), dict(turn["said"]), int(turn["tokens"])) for turn in found["turns"]]
            trace = cls(path.stem, list(found["tools"]), turns)
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise MkError(f"experiment.trace={path} is no trace: {error!r}"[:300]) from error
        if not turns or any(turn.tokens < 1 or not turn.given for turn in turns):
            raise MkError(f"experiment.trace={path}: every turn is given something, and generates at least 1 token")
        return trace

    def bodies(self, scale: float, temperature: float) -> list[dict[str, Any]]:
        """The requests. scale: share of the recorded tokens that is generated."""
        said: list[dict[str, Any]] = []
        asked = []
        for turn in self.turns:
            said = [*said, *turn.given]
            asked.append(
                {
                    "messages": said,
                    "tools": self.tools,
                    "tool_choice": "none",  # of the model's own answer: a server without a parser refuses others
                    "max_tokens": max(1, round(turn.tokens * scale)),
                    "ignore_eos": True,
                    "temperature": temperature,
                }
            )
            said = [*said, turn.said]
        return asked


def main(cfg: Config) -> int:
    """Exit status: 0, also where no vLLM is configured; 1 where a check failed, or vLLM did."""
    trace = Trace.load(Path(cfg.experiment.trace))
    missing = check_engines(cfg)
    with RunFolder.create(cfg) as run:
        return measure_engines(cfg, run, missing, lambda engine: replay(cfg, run, trace, engine))


def replay(cfg: Config, run: RunFolder, trace: Trace, engine: Engine) -> None:
    """A row of the whole trace, after a prompt and its continuation that warm the engine and share nothing with it."""
    settings = cfg.experiment
    vocab = open_weights(cfg, torch.device("cpu")).geometry.vocab
    draw = np.random.default_rng(settings.seed)
    warming = load.request(draw, settings.warm, WARM_TOKENS, vocab, SamplingParams())
    engine.client.ask(load.COMPLETIONS, warming)
    more = load.request(draw, CONTINUED_TOKENS, WARM_TOKENS, vocab, SamplingParams())
    engine.client.ask(load.COMPLETIONS, more | {"prompt": warming["prompt"] + more["prompt"]})
    asked = trace.bodies(settings.scale, cfg.sampling.temperature)
    before = card_state()
    answers = []
    with (run.path / f"transcript-{engine.name}.jsonl").open("w") as transcript:
        for turn, body in zip(trace.turns, asked, strict=True):
            answers.append(engine.client.ask(CHAT, body))
            transcript.write(json.dumps(told(len(answers), turn, answers[-1]), ensure_ascii=False) + "\n")
            transcript.flush()
    engine.append(
        answers,
        [body["max_tokens"] for body in asked],
        1,
        [before, card_state()],
        workload=trace.name,
        agent=settings.agent,
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
