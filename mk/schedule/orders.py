"""Wave orders: in which sequence the waves of a layer stand in every SM's list."""

from __future__ import annotations

from collections.abc import Sequence

from mk.errors import MkError
from mk.graph import LAYER_WAVES, OPTIONAL_WAVES, PARTED_WAVES, WAVE_NAMES
from mk.isa import ISA


def check_order(waves: Sequence[str]) -> tuple[str, ...]:
    """All of `LAYER_WAVES` in any sequence, or an `MkError` that names what is wrong.

    A wave of `PARTED_WAVES` may stand several times: each place gets an equal part of it. Those of `OPTIONAL_WAVES`
    may stand among them, and so may waves that a registered operation adds to the layer. Whether the order can run (a
    wave may not stand before one it waits for) is the verifier's to say.
    """
    added = {op.wave for op in ISA.rows.values()} - set(WAVE_NAMES)
    known = (*LAYER_WAVES, *OPTIONAL_WAVES)
    unknown = [wave for wave in waves if wave not in known and wave not in added]
    if unknown:
        raise MkError(f"wave_order.waves: unknown wave {unknown[0]!r}", hint=f"waves are {', '.join(known)}")
    missing = [wave for wave in LAYER_WAVES if wave not in waves]
    if missing:
        raise MkError(
            f"wave_order.waves leaves out {', '.join(missing)}",
            hint=f"add {missing[0]}: every wave stands in the order, even one that a plan leaves empty",
        )
    twice = [wave for wave in waves if list(waves).count(wave) > 1 and wave not in PARTED_WAVES]
    if twice:
        raise MkError(f"wave_order.waves: {twice[0]!r} stands twice", hint=f"only {', '.join(PARTED_WAVES)} may")
    return tuple(waves)
