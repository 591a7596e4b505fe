"""The scheduler: which request is computed when, in which slot, and on which pages.

One `tick` is one chunk of a prompt, or a run of decode steps. The engine's loop owns a run: it launches steps by itself
and is parked only for what cannot be done while they follow one another, which is to admit, to retire and to change the
batch. Nothing here depends on time, and nothing that a request is told depends on its neighbours: the engine computes
rows independently of each other, of how a prompt is cut and of where pages lie; a preempted request's pages are copied
to host memory and back, never recomputed; and blocks that requests share hold the bits that each would have computed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from mk.batching.logits import logprobs_of, needs_logits, pick
from mk.batching.policy import Policy
from mk.batching.request import GREEDY, Delivery, Phase, Request, Sampled
from mk.batching.seats import Seats
from mk.decode_loop import LoopStep, Parked, Run
from mk.decode_loop import finish as finish_run
from mk.engines.protocol import PagedEngine
from mk.errors import MkError
from mk.interpreter import Status, StepOutputs
from mk.kv import OutOfPages
from mk.model.geometry import PAGE
from mk.sampling import NO_TOKEN
from prefill.chunks import Prompt


@dataclass(slots=True)
class Totals:
    """What has happened so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of them, how many the prefix cache had
    generated_tokens: int = 0
    steps: Counter[int] = field(default_factory=Counter)  # of decode, by batch size
    preemptions: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # by reason


class Core:
    """Continuous batching over one engine. Not thread-safe: `mk/batching/worker.py` owns it."""

    def __init__(self, engine: PagedEngine, eos: Sequence[int], policy: Policy) -> None:
        """eos: the model's end tokens. Raises MkError for pools in which the longest context does not fit alone."""
        self.engine, self.policy, self.eos = engine, policy, frozenset(eos)
        self.seats = Seats(engine, policy)
        self.slots, self.pages, self.cache = self.seats.slots, engine.pages, self.seats.cache
        self.pages_in_use = self.seats.pages_in_use
        self.totals = Totals()
        # called between the steps of a run: takes in what has come meanwhile, and says whether the run is to end
        self.attend: Callable[[], bool] = lambda: False
        self._batch: dict[int, Request] = {}  # of a run under way, by slot
        self._leaving: list[Request] = []  # cancelled ones of them
        self._changed = False  # whether anybody has come to the queue, or left it or a slot, since a run last looked
        self._queue: list[tuple[int, Request]] = []  # by arrival; new ones and preempted ones
        self._arrivals = 0
        self._steps_since_chunk = 0

    # ---- what callers see ----

    @property
    def running(self) -> list[Request]:
        """Requests in slots, by arrival."""
        return self.seats.taken

    @property
    def waiting(self) -> list[Request]:
        return [request for _, request in sorted(self._queue, key=lambda entry: entry[0])]

    @property
    def queued(self) -> int:
        """How many wait. Any thread may ask."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        return bool(self._queue) or any(request is not None for request in self.slots)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises MkError for one that cannot be served, whatever else is running."""
        vocab, context = self.engine.geometry.vocab, self.engine.context
        if not len(request.prompt):
            raise MkError("the prompt has no tokens")
        if min(request.prompt) < 0 or max(request.prompt) >= vocab:
            raise MkError(f"a token of the prompt is outside 0..{vocab - 1}")
        # the last token is decoded, but never put in the cache
        need = len(request.prompt) + request.params.max_tokens - 1
        if request.params.max_tokens < 1 or need > context:
            raise MkError(f"{len(request.prompt)} tokens and {request.params.max_tokens} new ones exceed {context}")
        request.arrival = self._arrivals
        self._arrivals += 1
        self._changed = True
        heapq.heappush(self._queue, (request.arrival, request))

    def refuse(self, request: Request, why: str) -> None:
        """Tell a request that was never queued that it will not be served."""
        self._finish(request, "error", why)

    def cancel(self, request: Request) -> None:
        """End a request, wherever it stands: one of a run under way when that is parked, any other now."""
        if self._batch.get(request.slot) is request:
            self._leaving.append(request)
        elif request.phase is not Phase.FINISHED:
            self._finish(request, "cancelled")

    def fail_all(self, message: str) -> None:
        """End everything with an error, and forget the cache: the engine's memory can no longer be trusted.

        Raises what the end of one request raised, after all others have ended too.
        """
        with ExitStack() as every:  # the last one first
            if self.cache:
                every.callback(self.cache.clear)
            for request in reversed([*self.running, *self.waiting]):
                every.callback(self._finish, request, "error", message)

    def tick(self) -> bool:
        """One chunk or one run of steps; False if there is nothing to do."""
        self._admit()
        running = self.running
        prefilling = [r for r in running if r.phase is Phase.PREFILL]
        decoding = [r for r in running if r.phase is Phase.DECODE]
        pause = self.policy.prefill == "pause"
        if prefilling and (pause or not decoding or self._steps_since_chunk >= self.policy.steps_between):
            self._steps_since_chunk = 0
            self._prefill(self._pack(prefilling))
        elif decoding:
            self._decode(decoding, self.policy.steps_between - self._steps_since_chunk if prefilling else None)
        return bool(running)

    # ---- admission and preemption ----

    def _admit(self) -> None:
        while self._queue and None in self.slots:
            request = self._queue[0][1]
            hit = self.seats.lookup(request)
            alone = all(slot is None for slot in self.slots)
            if not (alone or self.seats.fits(request, hit)) or not self.seats.seat(request, hit):
                return  # later ones do not overtake it
            heapq.heappop(self._queue)
            self._count(request)

    def _preempt(self, request: Request) -> None:
        """Put a request back into the queue, where its arrival places it."""
        self.seats.save(request)
        heapq.heappush(self._queue, (request.arrival, request))
        self.totals.preemptions += 1

    def _reserve(self, request: Request, keys: int, since: int | None = None) -> bool:
        """Room for a request's next tokens, at the expense of later ones; False if it had to give way itself."""
        while True:
            try:
                self._hold(request, keys, since)
                return True
            except OutOfPages:
                last = self.running[-1]
                if last is request and len(self.running) == 1:
                    raise
                self._preempt(last)
                if last is request:
                    return False

    def _hold(self, request: Request, keys: int, since: int | None = None) -> None:
        """Room for a request's next tokens. Raises OutOfPages."""
        self.pages.release_window(request.slot, request.computed)
        self.pages.reserve(request.slot, keys, since)

    # ---- prompts ----

    def _prefill(self, chunk: Sequence[tuple[Request, int]]) -> None:
        """Compute prompts up to a token each, and where that is the last one the first token of the answer."""
        if not chunk:
            return
        prompts = [Prompt(each.slot, each.prompt[each.computed : hi], each.computed) for each, hi in chunk]
        # before the engine gives back what leaves the window; nobody can match them before the chunk is computed
        published = [block for request, hi in chunk for block in self.seats.publish(request, hi)]
        try:
            if _alone(chunk[0][0]):
                (prompt,) = prompts
                rows = self.engine.prefill(prompt.slot, prompt.tokens, prompt.start, every=True)
                self._note_prompt(chunk[0][0], prompt.start, rows)
                found = [rows[-1]]
            else:
                found = list(self.engine.prefill_together(prompts))
        except MkError as error:
            if self.cache:
                self.cache.retract(published)
            if len(chunk) == 1:
                self._finish(chunk[0][0], "error", str(error))
            else:  # nothing was done: whose error it is shows where each is alone
                for one in chunk:
                    self._prefill([one])
            return
        for request, hi in chunk:
            request.computed = hi
        for (request, hi), logits in zip(chunk, found, strict=True):
            if hi == len(request.prompt):
                request.phase = Phase.DECODE
                self._take(request, pick(logits, request, self._ends(request)), logits)

    def _pack(self, requests: Sequence[Request]) -> list[tuple[Request, int]]:
        """What the next chunk computes of each prompt, up to which token: of the first one as much as it holds, then of
        later ones, as long as there is room and nobody has to give way. Empty where the first one had to.

        Who begins with what another one is about to compute waits for that.
        """
        first, *later = requests
        self._look_again(first)
        hi = min(first.computed + self.policy.chunk, len(first.prompt))
        if not self._reserve(first, hi, since=first.computed):
            return []
        chunk, room = [(first, hi)], self.policy.chunk - (hi - first.computed)
        if _alone(first) or not self.engine.packs:
            return chunk
        coming = set(self.seats.filled(first, hi))
        for request in later:
            if room == 0 or _alone(request) or request.phase is not Phase.PREFILL:
                break
            self._look_again(request)
            shared = min(request.computed + PAGE, (len(request.prompt) - 1) // PAGE * PAGE)  # as far as it could hit
            if not coming.isdisjoint(self.seats.filled(request, shared)):
                continue
            hi = min(request.computed + room, len(request.prompt))
            try:
                self._hold(request, hi, since=request.computed)
            except OutOfPages:
                break
            chunk.append((request, hi))
            coming.update(self.seats.filled(request, hi))
            room -= hi - request.computed
        return chunk

    def _look_again(self, request: Request) -> None:
        """A prompt that has not been begun begins behind what others have computed of it by now."""
        if self.seats.look_again(request):
            self._count(request)

    def _count(self, request: Request) -> None:
        """A prompt once, however often it is seated before it is begun, and what it has hit at most."""
        if request.counted is None:
            self.totals.prompt_tokens += len(request.prompt)
        self.totals.cached_tokens += max(0, request.cached - (request.counted or 0))
        request.counted = max(request.cached, request.counted or 0)
        request.due.cached_tokens = request.cached

    def _note_prompt(self, request: Request, lo: int, logits: np.ndarray) -> None:
        """Logprobs of the prompt tokens after positions lo..; the first token of all has none."""
        if not request.prompt_logprobs:
            request.prompt_logprobs.append(None)
        count = request.params.prompt_logprobs or 0
        following = request.prompt[lo + 1 : lo + 1 + len(logits)]
        request.prompt_logprobs += [
            logprobs_of(row, token, count) for row, token in zip(logits, following, strict=False)
        ]

    # ---- steps ----

    def _decode(self, requests: Sequence[Request], steps: int | None) -> None:
        """A run of all requests that have the pages for it, of at most `steps`; of one where a token is picked here."""
        for request in requests:
            if request.phase is Phase.DECODE:  # not preempted for an earlier one
                self._reserve(request, request.context)
        decoding = [request for request in requests if request.phase is Phase.DECODE]
        if not decoding:
            return
        rows = self.seats.gather(decoding)
        batch = {request.slot: request for request in decoding}
        tokens, keys, sampling = [0] * rows, [0] * rows, [GREEDY] * rows
        on_host = {slot for slot, request in batch.items() if needs_logits(request, self._ends(request))}
        for slot, request in batch.items():
            tokens[slot], keys[slot] = request.tokens[-1], request.context
            if slot not in on_host:
                sampling[slot] = request.params.sampling
        if on_host:
            self._account(batch, self.engine.step(tokens, keys, sampling), on_host)
            return
        self.seats.hold_more(decoding)
        budgets, ends = [0] * rows, [frozenset[int]()] * rows
        for slot, request in batch.items():
            budgets[slot] = request.params.max_tokens - len(request.tokens)
            ends[slot] = self._ends(request)
        self._run(batch, Run(tokens, keys, sampling, self.seats.held(rows), budgets, ends, steps))

    def _run(self, batch: dict[int, Request], run: Run) -> None:
        """A run from its start to its park.

        A request that ends gives its pages back at once; nobody gets any before the steps that write to them are over.
        """
        loop, parking = self.engine.loop, False
        loop.resume(run)
        self._batch, self._changed = batch, False
        try:
            while steps := loop.read():
                for step in steps:
                    self._account(batch, step)
                parking = self.attend() or self._wants_park() or parking
                if parking:
                    loop.park()
                elif self.seats.hold_more(list(batch.values())):
                    loop.grant(self.seats.held(len(run.keys)))
        finally:
            self._batch = {}
            leaving, self._leaving = self._leaving, []
            if loop.parked is Parked.RUNNING:  # something else than the loop has failed
                loop.park()
                finish_run(loop)
        for request in leaving:
            self.cancel(request)

    def _wants_park(self) -> bool:
        """Whether there is something to do that the run under way is in the way of."""
        if self._leaving or any(request.phase is Phase.FINISHED for request in self._batch.values()):
            return True
        changed, self._changed = self._changed, False
        if not (changed and self._queue and None in self.slots):
            return False
        first = self._queue[0][1]
        return self.seats.fits(first, self.seats.lookup(first))

    def _account(
        self, batch: Mapping[int, Request], out: StepOutputs | LoopStep, on_host: Collection[int] = ()
    ) -> None:
        """What a step means for its requests. on_host: slots whose token is picked here."""
        self.totals.steps[len(out.tokens)] += 1
        self._steps_since_chunk += 1
        for slot, request in sorted(batch.items()):
            if request.phase is Phase.FINISHED:
                continue
            if out.status[slot]:
                status = Status(int(out.status[slot])).name
                self._finish(request, "error", f"the model's numbers are not finite ({status})")
                continue
            self.seats.publish(request, request.context)
            request.computed = request.context
            if slot in on_host:
                assert isinstance(out, StepOutputs)
                self._take(request, pick(out.logits[slot], request, self._ends(request)), out.logits[slot])
            else:
                self._take(request, int(out.tokens[slot]), None)

    # ---- results ----

    def _ends(self, request: Request) -> frozenset[int]:
        own = frozenset() if request.params.ignore_eos else self.eos
        return own | request.params.stop_token_ids

    def _take(self, request: Request, token: int, logits: np.ndarray | None) -> None:
        """A request's next token, and what it says about the end."""
        if token == NO_TOKEN:
            self._finish(request, "error", "no token may come next, or the model's numbers are not finite")
            return
        logprobs = None
        if request.params.logprobs is not None:
            assert logits is not None
            logprobs = logprobs_of(logits, token, request.params.logprobs)
        request.tokens.append(token)
        request.due.tokens.append(Sampled(token, logprobs))
        self.totals.generated_tokens += 1
        for constraint in request.params.constraints:
            constraint.accept(token)
        if token in self._ends(request):
            self._finish(request, "stop")
        elif len(request.tokens) >= request.params.max_tokens:
            self._finish(request, "length")
        elif len(request.due.tokens) >= self.policy.deliver:
            self._deliver(request)

    def _finish(self, request: Request, why: str, error: str | None = None) -> None:
        try:
            self._leave(request)
        finally:  # whatever is wrong with what it held, it hears of its end
            request.phase, request.saved = Phase.FINISHED, {}
            request.due.finish, request.due.error = why, error
            self.totals.finished[why] += 1
            self._deliver(request)

    def _leave(self, request: Request) -> None:
        """Out of its slot, or the queue."""
        self._changed = True  # who stood behind it, or lacked its slot or its pages, may be next
        if request.slot >= 0:
            if self.cache:
                self.cache.touch(request.hashes)
            self.seats.vacate(request)
        else:
            self._queue = [entry for entry in self._queue if entry[1] is not request]
            heapq.heapify(self._queue)

    def _deliver(self, request: Request) -> None:
        if request.prompt_logprobs and request.computed >= len(request.prompt):
            request.due.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
        due, request.due = request.due, Delivery(cached_tokens=request.cached)
        request.sink(due)


def _alone(request: Request) -> bool:
    """Whether a prompt's logits are wanted after every token, which is no part of what prompts get together."""
    return request.params.prompt_logprobs is not None
