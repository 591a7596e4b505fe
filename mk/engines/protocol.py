"""What computes a decode step. Each engine holds the KV of a fixed number of batch slots.

A batch decoder (`mk/decode.py`) drives any of them without knowing which; continuous batching (`mk/batching/`) those
whose KV lies in pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mk.decode_loop import DecodeLoop
from mk.interpreter import StepOutputs
from mk.kv import PageAllocator
from mk.model.geometry import Geometry
from mk.sampling import SamplingParams
from mk.schedule.lower import Program
from prefill.chunks import Prompt

Logits = npt.NDArray[np.float32]


class Engine(Protocol):
    """`rows` batch slots with room for `context` tokens each. `program` is what the last step ran, None without one."""

    name: str
    geometry: Geometry
    rows: int
    context: int

    @property
    def program(self) -> Program | None: ...

    def executed_hash(self) -> str | None:
        """Of the schedule that the last step executed, read back from the machine; None without one."""
        ...

    def prefill(self, row: int, tokens: Sequence[int], start: int = 0, every: bool = False) -> Logits:
        """Take in tokens at positions start.. of a slot that holds the `start` tokens before them.

        Returns the logits after the last one, float32 [vocab], or after `every` one, [tokens, vocab]. Raises MkError.
        """
        ...

    def step(
        self,
        tokens: Sequence[int] | None,
        keys: Sequence[int],
        sampling: Sequence[SamplingParams],
        details: bool = True,
    ) -> StepOutputs:
        """Decode one token in every active row.

        tokens [rows]: what each row continues with; None = what the last step sampled. keys [rows]: context lengths
        with that token, 0 = inactive row. details: whether logits and experts are wanted besides tokens and status; an
        engine to which they are no trouble gives them anyway. Raises MkError.
        """
        ...

    def free(self, row: int) -> None:
        """Give a slot's memory back; its next sequence starts empty."""
        ...


class PagedEngine(Engine, Protocol):
    """An engine whose KV lies in pages: what continuous batching needs.

    sizes: batch sizes that it is built for, ascending, the last of them `rows`. A step has one row for each of the
    first slots: `tokens`, `keys`, `sampling` and what comes out are of any one of these sizes.
    """

    pages: PageAllocator
    sizes: tuple[int, ...]

    @property
    def packs(self) -> bool:
        """Whether prompts that are prefilled together share a pass over the weights, at the bits each has alone."""
        ...

    def prefill_together(self, prompts: Sequence[Prompt]) -> Sequence[Logits]:
        """As `prefill`, several slots at once: the logits after the last token of each, the same bits as alone.

        An MkError, of whichever prompt, leaves all of them undone.
        """
        ...

    @property
    def loop(self) -> DecodeLoop:
        """What decodes where nobody has to look at a step's logits. `step`, `prefill` and the copies want it parked."""
        ...

    def copy_out(self, kind: str, pages: Sequence[int]) -> Any:
        """What some physical pages hold, in host memory."""
        ...

    def copy_in(self, kind: str, pages: Sequence[int], values: Any) -> None:
        """Fill as many pages with what `copy_out` gave, bit for bit."""
        ...
