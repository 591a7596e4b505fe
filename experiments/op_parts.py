"""Which parts of a step each of its operations is: waves alone, and those that torch does in one."""

from __future__ import annotations

from mk.config import Config
from mk.isa import ISA, Word
from mk.model.geometry import Geometry
from mk.model.opening import geometry_of
from mk.programs import Plan, bucket_for
from mk.schedule.cut import waves_of
from mk.schedule.lower import Program
from mk.schedule.simulate import first_layers, layer_period
from mk.validation import require_one_of

TOGETHER = {  # operations that are waves one after the other; of the last one's, those that the plan has
    "routing": ("router", "topk"),
    "attention_full": ("attn_full", "attn_combine"),
    "attention_sliding": ("attn_sliding", "attn_combine"),
    "moe_output": ("moe_down", "moe_combine"),  # an owner of strips adds its experts up in moe_down
}


Operations = dict[str, list[list[int]]]
"""By name, for each layer that has it the parts of `waves_of` that it is."""


def chosen(cfg: Config) -> list[str]:
    """Those that are configured, before anything is loaded. Raises MkError for one that the plan has not, or not
    alone."""
    settings, g = cfg.experiment, first_period(geometry_of(cfg.model))
    bucket = bucket_for(settings.context + settings.steps)
    operations = operations_of(Plan.from_config(cfg).lower(g, settings.batches[0], bucket))
    for name in settings.operations or ():
        require_one_of("experiment.operations", name, operations)
    return settings.operations or list(operations)


def first_period(geometry: Geometry) -> Geometry:
    """The model up to where it repeats itself: every operation is there."""
    return first_layers(geometry, min(geometry.layers, sum(layer_period(geometry))))


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
