"""The configurations beside kept rows: read, without folders of a host, and what they say of a row's axes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mk.config import hash_of
from mk.errors import MkError
from mk.results.rows import Row, dtype_of
from mk.ring import window_kb_for

TEXTS = ("prompt", "prompts")  # of the configuration: they may begin with a slash and name no folder
NAMES_FILES = ("model.path", "schedule.path", "placement.path", "routing.path", "engine.script", "agent.trace")
"""Keys of the configuration that name what a run reads: a file, or a checkpoint's folder. A benchmark's data has a hash
of its own, `benchmark_sha256`, and rows of earlier runs have digests."""
FOLDERS = re.compile(r"(?<![^\s=,\[\"'])~?/[^\s,\]\"']+")  # an absolute path in an override


def host_free(value: str) -> str:
    """The text with the last part alone of each absolute path."""
    if value.startswith(("/", "~/")):
        return Path(value).name
    return FOLDERS.sub(lambda match: Path(match.group()).name, value)


def model_name(name: str, path: str | None) -> str:
    """What a row calls its model: a folder's base name, a hub id whole, or the preset's name."""
    if path is None:
        return name
    return Path(path).name if Path(path).is_dir() else host_free(path)


def sampling_text(temperature: float, top_k: int, top_p: float) -> str | None:
    """What a row calls its sampling, whatever option it was set on; None: the likeliest token."""
    if temperature == 0:
        return None
    cuts = [f"top_k {top_k}"] * (top_k > 0) + [f"top_p {top_p:g}"] * (top_p < 1)
    return ", ".join([f"temperature {temperature:g}", *cuts])


def read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """config.yaml and configs/*.yaml of a run or a kept folder by their hashes. Raises MkError naming a broken one."""
    paths = [folder / "config.yaml", *sorted((folder / "configs").glob("*.yaml"))]
    return dict(_read(path) for path in paths)


def published(configs: Mapping[str, dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """(the files of a kept folder by their names, the hash of each kept configuration by that of the original).

    The first is config.yaml, the others lie in configs/. Folders of the host are left out; where there were some, the
    original's hash stands in a second comment.
    """
    files: dict[str, str] = {}
    hashes: dict[str, str] = {}
    for original, config in configs.items():
        public = _public(config)
        digest = hashes[original] = hash_of(public)
        name = f"configs/{digest[:16]}.yaml" if files else "config.yaml"
        was = f"# with folders of its host: {original}\n" * (digest != original)
        files[name] = f"# config_hash: {digest}\n{was}{OmegaConf.to_yaml(OmegaConf.create(public))}"
    return files, hashes


def card_of(row: Row) -> str:
    """The folder of results/ that a row is kept in."""
    return "simulated" if row.clock == "simulated" else row.gpu


def config_problems(row: Row, configs: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """What of a row differs from the configuration that it names."""
    config = configs.get(row.config_hash)
    if config is None:
        yield f"its configuration {row.config_hash[:16]} is not beside it"
        return
    try:
        may = _axes(row, config)
    except (KeyError, TypeError, AttributeError) as error:
        yield f"its configuration {row.config_hash[:16]} lacks {error}"
        return
    for axis, allowed in may.items():
        if getattr(row, axis) not in allowed:
            yield f"{axis} is {getattr(row, axis)}, its configuration has {' or '.join(map(str, allowed))}"


Axes = dict[str, list[Any]]
"""What a field of a row may be."""

BFLOAT16 = ("cuda", "simulator", "torch", "transformers", "vllm")  # engines that compute in nothing else
ROUTINGS = ("uniform", "correlated", "all_same", "all_different")  # that a searched schedule is simulated with
SET_BY_EXPERIMENT: dict[str, Callable[[Row, Mapping[str, Any], Mapping[str, Any]], Axes]] = {
    # experiment -> fields that it sets itself, by its row, its own settings and the whole configuration
    "slow_sm": lambda row, own, config: {"schedule": ["static", "work_stealing"]},
    "prefill_throughput": lambda row, own, config: {
        "dtype": ["bfloat16"],  # of Triton's interpreter too
        "batch": [1] * bool(own["lengths"]) + [own["packed_rows"]] * bool(own["packed"]),
        "context": [[n] for n in own["lengths"]] + [[n] * own["packed_rows"] for n in own["packed"]],
    },
    "prefill_tiles": lambda row, own, config: {"dtype": ["bfloat16"], "batch": [1], "context": [[own["tokens"]]]},
    "prefill_correctness": lambda row, own, config: {
        "dtype": ["bfloat16"],
        "prompt_tokens": [sum(row.context)],
        "routing": ["replay"],
        "batch": [1],
        "context": [[n] for n in own["lengths"]],
    },
    "kernel_correctness": lambda row, own, config: {
        "dtype": ["bfloat16"],  # of the interpreter in the kernel's place too; so are the next two
        "routing": ["replay"],
        "batch": [len(contexts) for contexts in own["batches"]],
        "context": own["batches"],
    },
    "kernel_bits": lambda row, own, config: {
        "dtype": ["bfloat16"],
        "batch": [1 + len(own["neighbours"])],
        "context": [[own["context"], *own["neighbours"]]],
    },
    "parity": lambda row, own, config: {"batch": [len(own["contexts"])], "context": [[n] for n in own["contexts"]]},
    "partial_step": lambda row, own, config: {
        "dtype": ["bfloat16"],
        "batch": [len(own["contexts"])],
        "context": [own["contexts"]],
    },
    "serving_costs": lambda row, own, config: {
        "batch": [1, *own["batches"]],  # 1: of conversations
        "sampling": [row.sampling],  # an option of its own list
    },
    "batch_switching": lambda row, own, config: {"batch": [config["server"]["slots"]]},
    "served_step": lambda row, own, config: {
        "batch": [*own["batches"], config["server"]["slots"], config["server"]["slots"] - 1],
        "context": [[own[length]] * row.batch for length in ("context", "short")],
        "prompt_tokens": [own["prompt"] if row.prefill_policy is not None else None],
    },
    "serving": lambda row, own, config: {
        "context": [[own[name]["prompt"]] * row.batch for name in own["workloads"]],
        **({"model": [row.model]} if own["base_url"] else {}),
    },
    "agent_trial": lambda row, own, config: {
        "batch": [1],
        "context": [row.context],  # of the longest prompt, as the server counted it
        "agent": [config["agent"]["name"]],
        **({"sampling": [row.sampling]} if config["agent"]["name"] != "replay" else {}),  # that the program asked for
        **({"model": [row.model]} if own["base_url"] else {}),
    },
    "schedule_search": lambda row, own, config: {"routing": [config["routing"]["name"], *ROUTINGS]},
    "simulator_accuracy": lambda row, own, config: {"batch": [row.batch]},  # of the rows that it reads
    "accuracy": lambda row, own, config: {  # which is given texts, and no more rows than those
        "batch": list(range(1, config["batch"]["size"] + 1)),
        "context": [row.context],
        **({"model": [row.model]} if own["base_url"] else {}),  # of a server that has a model of its own
    },
    "quickstart": lambda row, own, config: {
        "batch": [config["batch"]["size"]] + ([len(own["ragged"])] if own["ragged"] else []),
        "context": [row.context]  # of texts
        if config["batch"]["contexts"] is None and row.batch == config["batch"]["size"]
        else [contexts for contexts in (config["batch"]["contexts"], own["ragged"]) if contexts is not None],
    },
}


def _axes(row: Row, config: Mapping[str, Any]) -> Axes:
    """What the row's configuration allows; a field without an entry may be anything."""
    experiment, model = config["experiment"], config["model"]
    path = model["path"]
    may: Axes = {name: [config[name]["name"]] for name in ("gpu", "routing", "schedule", "wave_order", "placement")}
    may["model"] = [model["name"]] if path is None else [path, Path(path).name]
    may["model_window"] = [None if model["window"] == "hf" else model["window"]]
    if row.engine in ("vllm", "transformers"):
        may |= {name: [row.engine] for name in ("schedule", "wave_order", "placement")}
    may["weights"] = [config["weights"]["name"]]
    may["sampling"] = [sampling_text(*(config["sampling"][name] for name in ("temperature", "top_k", "top_p")))]
    may["dtype"] = _dtypes(row.engine, config["engine"]["numerics"])
    may["batch"] = experiment.get("batches") or [experiment.get("batch", config["batch"]["size"])]
    if row.window_kb is not None:
        may["window_kb"] = [window_kb_for(config["engine"]["ring"]["window_kb"], row.batch)]
    if isinstance(experiment.get("context"), int):
        may["context"] = [[experiment["context"]] * row.batch]
    if experiment["name"] in SET_BY_EXPERIMENT:
        may |= SET_BY_EXPERIMENT[experiment["name"]](row, experiment, config)
    return may


def _dtypes(engine: str, numerics: str) -> list[str]:
    """Of the arithmetic of an engine; one that has none, or does not say, has an unknown one."""
    if engine == "served":
        return ["unknown"]
    if engine in BFLOAT16:
        return ["bfloat16"]
    return [dtype_of(engine, numerics)] + ["unknown"] * (engine == "scripted")


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text()
        config = OmegaConf.to_container(OmegaConf.create(text))
    except FileNotFoundError as error:
        raise MkError(f"{path} is missing") from error
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise MkError(f"{path} is no configuration: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict) or not isinstance(config.get("experiment"), dict):
        raise MkError(f"{path} is no configuration")
    digest = hash_of(config)  # type: ignore[arg-type]  # keys of a configuration are strings
    if text.splitlines()[0] != f"# config_hash: {digest}":
        raise MkError(f"{path} is not as it was written: its hash is {digest}")
    return digest, config  # type: ignore[return-value]


def _public(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _public(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_public(item, key) for item in value]
    return host_free(value) if isinstance(value, str) and key not in TEXTS else value


def leaves_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A resolved configuration's values by their dotted keys."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


EXECUTED = ("model", "weights", "schedule", "wave_order", "placement", "routing", "sampling",
            "engine.ring", "engine.handoff", "engine.attention", "engine.trace")  # fmt: skip
"""Parts of a configuration that say what a step executes. Others say where, what it is compared with, what to count."""


def within(key: str, parts: Iterable[str]) -> bool:
    """Whether a dotted key is one of these parts of a configuration, or lies in one."""
    return any(key == part or key.startswith(f"{part}.") for part in parts)
