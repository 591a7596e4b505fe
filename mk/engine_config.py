"""The schema of the engine's group: where attention is cut, the kernel's ring and hand-offs, how requests share a step.

Its values stand in configs/engine; what holds for every schema, in `mk/config.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mk.errors import MkError
from mk.ring import SLOT_KB, windows_of
from mk.validation import check_optional, require_at_least, require_one_of


@dataclass(slots=True)
class AttentionConfig:
    """Splits of a sequence's keys: of `split_keys`, doubled until a head has at most `max_splits`."""

    split_keys: int  # a multiple of the 64-token page
    max_splits: int


@dataclass(slots=True)
class RingConfig:
    """The shared-memory ring of 8 KB slots that every weight and KV byte passes through."""

    slots: int  # capacity: how far the producer may run ahead
    window_kb: Any  # it may have outstanding: a number, or a list, of a step of one row, of two, .. and of all beyond
    copy_kb: int  # of one bulk copy
    run_ahead: bool  # weights of tasks whose waits are not over are streamed too

    def __post_init__(self) -> None:
        require_at_least("engine.ring.slots", self.slots, 1)
        sizes = self.window_kb if isinstance(self.window_kb, list) else [self.window_kb]
        if not sizes or any(type(kb) is not int for kb in sizes):  # which the type does not say
            raise MkError(
                f"engine.ring.window_kb={self.window_kb} is neither a number nor some of them",
                hint="engine.ring.window_kb=64, or 'engine.ring.window_kb=[56,64]': of one row, and of more",
            )
        for kb in sizes:
            if not SLOT_KB <= kb <= SLOT_KB * self.slots:
                raise MkError(
                    f"engine.ring.window_kb={kb} must lie in {SLOT_KB}..{SLOT_KB * self.slots} (slots x {SLOT_KB} KB)",
                    hint=f"engine.ring.window_kb={min(64, SLOT_KB * self.slots)}",
                )
            if kb % SLOT_KB:
                raise MkError(
                    f"engine.ring.window_kb={kb} is no multiple of a slot's {SLOT_KB} KB",
                    hint=f"engine.ring.window_kb={kb // SLOT_KB * SLOT_KB}",
                )
        if self.copy_kb not in (2, 4, 8):
            raise MkError(f"engine.ring.copy_kb={self.copy_kb} must be 2, 4 or 8", hint="engine.ring.copy_kb=8")

    @property
    def windows(self) -> tuple[int, ...]:
        """Slots that may be outstanding, for `window_for`."""
        return windows_of(self.window_kb)


@dataclass(slots=True)
class HandoffConfig:
    """How the kernel's warps learn that a counter was reached."""

    pollers: str  # controller: one warp an SM, for all of them; warps: each for itself
    polls: str  # acquire: every look; relaxed: and one fence after the last
    barriers: bool  # every wave waits for the whole wave before it, not just for what it reads

    def __post_init__(self) -> None:
        require_one_of("engine.handoff.pollers", self.pollers, ("controller", "warps"))
        require_one_of("engine.handoff.polls", self.polls, ("acquire", "relaxed"))


@dataclass(slots=True)
class PrefixCacheConfig:
    """Full blocks of 64 tokens that later requests share."""

    enabled: bool
    generated: bool  # also those with generated tokens, as decode wrote them


@dataclass(slots=True)
class EngineConfig:
    """What executes the descriptors, and how a server shares it between requests."""

    name: str  # auto = cuda where there is a card and a built kernel, else interpreter
    numerics: str  # float32, or kernel: bf16 at the kernel's rounding points
    attention: AttentionConfig
    ring: RingConfig
    handoff: HandoffConfig
    prefill_policy: str  # pause: decode waits for a prompt; interleave: steps run between its chunks
    steps_between_chunks: int  # interleave: how many
    held_steps: int  # decode steps that a request holds pages for beforehand
    run_ahead: int  # steps that may be in flight at a time, beyond those whose tokens the decode loop has read
    prefix_cache: PrefixCacheConfig
    script: str | None = None  # scripted: a JSON file, [{"when": ..., "say": ...}, ...]
    trace: str = "none"  # what the kernel notes of a step: none; moments; or waits, how long each took, too

    def __post_init__(self) -> None:
        require_one_of("engine.numerics", self.numerics, ("float32", "kernel"))
        require_one_of("engine.prefill_policy", self.prefill_policy, ("pause", "interleave"))
        require_one_of("engine.trace", self.trace, ("none", "moments", "waits"))
        for key in ("steps_between_chunks", "held_steps", "run_ahead"):
            require_at_least(f"engine.{key}", getattr(self, key), 1)
        if self.handoff.pollers == "warps" and not self.ring.run_ahead:
            raise MkError(
                "engine.ring.run_ahead=false engine.handoff.pollers=warps: weights wait for what the controller has "
                "seen, and here it looks at no counter",
                hint="one of the two",
            )
        check_optional("engine", self, ("script",) if self.name == "scripted" else ())
