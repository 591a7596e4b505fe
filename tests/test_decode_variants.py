"""Many variants of one configuration: each is what the command line would have made, and one that fails stops none."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from experiments import decode_throughput, decode_variants, device_weights
from mk.compose import load_config, vary
from mk.config import Config, config_hash, group_options
from mk.errors import MkError
from mk.rows import Row

SMALL = ["model=nano", "weights=checkpoint", "experiment.batches=[1,2]"]


def ablation(*more: str) -> Config:
    return load_config(["experiment=wave_order_ablation", *SMALL, *more])


@pytest.mark.parametrize(
    "overrides",
    [
        ["wave_order=parted"],
        ["schedule=work_stealing", "schedule.attention_claimers=7"],
        ["engine.ring.window_kb=40", "routing=checkpoint"],
        ["experiment.context=1024", "experiment.batches=[3]"],
    ],
)
def test_a_variant_is_the_configuration_of_the_command_line(overrides: list[str]) -> None:
    base = ["experiment=decode_throughput", *SMALL]
    varied = vary(load_config(base), overrides)
    assert config_hash(varied) == config_hash(load_config([*base, *overrides]))
    assert config_hash(varied) != config_hash(load_config(base))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("wave_order=partd", "unknown option wave_order=partd"),
        ("engine.ring.windw_kb=40", "engine.ring.windw_kb"),
        ("engine.ring.window_kb=four", "window_kb"),
        ("engine.ring.window_kb=41", "window_kb=41 is no multiple"),
        ("wave_order=default,parted", "names several values"),
    ],
)
def test_a_variant_that_cannot_be_is_named(override: str, message: str) -> None:
    with pytest.raises(MkError, match=message):
        vary(load_config(["experiment=decode_throughput"]), [override])


def test_the_ablation_has_every_wave_order_under_both_schedules_and_every_placement() -> None:
    jobs = decode_variants.variants(ablation())
    plans = {(job.schedule.name, job.wave_order.name, job.placement.name) for _, job in jobs}
    orders = {name for name in group_options("wave_order") if name != "custom"}
    schedules = {"static", "work_stealing"}
    assert plans >= {(schedule, order, "row_owner") for schedule in schedules for order in orders}
    assert {placement for *_, placement in plans} == set(group_options("placement"))
    assert len(plans) == len(jobs) and {job.experiment.name for _, job in jobs} == {"decode_throughput"}


def row(cfg: Config, batch: int) -> Row:
    figures = {"batch": batch, "context": [8192] * batch, "p50_ms": 2.0 * batch, "pct_nominal": 70.0}
    axes = {name: getattr(cfg, name).name for name in ("model", "weights", "gpu", "routing", "schedule", "wave_order")}
    fixed = {"schema": 1, "time": "", "experiment": "decode_throughput", "engine": "cuda", "dtype": "bfloat16"}
    rest = {"placement": cfg.placement.name, "commit": "", "config_hash": config_hash(cfg), "build_hash": None}
    return Row(**fixed, **axes, **figures, **rest, checks={}, env={})


def test_a_variant_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(cfg: Config) -> list[Row]:
        if cfg.wave_order.name == "parted":
            raise MkError("batch 1: bits_repeat failed")
        return [row(cfg, batch) for batch in cfg.experiment.batches]

    monkeypatch.setattr(decode_throughput, "run", run)
    monkeypatch.setattr(decode_throughput, "check", lambda cfg: None)
    status = decode_variants.main(ablation("experiment.variants=['wave_order=default,parted,interleaved']"))
    out = capsys.readouterr().out
    assert status == 1 and out.count("failed: ") == 2 and "failed: wave_order=parted: batch 1: bits_repeat" in out
    table = [line.split() for line in out.split("variant ")[1].splitlines()]
    assert table[1] == ["wave_order=default", "2.0000", "70.0", "4.0000", "70.0"]
    assert table[2][0] == "wave_order=interleaved"


@pytest.mark.parametrize("variant", ["experiment=slow_sm", " "])
def test_a_variant_is_of_this_experiment(variant: str) -> None:
    with pytest.raises(MkError, match="is not some overrides of decode_throughput"):
        decode_variants.variants(ablation(f"experiment.variants=['{variant}']"))


def test_without_variants_there_is_nothing_to_run() -> None:
    with pytest.raises(MkError, match=r"experiment\.variants is empty"):
        decode_variants.variants(ablation("experiment.variants=[]"))


def test_weights_are_packed_once_for_configurations_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(device_weights, "_held", None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cfg = load_config(["experiment=decode_throughput", *SMALL])
    held = device_weights.hold_weights(cfg, cpu)
    assert device_weights.hold_weights(vary(cfg, ["wave_order=parted"]), cpu) is held
    assert held.oracle(3) is held.oracle(3) and len(held.oracle(4).tokens) == 4
    other = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, window="vllm"))
    assert device_weights.hold_weights(other, cpu) is not held
