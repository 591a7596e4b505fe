"""Batched decode: requests in batch rows, token by token, whatever engine computes the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mk.engines.protocol import Engine
from mk.errors import MkError
from mk.interpreter import Status, StepOutputs
from mk.sampling import NO_TOKEN, SamplingParams, sample_row

GREEDY = SamplingParams()


@dataclass(slots=True)
class Request:
    """One prompt and what has been decoded after it.

    finish: None while it runs, then "eos" (its last token is one), "length", or "error" (its numbers were not finite).
    """

    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None

    @property
    def context(self) -> int:
        """Tokens known so far; the last one's K and V come into being in the step that decodes the next."""
        return len(self.prompt) + len(self.tokens)


class Decoder:
    """Requests in the rows of an engine. Rows finish at different times; a free row takes the next request."""

    def __init__(self, engine: Engine, eos: Sequence[int] = ()) -> None:
        """`eos`: tokens that end a request, from the model's folder; none = only `max_tokens` does."""
        self.engine = engine
        self.eos = frozenset(eos)
        self.rows: list[Request | None] = [None] * engine.rows
        self._fed_back = False  # whether every active row's token is the one that the last step sampled

    @property
    def active(self) -> int:
        """Rows that hold a request."""
        return sum(request is not None for request in self.rows)

    def add(self, request: Request, row: int | None = None) -> None:
        """Prefill a request into a free row, the first or the given one; it comes back with its first token.

        Raises MkError for a request that does not fit the model or the engine, and when no row is free.
        """
        self._check(request)
        if None not in self.rows or (row is not None and self.rows[row] is not None):
            raise MkError(f"{self.active} of {self.engine.rows} batch rows are taken", hint="decode until one finishes")
        row = self.rows.index(None) if row is None else row
        try:
            logits = self.engine.prefill(row, request.prompt)
        except MkError:
            self.engine.free(row)
            raise
        token = sample_row(logits, request.sampling, len(request.prompt))
        if token == NO_TOKEN:
            self.engine.free(row)
            raise MkError(f"the logits after the {len(request.prompt)} tokens of the prompt are not finite")
        self.rows[row] = request
        self._fed_back = False
        self._take(row, request, token)

    def step(self) -> StepOutputs:
        """One token more in every row that holds a request.

        Raises MkError when there is none, and after the step for rows whose numbers were not finite; those are free.
        """
        if not self.active:
            raise MkError("there is nothing to decode", hint="Decoder.add first")
        requests = list(self.rows)
        keys = [0 if request is None else request.context for request in requests]
        tokens = None if self._fed_back else [0 if request is None else request.tokens[-1] for request in requests]
        sampling = [GREEDY if request is None else request.sampling for request in requests]
        self._fed_back = False  # should the step break off
        out = self.engine.step(tokens, keys, sampling)
        self._fed_back = True
        failed = []
        for row, request in enumerate(requests):
            if request is None:
                continue
            if out.status[row]:
                failed.append(f"row {row}: {Status(int(out.status[row])).name} at position {keys[row]}")
                self._finish(row, request, "error")
            else:
                self._take(row, request, int(out.tokens[row]))
        if failed:
            raise MkError("; ".join(failed), hint="the other rows can go on")
        return out

    def run(self) -> Iterator[StepOutputs]:
        """Step until every request is finished."""
        while self.active:
            yield self.step()

    def _take(self, row: int, request: Request, token: int) -> None:
        request.tokens.append(token)
        if token in self.eos:
            self._finish(row, request, "eos")
        elif len(request.tokens) >= request.max_tokens:
            self._finish(row, request, "length")

    def _finish(self, row: int, request: Request, why: str) -> None:
        request.finish = why
        self.rows[row] = None
        self.engine.free(row)

    def _check(self, request: Request) -> None:
        if request.max_tokens < 1:
            raise MkError(f"max_tokens={request.max_tokens} must be at least 1")
        # the last token is decoded, but never put in the cache
        need = len(request.prompt) + request.max_tokens - 1
        if need > self.engine.context:
            raise MkError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} new ones need a context of {need}, "
                f"the engine has room for {self.engine.context}",
                hint="shorten the prompt, or decode fewer tokens",
            )
