"""What a row would name and its experiment does not read is refused before anything is written, by every experiment."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments import unread
from mk.compose import experiment_main, load_config
from mk.errors import MkError
from tests.small_runs import REFUSED, SMALL

# experiments whose tokens are drawn as configured; the others refuse it, or without a card have no simulation of it
DRAWN = {"quickstart", "accuracy", "serving", "agent_trial", "served_step", "batch_switching"}
OWN = {"sampling_ablation"}  # whose variants say it
# that decode with a routing mode; of the others that have none by themselves, all refuse one
ROUTED = {"quickstart", "accuracy"}
NAMES = [name for name in (*SMALL, *REFUSED) if name not in ("vllm_serve", "accuracy_vllm")]

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a card would be measured")


def refusal(name: str, folder: Path, *overrides: str) -> str:
    """What an experiment says at its smallest with one thing more."""
    given = [override for override in SMALL.get(name, ()) if "{m" not in override]
    with pytest.raises(MkError) as caught:
        experiment_main(name)(load_config([f"experiment={name}", *given, *overrides, f"run_dir={folder / 'runs'}"]))
    assert not (folder / "runs").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DRAWN | OWN])
def test_no_row_claims_a_sampling_that_nothing_drew(name: str, tmp_path: Path) -> None:
    said = refusal(name, tmp_path, "sampling=top_p")
    assert "draws no tokens" in said or "the waves that draw tokens" in said or "a sampling of its own" in said


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ROUTED])
def test_no_row_claims_a_routing_where_the_router_decided(name: str, tmp_path: Path) -> None:
    if load_config([f"experiment={name}"]).routing.name != "checkpoint":
        pytest.skip("its experts are forced, and as configured")
    said = refusal(name, tmp_path, "routing=correlated", "routing.distinct=8")
    assert f"{name} leaves routing to the router" in said or "a routing of its own" in said


@pytest.mark.parametrize("override", ["placement=round_robin", "wave_order=parted", "schedule=work_stealing"])
@pytest.mark.parametrize("name", ["prefill_throughput", "prefill_tiles", "sanitize", "sm_map"])
def test_what_lowers_no_configured_step_takes_no_plan(name: str, override: str, tmp_path: Path) -> None:
    group = override.partition("=")[0]
    assert f"{name} has a {group} of its own" in refusal(name, tmp_path, override)


@pytest.mark.parametrize("override", ["model=slice", "batch.contexts=[64,0,64]", "engine.attention.split_keys=256"])
def test_the_sanitizer_watches_the_steps_of_its_configuration_alone(override: str, tmp_path: Path) -> None:
    more = ["weights=random"] * override.startswith("model")
    assert "sanitize has a " in refusal("sanitize", tmp_path, override, *more)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine=interpreter", "slow_sm times the kernel, not engine=interpreter"),
        ("schedule=greedy", "slow_sm has a schedule of its own"),
    ],
)
def test_a_slow_sm_is_of_the_kernel_by_both_schedules(override: str, says: str, tmp_path: Path) -> None:
    assert says in refusal("slow_sm", tmp_path, override)


@pytest.mark.parametrize("name", ["accuracy", "accuracy_vllm"])
def test_a_named_server_and_vllm_have_no_routing_mode(name: str, tmp_path: Path) -> None:
    more = ["experiment.base_url=http://127.0.0.1:1/v1"] if name == "accuracy" else ["baseline=vllm"]
    overrides = ["benchmark=nano_code", "routing=uniform", *more, f"run_dir={tmp_path / 'runs'}"]
    with pytest.raises(MkError, match=f"{name} leaves routing to the router, not to routing=uniform"):
        experiment_main(name)(load_config([f"experiment={name}", *overrides]))
    assert not (tmp_path / "runs").exists()


STEPS = ("zero_wait", "trace")
UNKNOWN = {
    "op_bench": (*STEPS, "launches", "check_tokens", "rounds"),
    "wave_occupancy": (*STEPS, "check_tokens", "rounds"),
    "schedule_search": (*STEPS, "launches"),
    "zero_wait_bound": (*STEPS, "launches"),
    "ladder": ("trace",),
    **dict.fromkeys(("vllm_decode", "transformers_decode", "context_sweep", "plan_ablation"), STEPS),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in UNKNOWN.items() for key in keys])
def test_what_an_experiment_of_decode_steps_leaves_alone_is_no_key_of_it(name: str, key: str) -> None:
    with pytest.raises(MkError, match=f"unknown key experiment.{key}"):
        load_config([f"experiment={name}", f"experiment.{key}=1"])


def test_an_occupancy_traces_by_itself(tmp_path: Path) -> None:
    assert "wave_occupancy traces by itself" in refusal("wave_occupancy", tmp_path, "engine.trace=waits")


def test_what_is_left_alone_is_not_refused() -> None:
    cfg = load_config(["experiment=sanitize", "gpu=h100", "run_dir=elsewhere"])
    unread.require_untouched(cfg, unread.STEP)
    unread.require_router(cfg)
    unread.require_greedy(cfg)
