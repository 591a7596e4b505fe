"""Which parts of a step each of its operations is: waves alone, and those that torch does in one."""

from __future__ import annotations

from mk.isa import ISA, Word
from mk.schedule.cut import waves_of
from mk.schedule.lower import Program
from mk.validation import require_one_of

TOGETHER = {  # operations that are waves one after the other; of the last one's, those that the plan has
    "routing": ("router", "topk"),
    "attention_full": ("attn_full", "attn_combine"),
    "attention_sliding": ("attn_sliding", "attn_combine"),
    "moe_output": ("moe_down", "moe_combine"),  # an owner of strips adds its experts up in moe_down
}


Operations = dict[str, list[list[int]]]
"""By name, for each layer that has it the parts of `waves_of` that it is."""


def chosen(wanted: list[str] | None, operations: Operations) -> list[str]:
    """Raises MkError for an operation that the plan has not, or not alone."""
    for name in wanted or ():
        require_one_of("experiment.operations", name, operations)
    return list(operations) if wanted is None else wanted


def operations_of(program: Program) -> Operations:
    """Those that are a part alone, by the wave's name, with attention by kind of layer; then those of `TOGETHER`.

    A part may make the routing again; one that makes more again is none of these. The head goes with what samples.
    """
    found: dict[str, dict[int, int]] = {}  # by layer
    topk = ISA.named("topk").opcode
    for number, part in enumerate(waves_of(program)):
        assert part.cut is not None
        layer, wave = part.cut.name.split("-")[0].split(".", 1)
        opcodes = set(part.words[:, Word.OPCODE].tolist()) - {topk}
        if wave != "lm_head" and any(ISA.rows[opcode].wave != wave.split(".")[0] for opcode in opcodes):
            continue
        name = f"attn_{program.shape.geometry.layer_kinds[int(layer)]}" if wave == "attn" else wave
        found.setdefault(name, {})[int(layer)] = number
    operations = {name: [[part] for part in by_layer.values()] for name, by_layer in found.items()}
    for name, waves in TOGETHER.items():
        here = [found[wave] for wave in waves if wave in found]
        if waves[0] in found:
            operations[name] = [[by_layer[layer] for by_layer in here] for layer in here[0]]
    return operations
