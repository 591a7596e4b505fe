"""The kernel compiles for the smallest and the full model, fits an SM without spills, and agrees with the Python side.

Needs a CUDA compiler, not a GPU. Without a compiler these tests fail: a kernel that nobody compiles is not checked.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.sanitize import PLANTED
from mk.compose import load_config
from mk.errors import MkError
from mk.interpreter import Status
from mk.isa import DESCRIPTOR_WORDS, ISA, NONE, Buffer, Flag, Word
from mk.kernel import build as building
from mk.kernel import step_params
from mk.kernel.build import (
    CSRC,
    DEPENDENT_LAUNCH,
    NO_RUN_AHEAD,
    TRACE_DEFINES,
    Library,
    build,
    defines_of,
    find_nvcc,
    geometry_header,
)
from mk.kernel.launches import StepPart
from mk.kernel.runtime import DELAYS
from mk.kv import PAGE
from mk.model.geometry import PRESETS, SLOT_BYTES, Geometry
from mk.model.opening import NANO
from mk.noise import MASS_BITS
from mk.ring import ENTRIES, MIN_WINDOW, RING_SLOTS, UNSAFE_SLOTS
from mk.schedule.simulator.work import Ring
from mk.shortlist import BINS
from mk.splits import SplitPolicy
from tests.csrc_constants import constants, fields

GEOMETRIES = {"nano": Geometry.from_hf_config(NANO), "north_mini_code": PRESETS["north_mini_code"]}
SHARED_BYTES = {"nano": 225_880, "north_mini_code": 225_880}  # of a block; an SM has 232,448 for it
MAX_REGISTERS = 168  # a thread at launch: 384 of them share the 65,536 of an SM
MAX_SPILL_BYTES = 0


def configured_splits(*overrides: str) -> SplitPolicy:
    attention = load_config(overrides).engine.attention
    return SplitPolicy(attention.split_keys, attention.max_splits)


@pytest.fixture(scope="module")
def libraries() -> dict[str, Library]:
    with ThreadPoolExecutor(2) as pool:
        built = {name: pool.submit(build, geometry, configured_splits()) for name, geometry in GEOMETRIES.items()}
        return {name: future.result() for name, future in built.items()}


@pytest.mark.parametrize("model", GEOMETRIES)
def test_the_kernel_fits_an_sm_and_spills_nothing(libraries: dict[str, Library], model: str) -> None:
    library = libraries[model]
    assert library.spill_bytes <= MAX_SPILL_BYTES
    assert library.stack_bytes == 0  # no array that an index keeps out of registers
    assert 0 < library.registers <= MAX_REGISTERS
    assert library.open().mk_shared_bytes() == SHARED_BYTES[model]
    assert library.open().mk_shared_bytes() <= 227 * 1024


@pytest.mark.parametrize("most", [1, 64])
def test_no_number_of_splits_spills(most: int) -> None:
    """What merges a head's splits holds some of them at once, however many there are."""
    library = build(GEOMETRIES["nano"], SplitPolicy(128, most))
    assert (library.spill_bytes, library.stack_bytes) == (MAX_SPILL_BYTES, 0)


def test_the_engine_that_is_chosen_by_itself_takes_what_the_kernel_was_built_as() -> None:
    ours, auto = (load_config([f"engine={name}"]) for name in ("cuda", "auto"))
    assert configured_splits("engine=cuda") == configured_splits("engine=auto")
    assert configured_splits("experiment=decode_throughput") == configured_splits("engine=cuda")
    assert (defines_of(auto), auto.engine.ring) == (defines_of(ours), ours.engine.ring)


@pytest.mark.parametrize("trace", ["moments", "waits"])
def test_a_trace_is_a_build_of_its_own_that_spills_little(trace: str) -> None:
    defines = defines_of(load_config([f"engine.trace={trace}"]))
    assert defines == TRACE_DEFINES[trace] != ()
    assert all(f"#ifdef {define}\n" in (CSRC / "trace.cuh").read_text() for define in defines)
    for geometry in GEOMETRIES.values():
        library = build(geometry, configured_splits(), defines=defines)
        assert library.stack_bytes <= 24 and library.spill_bytes <= 136  # part of what it costs


def test_the_builds_for_tests_compile_too(libraries: dict[str, Library]) -> None:
    """Injected delays and a planted race; their names are those that csrc/ asks for."""
    text = (CSRC / "delay.cuh").read_text()
    assert all(f"#ifdef {name}\n" in text for name in (DELAYS, PLANTED))
    library = build(GEOMETRIES["nano"], libraries["nano"].splits, defines=(DELAYS, PLANTED))
    assert library.build_hash != libraries["nano"].build_hash and library.defines == (DELAYS, PLANTED)
    assert library.registers <= MAX_REGISTERS  # a few may spill: nobody times these
    assert library.open().mk_shared_bytes() <= 227 * 1024


def test_a_launch_that_waits_for_those_before_it_is_a_build_that_spills_nothing(libraries: dict[str, Library]) -> None:
    assert f"#ifdef {DEPENDENT_LAUNCH}\n" in (CSRC / "kernel.cu").read_text()
    for geometry in GEOMETRIES.values():
        library = build(geometry, libraries["nano"].splits, defines=(NO_RUN_AHEAD, DEPENDENT_LAUNCH))
        assert (library.spill_bytes, library.stack_bytes) == (MAX_SPILL_BYTES, 0)


@pytest.mark.parametrize(
    ("override", "define"),
    [
        ("engine.ring.slots=18", "MK_RING_SLOTS=18"),
        ("engine.ring.copy_kb=2", "MK_COPY_BYTES=2048"),
        ("engine.ring.run_ahead=false", "MK_NO_RUN_AHEAD"),
        ("engine.handoff.pollers=warps", "MK_POLL_BY_WARPS"),
        ("engine.handoff.polls=relaxed", "MK_RELAXED_POLLS"),
        ("routing=oracle", "MK_ORACLE"),
    ],
)
def test_an_ablation_is_a_build_of_its_own(override: str, define: str) -> None:
    """Of the same source, where the name stands; and by default there is none."""
    assert defines_of(load_config(["engine.ring.window_kb=32"])) == ()
    assert defines_of(load_config(["engine.ring.window_kb=32", override])) == (define,)
    name = define.partition("=")[0]
    assert any(re.search(rf"^#ifn?def {name}\b", file.read_text(), re.MULTILINE) for file in CSRC.rglob("*.cuh"))
    for geometry in GEOMETRIES.values():
        library = build(geometry, configured_splits(), defines=(define,))
        # two registers of the oracle's consumers spill at full size: it is a bound, and says so by a little too much
        words = 2 if name == "MK_ORACLE" and geometry.layers > 5 else 0
        assert library.stack_bytes == 4 * words and library.spill_bytes <= 32 * words
    assert library.open().mk_ring_slots() == (18 if name == "MK_RING_SLOTS" else RING_SLOTS)


@pytest.mark.parametrize("model", GEOMETRIES)
def test_both_sides_mean_the_same_parameters_and_ring(libraries: dict[str, Library], model: str) -> None:
    opened = libraries[model].open()
    assert opened.mk_params_bytes() == ctypes.sizeof(step_params.StepParams)
    assert opened.mk_ring_slots() == load_config().engine.ring.slots == RING_SLOTS
    names = [name for name, *_ in step_params.StepParams._fields_]
    assert len(names) == len(set(names)) and {"slots", "keys", "epoch", "advance"} <= set(names)


def test_the_generated_header_is_the_instruction_set(libraries: dict[str, Library]) -> None:
    header = (libraries["nano"].path.parent / "isa.h").read_text()
    values = {
        name: int(value) for name, value in re.findall(r"^\s*(?:constexpr int )?(\w+) = (-?\d+)[,;]", header, re.M)
    }
    expected = {"DESCRIPTOR_WORDS": DESCRIPTOR_WORDS, "NONE": NONE, "OP_NOP": 0}
    expected |= {f"OP_{op.name.upper()}": op.opcode for op in ISA}
    for prefix, members in (("W", Word), ("FLAG", Flag), ("BUF", Buffer)):
        expected |= {f"{prefix}_{member.name}": int(member) for member in members}
    assert values == expected


def test_constants_written_on_both_sides_agree() -> None:
    found, small = constants(), Ring()
    expected = {
        "PAGE": PAGE,
        "SLOT_BYTES": SLOT_BYTES,
        "KV_BLOCK_BYTES": 2 * step_params.KV_BLOCK,
        "COUNTER_STRIDE": step_params.COUNTER_STRIDE,
        "MAX_ROWS": step_params.MAX_ROWS,
        "MAX_WINDOW": RING_SLOTS - UNSAFE_SLOTS,
        "RING_SLOTS": RING_SLOTS,
        "ENTRIES": ENTRIES,
        "COPY_BYTES": SLOT_BYTES,
        "PRODUCER_LANES": MIN_WINDOW,
        "TILES_RING": small.tiles,
        "OWNED": step_params.OWNED,
        "HOST_STEPS": step_params.HOST_STEPS,
        "BINS": BINS,
        "MASS_BITS": MASS_BITS,
        "STATUS_LOGITS": Status.LOGITS,
        "STATUS_ROUTER_NAN": Status.ROUTER_NAN,
        "STATUS_EXPERT_ID": Status.EXPERT_ID,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert (small.slots, small.lanes, small.entries) == (RING_SLOTS, MIN_WINDOW, ENTRIES)
    assert fields("host_step.cuh", "HostStep") == list(step_params.HOST_STEP.names or ())
    assert fields("params.cuh", "RowSampling") == list(step_params.ROW_SAMPLING.names or ())
    stalls = step_params.buffer_shapes(GEOMETRIES["nano"], SplitPolicy(), 1)["stalls"][1]
    assert len(fields("params.cuh", "StallRecord")) == stalls[1]
    assert fields("launches.cuh", "StepPart") == [name for name, _ in StepPart._fields_]


def test_geometry_constants_are_those_of_the_full_model() -> None:
    header = geometry_header(GEOMETRIES["north_mini_code"], SplitPolicy(128, 32))
    for line in ("LAYERS = 49", "HIDDEN_SLOTS = 8", "UP_STRIPS = 96", "FFN_SLOTS = 3", "VOCAB = 262144", "GROUP = 8"):
        assert f"constexpr int {line};" in header
    assert "SPLIT_SHIFT = 7;" in header and "WINDOW_SHIFT = 7;" in header


@pytest.mark.parametrize("split_keys", [64, 192])
def test_a_split_that_the_kernel_cannot_shift_by_is_refused(split_keys: int) -> None:
    with pytest.raises(MkError, match=rf"engine\.attention\.split_keys={split_keys}"):
        geometry_header(GEOMETRIES["nano"], SplitPolicy(split_keys, 64))


# ---- the cache, with a compiler that only counts its calls


FAKE_NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "release $(cat {home}/version)"; exit 0; fi
echo "$@" >> {home}/calls
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo library > "$2"; shift; done
echo "8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads" >&2
echo "ptxas info    : Used 42 registers, used 2 barriers" >&2
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Library]:
    """`build` of nano with a counting compiler and a copy of csrc/; both lie in tmp_path."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(FAKE_NVCC.format(home=tmp_path))
    nvcc.chmod(0o755)
    (tmp_path / "version").write_text("13.0")
    shutil.copytree(CSRC, tmp_path / "csrc")
    monkeypatch.setattr(building, "CSRC", tmp_path / "csrc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("MK_BUILD_DIR", str(tmp_path / "build"))
    return lambda splits=SplitPolicy(), **more: build(GEOMETRIES["nano"], splits, **more)


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_a_library_is_built_once_and_read_back(fake, tmp_path: Path) -> None:
    first = fake()
    assert (first.registers, first.spill_bytes, calls(tmp_path)) == (42, 20, 1)
    assert fake() == first and calls(tmp_path) == 1
    assert first.path.is_relative_to(tmp_path / "build")
    assert sorted(path.name for path in first.path.parent.iterdir()) == ["geometry.h", "isa.h", "libmk.so", "ptxas.log"]
    assert list((tmp_path / "build").iterdir()) == [first.path.parent]


def test_every_input_changes_the_key(fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {fake().build_hash}

    def is_new(**more: object) -> bool:
        before = len(seen)
        seen.add(fake(**more).build_hash)
        return len(seen) > before

    sources = sorted(path for path in (tmp_path / "csrc").rglob("*") if path.is_file())
    assert len(sources) > 10
    for source in sources:
        text = source.read_text()
        source.write_text(text + "// changed\n")
        assert is_new(), source.name
        source.write_text(text)
        moved = source.rename(source.with_stem(source.stem + "_moved"))
        assert is_new(), f"{source.name} renamed"
        moved.rename(source)
    assert not is_new()  # all is as it was
    assert is_new(defines=TRACE_DEFINES["moments"])
    assert is_new(splits=SplitPolicy(256, 64))
    assert is_new(splits=SplitPolicy(128, 32))
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-G"))
    assert is_new()
    header = building.c_header()
    monkeypatch.setattr(building, "c_header", lambda: header + "// an operation more\n")
    assert is_new()
    (tmp_path / "version").write_text("13.1")
    assert is_new()
    assert calls(tmp_path) == len(seen)


def test_builders_at_the_same_time_share_one_library(fake, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = {library.path for library in pool.map(lambda _: fake(), range(4))}
    assert len(paths) == 1
    assert paths.pop().read_text() == "library\n"
    assert len(list((tmp_path / "build").iterdir())) == 1


# ---- what goes wrong


def test_without_a_compiler_the_message_says_where_one_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MkError, match="no CUDA compiler found") as caught:
        build(GEOMETRIES["nano"], cache=tmp_path)
    assert "CUDA_HOME" in str(caught.value.hint) and "nvidia-cuda-nvcc" in str(caught.value.hint)


def test_the_wheels_compiler_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert find_nvcc() == nvcc


def test_a_compile_error_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CSRC, tmp_path / "csrc")
    (tmp_path / "csrc" / "kernel.cu").write_text('#include "params.cuh"\nint broken = no_such_name;\n')
    monkeypatch.setattr(building, "CSRC", tmp_path / "csrc")
    with pytest.raises(MkError, match=r"^nvcc failed: .*kernel\.cu.*no_such_name") as caught:
        build(GEOMETRIES["nano"], cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def test_a_compiler_that_does_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\nexit 3\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(MkError, match=f"{nvcc} does not run"):
        build(GEOMETRIES["nano"], cache=tmp_path)
