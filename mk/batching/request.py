"""A request: what it asks for, where it stands, and what it delivers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mk.sampling import SamplingParams

Mask = npt.NDArray[np.bool_]
GREEDY = SamplingParams()


class Constraint(Protocol):
    """What a request may say next, as a function of what it has said."""

    def allowed(self) -> Mask | None:
        """Tokens that may come next, bool [vocab]; None = any."""
        ...

    def accept(self, token: int) -> None:
        """`token` came next."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How a request is continued.

    min_p 0, penalties 0, repetition_penalty 1 = off. logit_bias: added to the logits of some tokens. min_tokens: before
    as many no token ends the request. stop_token_ids end it beside the model's own, which ignore_eos disarms. logprobs:
    how many alternatives are reported beside each token, None = no logprobs; prompt_logprobs: the same for the prompt,
    whose every position is then computed, past the prefix cache. constraints: all of them hold.
    """

    max_tokens: int
    sampling: SamplingParams = GREEDY
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraints: Sequence[Constraint] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities under the model's own distribution, before penalties, bias and cuts.

    top: the likeliest tokens and theirs, by falling probability, then rising id.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token of the answer."""

    token: int
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class Delivery:
    """News of a request. finish: None while it runs, then "stop", "length", "cancelled" or "error".

    prompt_logprobs: with the first delivery, where asked for; one a prompt token, None for the first.
    """

    tokens: list[Sampled] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    cached_tokens: int = 0


class Phase(Enum):
    WAITING = "waiting"  # has nothing computed
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"  # what was computed lies in host memory
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. `sink` is called with every delivery, on the thread that runs the core; it must not block."""

    id: str
    prompt: Sequence[int]
    params: GenerationParams
    sink: Callable[[Delivery], None]
    tokens: list[int] = field(default_factory=list)
    phase: Phase = Phase.WAITING
    arrival: int = -1  # order of arrival: the earlier one never waits for, nor is preempted by, a later one
    slot: int = -1
    computed: int = 0  # tokens whose K and V are in its pages
    cached: int = 0  # of them, how many the prefix cache had
    counted: int | None = None  # of those, how many totals have; None: they do not have the prompt either
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks so far
    saved: dict[str, Any] = field(default_factory=dict)  # kind -> pages, while preempted
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    due: Delivery = field(default_factory=Delivery)  # what has not been delivered

    @property
    def context(self) -> int:
        """Tokens known; the last one's K and V come into being in the step that decodes the next."""
        return len(self.prompt) + len(self.tokens)

    def history(self) -> list[int]:
        return [*self.prompt, *self.tokens]
