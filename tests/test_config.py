"""Every option and experiment composes, nothing outside the schemas is accepted, and a hash names a configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from mk.compose import _default_options, expand_sweep, load_config, to_yaml
from mk.config import CONFIG_DIR, GROUPS, Config, config_hash, group_options, resolved
from mk.errors import MkError
from mk.graph import OPTIONAL_WAVES, PARTED_WAVES

# what an option cannot work without
COMPANIONS = {
    "model=slice": ["weights=random"],
    "model=north_mini_code": ["weights=random"],
    "routing=correlated": ["routing.distinct=4"],
    "wave_order=custom": ["wave_order.waves=[router,qkv]"],
    "routing=replay": ["routing.path=trace.pt"],
    "engine=scripted": ["engine.script=replies.json"],
    "experiment=rerun": ["run=any"],
    "placement=sm_map": ["placement.path=sm_map.json"],
    "schedule=search": [f"schedule.path={CONFIG_DIR.parent / 'results/simulated/schedule_batch1.yaml'}"],
}
EVERY_OPTION = [(group, option) for group in GROUPS for option in group_options(group)]


@pytest.mark.parametrize(("group", "option"), EVERY_OPTION)
def test_every_option_composes(group: str, option: str) -> None:
    choice = f"{group}={option}"
    config = load_config([choice, *COMPANIONS.get(choice, [])])
    assert isinstance(config, Config)
    assert getattr(config, group).name == option


def test_groups_are_the_folders_and_each_has_a_default() -> None:
    assert {path.name for path in CONFIG_DIR.iterdir() if path.is_dir()} == set(GROUPS) == set(_default_options())


@pytest.mark.parametrize("group", GROUPS)
def test_unknown_keys_are_refused(group: str) -> None:
    with pytest.raises(MkError, match=rf"unknown key {group}\.no_such_key"):
        load_config([f"{group}.no_such_key=1"])


@pytest.mark.parametrize("group", GROUPS)
def test_keys_cannot_be_added(group: str) -> None:
    with pytest.raises(MkError, match="neither be added nor deleted"):
        load_config([f"+{group}.no_such_key=1"])


def test_unknown_keys_in_a_yaml_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema guards the files as it guards the command line."""
    import shutil

    from mk import compose, config

    copy = tmp_path / "configs"
    shutil.copytree(config.CONFIG_DIR, copy)
    monkeypatch.setattr(compose, "CONFIG_DIR", copy)
    (copy / "placement" / "row_owner.yaml").write_text("name: row_owner\nrows: 16\n")
    for overrides in ([], ["batch.size=2"]):
        with pytest.raises(MkError, match=r"^placement\.rows: "):
            load_config(overrides)
    (copy / "placement" / "row_owner.yaml").write_text("name: row_owner\n")
    quickstart = copy / "experiment" / "quickstart.yaml"
    quickstart.write_text(quickstart.read_text() + "typo: 1\n")
    with pytest.raises(MkError, match="typo"):
        load_config()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("batch.size=two", "batch.size"),
        ("batch.contexts=[1.5]", "batch.contexts"),
        ("gpu.sms=none", "gpu.sms"),
        ("engine.ring.slots=many", "engine.ring.slots"),
        ("sampling.temperature=hot", "sampling.temperature"),
        ("debug=maybe", "debug"),
        ("run_dir=null", "run_dir"),
        ("experiment.new_tokens=many", "experiment.new_tokens"),
    ],
)
def test_wrong_types_name_the_key(override: str, key: str) -> None:
    with pytest.raises(MkError, match=f"^{key}"):
        load_config([override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.seed=3"], "weights.seed=3 means nothing with weights=checkpoint"),
        (["weights=random", "weights.seed=null"], "weights=random needs weights.seed"),
        (["schedule.moe_claimers=2"], "means nothing with schedule=static"),
        (["schedule=work_stealing", "schedule.claim_ahead=0"], "schedule.claim_ahead=0 must be at least 1"),
        (["schedule=work_stealing", "schedule.claim_ahead=17"], "schedule.claim_ahead=17 must be at most 16"),
        (["routing.distinct=4"], "means nothing with routing=checkpoint"),
        (["routing=adversarial", "routing.pattern=some"], "routing.pattern=some is not one of"),
        (["routing=replay"], "routing=replay needs routing.path"),
        (["routing=correlated"], "routing=correlated needs routing.distinct"),
        (["wave_order=custom"], "wave_order.waves has no value"),
        (["batch=ragged4", "batch.size=2"], "batch.contexts has 4 entries for batch.size=2"),
        (["batch.size=0"], "batch.size=0 must be at least 1"),
        (["batch.size=1000000"], "batch.size=1000000 must be at most 1024"),
        (["gpu.sms=2147483647"], "gpu.sms=2147483647 must be at most 1024"),
        (["batch.contexts=[-1]"], "must be at least 0"),
        (["gpu=h100", "gpu.measured=true"], "needs gpu.measured_tb_s"),
        (["gpu=h200", "gpu.interleaving_seed=1"], "means nothing with gpu=h200"),
        (["engine.ring.window_kb=177"], "must lie in 8..176"),
        (["engine.ring.window_kb=[56,177]"], "window_kb=177 must lie in 8..176"),
        (["engine.ring.window_kb=[60,64]"], "window_kb=60 is no multiple"),
        (["engine.ring.window_kb=[]"], "window_kb=[] is neither"),
        (["engine.ring.window_kb=null"], "window_kb=None is neither"),
        (["engine.ring.window_kb=true"], "window_kb=True is neither"),
        (["engine.ring.window_kb=64.0"], "window_kb=64.0 is neither"),
        (["engine.ring.window_kb=[56,[64]]"], "is neither"),
        (["engine.numerics=fp8"], "engine.numerics=fp8 is not one of"),
        (["sampling.top_p=0"], "sampling.top_p=0.0 must lie in"),
        (["model.window=vlm"], "model.window=vlm is not one of"),
        (["model=slice"], "model=slice has no weights here"),
        (["placement.name=elsewhere"], "placement.name=elsewhere is not one of"),
        (["schedule=static,work_stealing"], "names several values"),
        (["batch.contexts=[1,2"], "cannot read"),
        (["hydra.run.dir=x"], "unknown key hydra.run.dir"),
        (["engine.ring.window_kb=41"], "engine.ring.window_kb=41 is no multiple"),
        (["gpu=h200", "engine.ring.slots=23"], "engine.ring.slots=23: the kernel takes 18..22"),
        (["engine=cuda", "engine.ring.slots=17"], "engine.ring.slots=17: the kernel takes 18..22"),
        (["server.port=0"], "server.port=0 must lie in 1..65535"),
        (["server.port=65536"], "server.port=65536 must lie in 1..65535"),
        (["sampling.top_k=5"], "sampling.top_k=5 means nothing with sampling.temperature=0"),
        (["sampling.top_p=0.5"], "sampling.top_p=0.5 means nothing with sampling.temperature=0"),
        (["experiment.new_tokens=0"], "experiment.new_tokens=0 must be at least 1"),
        (["run_dir="], "run_dir is empty"),
        (["run_dir=''"], "run_dir is empty"),
        (["model.path=''"], "model.path is empty"),
        (["experiment=train_nano", "experiment.out_dir="], "experiment.out_dir is empty"),
        (["engine.attention.max_splits=3000000000"], "engine.attention.max_splits=3000000000 does not fit in 32 bits"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(MkError) as caught:
        load_config(overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


NUMBERS = [
    [],
    ["weights=random"],
    ["routing=uniform"],
    ["routing=correlated", "routing.distinct=4"],
    ["gpu=h200"],
    ["experiment=train_nano"],
]


def numbers(kind: type, suffix: str = "") -> list[tuple[str, list[str]]]:
    """Every key that has a value of that type in some configuration, with the overrides that give it one."""
    found: dict[str, list[str]] = {}

    def walk(prefix: str, values: dict[str, Any], overrides: list[str]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                alike = prefix == "gpu.costs.ops." and name != "topk"  # one operation stands for all
                walk(f"{prefix}{name}.", {} if alike else value, overrides)
            elif type(value) is kind and name.endswith(suffix):
                found.setdefault(prefix + name, overrides)

    for overrides in NUMBERS:
        walk("", resolved(load_config(overrides)), overrides)
    return list(found.items())


FLOATS, SEEDS = numbers(float), numbers(int, "seed")


def test_the_walk_finds_what_it_should() -> None:
    assert {"sampling.temperature", "weights.qk_scale", "gpu.nominal_tb_s", "experiment.lr"} <= dict(FLOATS).keys()
    seeds = {"sampling.seed", "weights.seed", "routing.seed", "gpu.interleaving_seed", "experiment.seed"}
    assert dict(SEEDS).keys() == seeds


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("key", "overrides"), FLOATS)
def test_every_float_is_finite(key: str, overrides: list[str], value: str) -> None:
    with pytest.raises(MkError, match=f"^{key}={value} ") as caught:
        load_config([*overrides, f"{key}={value}"])
    assert caught.value.hint


@pytest.mark.parametrize("value", [-1, 2**64])
@pytest.mark.parametrize(("key", "overrides"), SEEDS)
def test_every_seed_is_an_unsigned_64_bit_number(key: str, overrides: list[str], value: int) -> None:
    with pytest.raises(MkError, match=f"^{key}={value} must be an unsigned 64-bit number") as caught:
        load_config([*overrides, f"{key}={value}"])
    assert caught.value.hint
    assert load_config([*overrides, f"{key}={2**64 - 1}"])


@pytest.mark.parametrize("key", ["batch.contexts", "experiment.ragged"])
@pytest.mark.parametrize(
    ("contexts", "message"), [("[-3,5]", "must be at least 0"), ("[0,0]", "every row is inactive")]
)
def test_contexts_are_checked_alike_wherever_they_stand(key: str, contexts: str, message: str) -> None:
    size = 2 if key == "batch.contexts" else 1
    with pytest.raises(MkError, match=rf"^{key}=\[.*{message}") as caught:
        load_config([f"batch.size={size}", f"{key}={contexts}"])
    assert caught.value.hint
    assert load_config([f"batch.size={size}", f"{key}=[0,5]"])


@pytest.mark.parametrize("size", [1, 8, 16, 32])
def test_batch_size_has_no_ceiling(size: int) -> None:
    assert load_config([f"batch.size={size}"]).batch.size == size


def test_named_wave_orders_are_permutations_of_the_default() -> None:
    """But for a wave that stands there in several parts, and one that only some have."""
    orders = {
        option: load_config([f"wave_order={option}"]).wave_order.waves
        for option in group_options("wave_order")
        if option != "custom"
    }
    for waves in orders.values():
        once = [wave for place, wave in enumerate(waves) if wave not in PARTED_WAVES or wave not in waves[:place]]
        once = [wave for wave in once if wave not in OPTIONAL_WAVES]
        assert sorted(once) == sorted(orders["default"])
    assert len({tuple(waves) for waves in orders.values()}) == len(orders)


def test_hash_is_of_the_resolved_configuration_alone() -> None:
    plain = load_config()
    assert config_hash(plain) == config_hash(load_config(["model=nano", "batch.size=1"]))
    assert config_hash(plain) != config_hash(load_config(["batch.size=2"]))
    canonical = json.dumps(resolved(plain), sort_keys=True, separators=(",", ":"))
    assert config_hash(plain) == hashlib.sha256(canonical.encode()).hexdigest()


def test_an_int_for_a_float_is_the_same_configuration() -> None:
    wholes = load_config(["sampling=top_p", "sampling.temperature=1"])
    assert config_hash(wholes) == config_hash(load_config(["sampling=top_p", "sampling.temperature=1.0"]))


def test_yaml_text_holds_the_resolved_configuration_and_its_hash() -> None:
    from omegaconf import OmegaConf

    config = load_config(["gpu=h200", "batch=ragged4"])
    text = to_yaml(config)
    assert OmegaConf.to_container(OmegaConf.create(text)) == resolved(config)
    assert text.startswith(f"# config_hash: {config_hash(config)}\n")


@pytest.mark.parametrize("override", ["placement=glob(*)", "gpu.sms=interval(1,2)"])
def test_a_sweep_without_a_list_of_values_is_refused(override: str) -> None:
    with pytest.raises(MkError, match=r"cannot be expanded here"):
        expand_sweep([override])


def test_sweeps_expand_to_every_combination() -> None:
    jobs = expand_sweep(["schedule=static,work_stealing", "model=nano", "batch.size=1,2", "batch.contexts=[1,2]"])
    assert jobs == [
        [f"schedule={schedule}", "model=nano", f"batch.size={size}", "batch.contexts=[1,2]"]
        for schedule in ("static", "work_stealing")
        for size in (1, 2)
    ]
