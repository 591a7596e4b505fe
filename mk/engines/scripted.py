"""A model that says what it is told to, for everything around a model: scheduler, pages, cache, sampler, server.

Its K and V are the tokens themselves. They lie in pages of both kinds as a real model's do, and a row's next logits
follow from what its pages say; so a page that was shared, moved, copied or given back wrongly changes the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mk.decode_loop import TwinLoop
from mk.errors import MkError
from mk.interpreter import StepOutputs
from mk.kv import ABSENT, KINDS, PageAllocator, blocks_of, first_visible
from mk.model.geometry import PAGE, Geometry
from mk.model.tokenizer import Tokenizer
from mk.sampling import NO_TOKEN, SamplingParams, sample_row
from mk.schedule.lower import Program
from prefill.chunks import Prompt

SURE = 30.0  # a logit beside which others, at 0, have a probability of e^-30 each

Logits = npt.NDArray[np.float32]


class Script(Protocol):
    """What comes after some tokens."""

    def __call__(self, history: Sequence[int]) -> Mapping[int, float]:
        """Logits of some tokens; all others have 0. Raises MkError for a step that is to fail."""
        ...


class ScriptedEngine:
    """An engine (`mk.engines.protocol.PagedEngine`) whose model is a script."""

    name = "scripted"

    def __init__(
        self,
        geometry: Geometry,
        script: Script,
        rows: int,
        context: int,
        pages: Mapping[str, int],
        seed: int = 0,
        sizes: Sequence[int] | None = None,
        ahead: int = 1,
    ) -> None:
        self.geometry, self.script = geometry, script
        self.rows, self.context = rows, context
        self.sizes = (rows,) if sizes is None else tuple(sizes)
        self.program: Program | None = None
        self.pages = PageAllocator(geometry, pages, rows, blocks_of(context), seed)
        self.pools = {kind: np.full((pages[kind], PAGE), NO_TOKEN, np.int64) for kind in KINDS}
        self.loop = TwinLoop(self._compute, ahead)
        self._sampled = [0] * rows

    def executed_hash(self) -> None:
        return None

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> Logits:
        history = self._take_in(Prompt(row, tokens, start))
        ends = range(start + 1, len(history) + 1) if every else [len(history)]
        logits = np.stack([self._logits(history[:end]) for end in ends])
        self.pages.release_window(row, len(history))
        return logits if every else logits[0]

    @property
    def packs(self) -> bool:
        return True

    def prefill_together(self, prompts: Sequence[Prompt]) -> Sequence[Logits]:
        found = [self._logits(self._take_in(prompt)) for prompt in prompts]
        for prompt in prompts:  # not before all went well
            self.pages.release_window(prompt.slot, prompt.end)
        return found

    def _take_in(self, prompt: Prompt) -> list[int]:
        """Write its tokens to its pages; all that they hold then."""
        self.pages.reserve(prompt.slot, prompt.end, since=prompt.start)
        for position, token in enumerate(prompt.tokens, prompt.start):
            self._write(prompt.slot, position, token)
        return self._history(prompt.slot, prompt.end)

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        self.pages.advance(keys)
        out = self._compute(self._sampled if tokens is None else tokens, keys, sampling)
        self._sampled = np.maximum(out.tokens, 0).tolist()
        return out

    def _compute(self, tokens: Sequence[int], keys: Sequence[int], sampling: Sequence[SamplingParams]) -> StepOutputs:
        out = StepOutputs.blank(len(keys), self.geometry.vocab)
        for row in np.flatnonzero(keys).tolist():
            self._write(row, keys[row] - 1, tokens[row])
            out.logits[row] = self._logits(self._history(row, keys[row]))
            out.tokens[row] = sample_row(out.logits[row], sampling[row], keys[row])
        return out

    def free(self, row: int) -> None:
        self.pages.free(row)

    def copy_out(self, kind: str, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        return self.pools[kind][list(pages)]

    def copy_in(self, kind: str, pages: Sequence[int], values: npt.NDArray[np.int64]) -> None:
        self.pools[kind][list(pages)] = values

    def _write(self, row: int, position: int, token: int) -> None:
        for kind in KINDS:
            page = self.pages.table[kind][row, position // PAGE]
            if page != ABSENT:
                self.pools[kind][page, position % PAGE] = token

    def _history(self, row: int, keys: int) -> list[int]:
        """The tokens that the row's pages hold. Where the window's say something else, a page was mistaken."""
        full = self._read("full", row, 0, keys)
        seen = first_visible(keys, self.geometry.window_keys)
        if self._read("sliding", row, seen, keys) != full[seen:] or NO_TOKEN in full:
            raise RuntimeError(f"row {row}: the pages of its {keys} keys do not hold one sequence")
        return full

    def _read(self, kind: str, row: int, lo: int, hi: int) -> list[int]:
        first = lo // PAGE
        pages = self.pages.table[kind][row, first : blocks_of(hi)]
        if (pages == ABSENT).any():
            raise RuntimeError(f"row {row}: a {kind} block of keys {lo} to {hi - 1} has no page")
        tokens: list[int] = self.pools[kind][pages].reshape(-1)[lo - first * PAGE : hi - first * PAGE].tolist()
        return tokens

    def _logits(self, history: Sequence[int]) -> Logits:
        logits = np.zeros(self.geometry.vocab, np.float32)
        for token, logit in self.script(history).items():
            logits[token] = logit
        return logits


@dataclass(frozen=True, slots=True)
class Reply:
    """`when` the last turn of the prompt (without a chat template: the prompt's end) holds a text, `say` another.

    Markers are spelled out in `say`, which begins inside thinking and may be token ids; the end of turn follows by
    itself.
    """

    when: str
    say: str | Sequence[int]


def read_replies(path: Path) -> list[Reply]:
    """Of a JSON file: [{"when": ..., "say": ...}, ...]. Raises MkError."""
    try:
        entries = json.loads(path.read_text())
        if not isinstance(entries, list):
            raise TypeError(f"a list of replies, not {entries!r:.40}")
        replies = [Reply(**entry) for entry in entries]
        for reply in replies:
            ids = isinstance(reply.say, list) and all(type(token) is int and token >= 0 for token in reply.say)
            if not isinstance(reply.when, str) or not (ids or isinstance(reply.say, str)):
                raise TypeError(f"a text to say at a text, not {reply.say!r:.40} at {reply.when!r:.40}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise MkError(f"engine.script={path}: {said}", hint='[{"when": "hi", "say": "..."}, ...]') from error
    return replies


class Replies:
    """A script of replies; the first that fits a prompt is its answer."""

    def __init__(self, tokenizer: Tokenizer, replies: Sequence[Reply]) -> None:
        self._tokenizer = tokenizer
        self._replies: list[tuple[str, list[int]]] = []
        for reply in replies:
            self.add(reply)
        self._otherwise = tokenizer.encode("<|END_THINKING|><|START_TEXT|>The script has no reply.<|END_TEXT|>")
        self._end_thinking = tokenizer.marker("end_thinking")

    def add(self, reply: Reply) -> None:
        say = self._tokenizer.encode(reply.say) if isinstance(reply.say, str) else list(reply.say)
        self._replies.append((reply.when, say))

    def __call__(self, history: Sequence[int]) -> Mapping[int, float]:
        said, say = self._find(list(history))
        at = len(said)
        if self._end_thinking in said and self._end_thinking in say:
            # thinking that the template closed, or a budget cut short, is over for the script too
            at = say.index(self._end_thinking) + len(said) - said.index(self._end_thinking)
        return {say[at] if at < len(say) else self._tokenizer.eos[0]: SURE}

    def _find(self, history: list[int]) -> tuple[list[int], list[int]]:
        """What has been said since the prompt, and what is to be said in all."""
        chatbot = self._tokenizer.markers.get("chatbot")
        if chatbot not in history:
            return self._find_text(history)
        last = len(history) - 1 - history[::-1].index(chatbot)
        turns = [i for i in range(last - 1) if history[i] == self._tokenizer.marker("start_turn")]
        turn = self._tokenizer.decode(history[turns[-1] if turns else 0 : last - 1])
        said = history[last + 2 :]  # after the marker that begins thinking
        return said, next((say for when, say in self._replies if when in turn), self._otherwise)

    def _find_text(self, history: list[int]) -> tuple[list[int], list[int]]:
        for when, say in self._replies:
            key = self._tokenizer.encode(when)
            for end in range(len(history), len(key) - 1, -1):
                if key and history[end - len(key) : end] == key:
                    return history[end:], say
        return [], []
