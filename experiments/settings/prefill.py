"""Of experiments on the prefill."""

from __future__ import annotations

from dataclasses import dataclass

from mk.errors import MkError
from mk.validation import require_at_least


@dataclass(slots=True)
class PrefillThroughput:
    name: str
    lengths: list[int]  # of a prompt alone, a row of results each
    packed: list[int]  # of `packed_rows` prompts in one call
    packed_rows: int
    repeats: int  # timed calls, fewer where they take longer than time_limit_s
    time_limit_s: float  # of the timed calls of one row
    check_tokens: int  # of the prompt that is checked before anything is timed

    def __post_init__(self) -> None:
        for key in ("lengths", "packed"):
            if any(length < 1 for length in getattr(self, key)):
                raise MkError(f"experiment.{key}={getattr(self, key)}: a prompt has at least 1 token")
        if not self.lengths and not self.packed:
            raise MkError("experiment.lengths and experiment.packed are empty", hint="experiment.lengths=[8192]")
        for key in ("packed_rows", "repeats"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)
        require_at_least("experiment.check_tokens", self.check_tokens, 2)


@dataclass(slots=True)
class PrefillTiles:
    name: str
    tokens: int  # of the chunk that the kernels are timed on
    repeats: int  # timed launches of each kernel with each tile
    time_limit_s: float  # no tile is begun after that
    kernels: list[str]  # qkv, o, up, down, attention_full, attention_sliding

    def __post_init__(self) -> None:
        for key in ("tokens", "repeats"):
            require_at_least(f"experiment.{key}", getattr(self, key), 1)


@dataclass(slots=True)
class PrefillCorrectness:
    name: str
    layers: list[int] | None  # measured one by one, null = all
    lengths: list[int]  # of the prompts
    cuts: list[int]  # tokens of a first call that the longest prompt is continued from
    small_chunk: int  # tokens a pass, of the call that cuts all prompts
    whole: bool  # also compare whole prompts, after the last layer
    seed: int

    def __post_init__(self) -> None:
        if not self.lengths or len(set(self.lengths)) < len(self.lengths) or min(self.lengths) < 1:
            raise MkError(f"experiment.lengths={self.lengths}: different lengths of at least 1 token are needed")
        for at in self.cuts:
            if not 0 < at < max(self.lengths):
                raise MkError(f"experiment.cuts={self.cuts}: {at} does not cut a prompt of {max(self.lengths)} tokens")
        if self.layers == []:
            raise MkError("experiment.layers is empty", hint="experiment.layers=null measures all")
        require_at_least("experiment.small_chunk", self.small_chunk, 1)
