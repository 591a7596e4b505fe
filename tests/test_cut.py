"""Parts of a step: one after the other they compute the step's own bits, and the verifier knows what they may read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest

from mk.errors import MkError
from mk.isa import ISA, NONE, Flag, Word
from mk.sampling import SamplingParams
from mk.schedule.cut import before, cut, launches_of, places, waves_of
from mk.schedule.lower import Program
from mk.verify import VerifyError, verify
from tests.interpreter_rig import GEOMETRY, WAVE_ORDERS, batch, program, random_tokens

LAYERS = GEOMETRY.layers
PROMPTS = (random_tokens(100, seed=1), [], random_tokens(63, seed=2))  # past the window, inactive, a page's last token
PLANS = [
    ("default", "row_owner", False),
    ("default", "round_robin", True),
    ("parted", "row_owner", False),
    ("parted", "dependency_affinity", True),
    ("router_first", "row_owner", True),
    ("interleaved", "round_robin", False),
    ("attention_first", "row_owner", True),
    ("oproj_before_down", "dependency_affinity", False),
    ("oproj_prefetch", "row_owner", False),
]


def plan(order: str = "default", placement: str = "row_owner", stealing: bool = False) -> Program:
    return program(len(PROMPTS), order, placement, stealing)


def ops(part: Program) -> set[tuple[str, int]]:
    pairs = part.words[:, [Word.OPCODE, Word.LAYER]]
    return {(ISA.rows[opcode].name, layer) for opcode, layer in pairs.tolist()}


def refusal(part: Program) -> str:
    with pytest.raises(VerifyError) as refused:
        verify(part)
    return f"{refused.value.kind}: {refused.value}"


@pytest.mark.parametrize(("order", "placement", "stealing"), PLANS)
@pytest.mark.parametrize("numerics", ["float32", "kernel"])
def test_wave_after_wave_gives_the_bits_of_the_step(order: str, placement: str, stealing: bool, numerics: str) -> None:
    """Every SM forgets what it holds after every wave; the verifier accepts each of them."""
    whole = plan(order, placement, stealing)
    expected = batch(whole, PROMPTS, numerics=numerics).step()
    parted = batch(whole, PROMPTS, numerics=numerics, seed=3)
    inputs = parted.inputs()
    for part in waves_of(whole):
        verify(part)
        parted.machine.load(part)
        out = parted.machine.step(inputs)
    assert (out.tokens == expected.tokens).all()
    assert (out.logits.view(np.int32) == expected.logits.view(np.int32)).all()


@pytest.mark.parametrize(("order", "placement", "stealing"), PLANS)
def test_launch_after_launch_gives_the_bits_of_the_step(order: str, placement: str, stealing: bool) -> None:
    """Without the waves that leave nothing in memory: what those make is made again where it is read."""
    whole = plan(order, placement, stealing)
    expected = batch(whole, PROMPTS, numerics="kernel").step()
    parted = batch(whole, PROMPTS, numerics="kernel", seed=3)
    inputs = parted.inputs()
    launches = launches_of(whole)
    names = {part.cut.name for part in launches if part.cut}
    left = {part.cut.name.split(".")[1] for part in waves_of(whole) if part.cut and part.cut.name not in names}
    local = {"topk", "moe_down", "dense_down", "oproj"} if placement == "row_owner" else {"topk"}
    assert left - {"oproj_prefetch"} == local
    for part in launches:
        verify(part)
        parted.machine.load(part)
        out = parted.machine.step(inputs)
    assert (out.tokens == expected.tokens).all()
    assert (out.logits.view(np.int32) == expected.logits.view(np.int32)).all()


@pytest.mark.parametrize(("order", "placement", "stealing"), PLANS[:4])
def test_layer_after_layer_gives_the_bits_of_the_step(order: str, placement: str, stealing: bool) -> None:
    whole = plan(order, placement, stealing)
    expected = batch(whole, PROMPTS).step()
    parted = batch(whole, PROMPTS)
    inputs = parted.inputs()
    ends = [None, *(f"{layer}.rmsnorm" for layer in range(LAYERS)), None]
    names = [place.name for place in places(whole) if place.end > place.first]
    for last, stop in itertools.pairwise(ends):
        part = cut(whole, None if last is None else names[names.index(last) + 1], stop)
        verify(part)
        parted.machine.load(part)
        out = parted.machine.step(inputs)
    assert (out.logits.view(np.int32) == expected.logits.view(np.int32)).all()


def test_a_part_has_its_waves_and_what_it_must_make_again() -> None:
    owned, memory = plan("default", "row_owner"), plan("default", "round_robin")
    assert ops(cut(owned, "2.attn", "2.attn")) == {("attention", 2)}
    assert ops(cut(owned, "2.moe_up", "2.moe_up")) == {("topk", 2), ("moe_up", 2)}
    residual = {("o_proj", 2), ("topk", 2), ("moe_down_owned", 2), ("residual", 2)}
    assert ops(cut(owned, "2.rmsnorm", "2.rmsnorm")) == residual
    assert ops(cut(memory, "2.rmsnorm", "2.rmsnorm")) == {("residual", 2)}
    stealing = plan("default", "round_robin", stealing=True)
    assert ops(cut(stealing, "0.attn", "0.attn")) == {("attn_drain", 0), ("route_setup", 0)}
    flags = cut(owned, "2.oproj").words
    residuals = flags[:, Word.OPCODE] == ISA.named("residual").opcode
    assert (flags[residuals, Word.FLAGS] == Flag.PART).all() and not (flags[~residuals, Word.FLAGS] & Flag.PART).any()
    assert cut(owned, "2.attn", "3.router").cut.name == "2.attn-3.router"


def test_waves_between_two_points_follow_what_runs_before() -> None:
    whole = plan()
    names = [part.cut.name for part in waves_of(whole)]
    assert names[0] == "0.embed" and names[-1] == f"{LAYERS}.lm_head-{LAYERS}.sample"
    some = [part.cut.name for part in waves_of(whole, "2.attn", "3.router")]
    assert some == names[names.index("2.attn") : names.index("3.router") + 1]
    earlier = before(whole, "2.attn")
    assert earlier is not None and ops(earlier) | {("attention", 2)} == ops(cut(whole, None, "2.attn"))
    assert before(whole, None) is None and before(whole, "0.embed") is None


def test_the_whole_step_cut_at_its_ends_is_the_step() -> None:
    whole = plan()
    part = cut(whole)
    residuals = whole.words[:, Word.OPCODE] == ISA.named("residual").opcode
    same = [word for word in Word if word != Word.FLAGS]
    assert (part.words[:, same] == whole.words[:, same]).all() and part.counters == whole.counters
    assert (part.words[~residuals] == whole.words[~residuals]).all()


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0, 30), SamplingParams(0.8, top_p=0.9), SamplingParams(2.0, 30, 0.9)]
)
def test_a_part_that_samples_begins_without_what_an_earlier_program_counted(params: SamplingParams) -> None:
    """Bins and shortlists hold what a step adds to them: another program's would be counted twice."""
    whole = program(len(PROMPTS), draws=True)
    head = cut(whole, f"{LAYERS}.lm_head")
    verify(head)
    drawn = set()
    for seed in range(8):
        sampled = batch(whole, PROMPTS)
        inputs = sampled.inputs(sampling=[dataclasses.replace(params, seed=seed)] * len(PROMPTS))
        first = sampled.machine.step(inputs)
        memory = sampled.machine.memory
        counts, masses, listed = memory.bin_counts.copy(), memory.bin_masses.copy(), deepcopy(memory.undecided)
        assert counts.any() and masses.any() and any(map(any, listed))
        sampled.machine.load(head)
        assert sampled.machine.memory is memory
        again = sampled.machine.step(inputs)
        assert again.tokens.tolist() == first.tokens.tolist() and first.tokens[0] >= 0
        assert (memory.bin_counts == counts).all() and (memory.bin_masses == masses).all()
        assert [list(map(sorted, rows)) for rows in memory.undecided] == [list(map(sorted, rows)) for rows in listed]
        drawn.add(int(first.tokens[0]))
    assert len(drawn) > 1


def test_an_order_that_names_a_wave_twice_has_numbered_parts() -> None:
    whole = plan("parted")
    first, second, both = (cut(whole, f"2.moe_up{part}", f"2.moe_up{part}") for part in (".0", ".1", ""))
    ranks = [
        part.words[part.words[:, Word.OPCODE] == ISA.named("moe_up").opcode, Word.RANK].tolist()
        for part in (first, second, both)
    ]
    assert sorted(ranks[0] + ranks[1]) == sorted(ranks[2]) and not set(ranks[0]) & set(ranks[1])
    assert both.cut.name == "2.moe_up.0-2.moe_up.1"


@pytest.mark.parametrize(
    ("start", "stop", "message", "hint"),
    [
        ("2.atn", None, "start_at=2.atn: no such wave, layer 2 has qkv, ", "start_at=2.attn"),
        ("9.attn", None, f"start_at=9.attn: no such wave, layers are 0..{LAYERS}", "start_at="),
        ("attn", None, "start_at=attn: no such wave", "start_at="),
        (None, "0.moe_up", "stop_after=0.moe_up: no such wave, layer 0 has embed, qkv, .*dense_up", "stop_after="),
        (None, "2.attn.1", "stop_after=2.attn.1: no such wave", "stop_after=2.attn"),
        (
            "3.qkv",
            "2.rmsnorm",
            "start_at=3.qkv stop_after=2.rmsnorm: the step runs 2.rmsnorm first",
            "start_at=2.rmsnorm stop_after=3.qkv",
        ),
        (f"{LAYERS}.sample", None, "what lm_head gives the sampler lies with the SMs", f"start_at={LAYERS}.lm_head"),
        ("2.moe_gather", "2.moe_gather", "this plan has no task there", "before or after"),
    ],
)
def test_a_cut_that_cannot_be_is_named(start: str | None, stop: str | None, message: str, hint: str) -> None:
    with pytest.raises(MkError, match=message) as refused:
        cut(plan(), start, stop)
    assert hint in str(refused.value.hint)


def test_a_part_is_neither_cut_nor_run_twice() -> None:
    part = cut(plan(), "2.attn")
    with pytest.raises(MkError, match="cannot be cut again"):
        cut(part, "3.attn")
    lone = batch(plan(), PROMPTS)
    lone.machine.load(part)
    with pytest.raises(MkError, match=r"2\.attn-5\.sample is a part of a step: it is run once, not 2 times"):
        lone.machine.run(lone.inputs(2), 2)


# ---- the verifier


def without(part: Program, op: str) -> Program:
    """The part with all tasks of an operation gone from its lists."""
    keep = part.words[:, Word.OPCODE] != ISA.named(op).opcode
    kept = part.cut.kept.copy()
    kept[np.flatnonzero(kept)[~keep]] = False
    origin = dataclasses.replace(part.cut, kept=kept)
    return dataclasses.replace(part, words=part.words[keep], offsets=part.offsets_of(keep), cut=origin)


def test_what_lived_in_an_sm_must_be_made_again() -> None:
    assert "reads ACC_ATTN" in refusal(without(cut(plan(), "2.rmsnorm", "2.rmsnorm"), "o_proj"))
    assert refusal(without(cut(plan(), "2.moe_up", "2.moe_up"), "topk")).startswith("ring: ")
    combine = cut(plan(placement="round_robin"), "2.moe_combine", "2.moe_combine")
    assert "reads ROUTE" in refusal(without(combine, "topk"))


def test_what_no_earlier_wave_has_written_is_not_there() -> None:
    """Layer 2's attention without its projection: what is left in QKV is layer 1's."""
    part = cut(plan(), "2.attn", "2.attn")
    words = part.cut.whole.words
    projection = (words[:, Word.OPCODE] == ISA.named("qkv").opcode) & (words[:, Word.LAYER] == 2)
    origin = dataclasses.replace(part.cut, done=part.cut.done & ~projection)
    assert "reads QKV" in refusal(dataclasses.replace(part, cut=origin))


@pytest.mark.parametrize("word", [Word.WAIT0, Word.SIGNAL])
def test_a_wait_or_a_signal_less_is_refused(word: Word) -> None:
    """Of a counter that several SMs signal: a lone one may be on the waiting SM, whose order is enough."""
    part = cut(plan(), "2.qkv", "2.rmsnorm")
    shared = [number for number, counter in enumerate(part.counters) if counter.per_step > 1]
    for at in np.flatnonzero(np.isin(part.words[:, word], shared)).tolist()[::3]:
        words = part.words.copy()
        words[at, word] = NONE
        kind = refusal(dataclasses.replace(part, words=words)).split(":")[0]
        assert kind == "arrivals" if word == Word.SIGNAL else kind in ("read", "overwrite")


def change_tile(words: np.ndarray) -> None:
    words[0, Word.TILE] += 1


def change_flags(words: np.ndarray) -> None:
    words[words[:, Word.OPCODE] == ISA.named("residual").opcode, Word.FLAGS] = 0


@pytest.mark.parametrize(("change", "word"), [(change_tile, "TILE"), (change_flags, "FLAGS")])
def test_a_part_whose_words_are_not_the_steps_is_refused(change: Callable[[np.ndarray], None], word: str) -> None:
    part = cut(plan(), "2.qkv", "2.rmsnorm")
    words = part.words.copy()
    change(words)
    assert f"word {word} is" in refusal(dataclasses.replace(part, words=words))


def test_every_order_of_the_configuration_is_tried() -> None:
    assert {order for order, *_ in PLANS} == set(WAVE_ORDERS)
