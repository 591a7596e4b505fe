"""vLLM as a baseline: finds it, starts it on our geometry in its own interpreter, and reads what it did from its log.

Neither its site folder nor ours is on the other's path: `baseline.vllm.python` names an interpreter that has vLLM, or
`baseline.vllm.site` a folder of its packages for an interpreter that has torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.baselines import vllm_bench
from experiments.baselines.vllm_extension import UNIFORM
from mk.config import VllmConfig
from mk.device import card_state
from mk.errors import MkError
from mk.model.geometry import Geometry
from mk.processes import log_end, started
from mk.results.sources import ROOT

INSTALL = "python -m venv vllm-env && vllm-env/bin/pip install vllm, then baseline.vllm.python=vllm-env/bin/python"
STRATEGIES = {"uniform": UNIFORM, "checkpoint": ""}  # by routing: vLLM's name of it, none for the router's own choice
VERSION = r"\d+(\.\d+)+\S*"
FIND_TIMEOUT_S = 60
RESOLVED = {  # what its log says, by the field of a row
    "attention_backend": r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend(?: out of|\.|$)",
    "moe_backend": r"Using (\w+) Unquantized MoE backend",
    "moe_table": r"Using configuration from \S*?([^/\s]+\.json) for MoE layer|(default MoE config)",
    "graph_mode": r"cudagraph_mode\W+CUDAGraphMode\.(\w+)",
    "compile_mode": r"'mode'\W+CompilationMode\.(\w+)",
}


@dataclass(frozen=True)
class Spec:
    """What is measured in one start of the engine. kv_std: of synthetic K and V."""

    geometry: Geometry
    routing: str
    cases: list[tuple[int, int]]  # (context, batch) each, in this order
    steps: int
    warmup: int
    seed: int
    qk_scale: float
    kv_std: float


@dataclass
class Case:
    """Steps of one batch and context. tpot_ms: by the difference of two lengths; experts_by_layer: [] uncounted."""

    batch: int
    context: int
    step_ms: list[float]
    tpot_ms: float
    experts_by_layer: list[float] = field(default_factory=list)


@dataclass
class Measured:
    """resolved: fields of `Row` that say what the engine settled on. lines: of its log, those that say so. absent: of
    each case that it had no room for, why."""

    version: str
    same_weights: bool
    resolved: dict[str, str]
    cases: list[Case]
    lines: list[str]
    errors: list[str]
    absent: list[str] = field(default_factory=list)
    card: dict[str, str | None] = field(default_factory=dict)  # clocks, power and temperature before and after


class Missing(MkError):
    """No vLLM is configured."""


def find(config: VllmConfig) -> tuple[str, dict[str, str], str]:
    """(interpreter, environment, version of vLLM).

    Raises Missing with the command that installs it where none is configured, and MkError naming the key where the
    configured one is not there.
    """
    if config.python is None and config.site is None:
        raise Missing("no vLLM is configured", hint=INSTALL)
    where = f"baseline.vllm.site={config.site}" if config.site else f"baseline.vllm.python={config.python}"
    if config.site and not Path(config.site).is_dir():  # vLLM of the interpreter's own would be found in its place
        raise MkError(f"{where} is no folder", hint=INSTALL)
    python, env = config.python or sys.executable, environment(config)
    code = "from importlib.metadata import version; print(version('vllm'))"
    try:
        found = subprocess.run(
            [python, "-c", code], env=env, capture_output=True, text=True, errors="replace", timeout=FIND_TIMEOUT_S
        )
    except OSError as error:
        raise MkError(f"baseline.vllm.python={python}: {error.strerror}", hint=INSTALL) from error
    except subprocess.SubprocessError as error:
        raise MkError(f"baseline.vllm.python={python} does not answer: {error}"[:300]) from error
    if found.returncode:
        raise MkError(f"{where} has no vLLM", hint=INSTALL)
    said = found.stdout.strip().rpartition("\n")[2]
    if not re.fullmatch(VERSION, said):
        raise MkError(f"{where} says {said[:60]!r} where vLLM's version is asked for", hint=INSTALL)
    return python, env, said


def missing(config: VllmConfig) -> str | None:
    """What is said where no vLLM is configured; None where there is one. Raises as `find` for one that is not there."""
    try:
        find(config)
    except Missing as error:
        return f"vLLM is missing: {error}; to install it: {error.hint}"
    return None


def environment(config: VllmConfig) -> dict[str, str]:
    """Ours, with vLLM's site folder and this repository's root to import from, and no way to a network."""
    paths = [str(Path(config.site).resolve())] if config.site else []
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",  # none
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles itself on first use
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir()) / "vllm_cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # by which vLLM knows that there is a card
    except OSError:
        found = sorted(Path("/usr/local/nvidia").rglob("libnvidia-ml.so.1"))
        if found:
            env["LD_LIBRARY_PATH"] = f"{found[0].parent}{os.pathsep}{env.get('LD_LIBRARY_PATH', '')}"
    return env


def measure(config: VllmConfig, spec: Spec, folder: Path, moe_backend: str) -> Measured:
    """One start of vLLM; its files (`config.json`, results, log) lie in `folder`.

    Raises as `find` does, and MkError where it does not get as far as one result, with the end of its log.
    """
    python, env, version = find(config)
    env["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = STRATEGIES[spec.routing]
    folder.mkdir(parents=True)
    written = {**spec.geometry.to_hf_config(), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(written))
    results, log = folder / "results.jsonl", folder / "log.txt"
    values = {
        "model": str(folder.resolve()),
        "results": str(results.resolve()),
        "vocab": spec.geometry.vocab,
        "attention_backend": config.attention_backend,
        "moe_backend": moe_backend,
        "kv": config.kv,
        "gpu_memory": config.gpu_memory,
        **{name: value for name, value in vars(spec).items() if name not in ("geometry", "routing")},
    }
    (folder / "spec.json").write_text(json.dumps(values))
    command = [python, vllm_bench.__file__, str((folder / "spec.json").resolve())]
    before = card_state()
    ended = _run(command, env, log, config.timeout_s)
    lines = log.read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    measured = read(found, lines, version)
    measured.card = {"before": before, "after": card_state()}
    if ended:
        measured.errors.append(f"{ended}, {log_end(log)}")
    if not measured.cases:
        why = "; ".join([*measured.errors, *measured.absent])
        raise MkError(f"vLLM {version} measured nothing: {why}" + f"; {log_end(log)}" * (ended is None))
    return measured


def _run(command: list[str], env: dict[str, str], log: Path, timeout_s: int) -> str | None:
    """Why it did not end well, None where it did."""
    with started(command, env, log) as process:
        try:
            status = process.wait(timeout_s)
            ended = f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            ended = f"stopped after {timeout_s} s"
    time.sleep(0.1)  # the card's memory comes back a moment after the last process
    return ended


def read(results: list[dict[str, Any]], log: list[str], version: str) -> Measured:
    """results: of `vllm_bench.py`. What its worker says of itself goes before what the log said on the way."""
    resolved, lines = parse_log(log)
    measured = Measured(version, False, resolved, [], lines, [])
    cases: dict[tuple[int, int], Case] = {}
    for one in results:
        case, key = one["case"], (one.get("batch", 0), one.get("context", 0))
        if case == "version":
            measured.version = one["vllm"]
        elif case == "engine":
            measured.same_weights = one["weights"] == "same"
            if not measured.same_weights:
                measured.errors.append(f"weights {one['weights']}")
            add_info(resolved, one)
        elif case == "decode":
            cases[key] = Case(*key, one["step_ms"], one["tpot_ms"])
        elif case == "experts" and key in cases:
            cases[key].experts_by_layer = one["by_layer"]
        elif case in ("failed", "absent"):
            said = measured.errors if case == "failed" else measured.absent
            said.append(f"batch {key[0]}, context {key[1]}: {one['error']}")
    measured.cases = list(cases.values())
    return measured


def add_info(resolved: dict[str, str], info: Mapping[str, Any]) -> None:
    """Puts what the worker says of itself (`mk_info`) before what the log said."""
    resolved |= {name: info[name] for name in ("graph_mode", "compile_mode")}
    if info["flash_attention"]:
        resolved["attention_backend"] = f"{resolved.get('attention_backend', '')} {info['flash_attention']}".strip()


def parse_log(log: list[str]) -> tuple[dict[str, str], list[str]]:
    """Fields of `Row` by what the log says, and the lines that say so, without folders of this host.

    The first line that says it counts.
    """
    resolved: dict[str, str] = {}
    lines = []
    for line in log:
        for name, pattern in RESOLVED.items():
            if name not in resolved and (match := re.search(pattern, line)):
                resolved[name] = next(group for group in match.groups() if group)
                lines.append(re.sub(r"/[^\s:]*/", "", line.strip())[:400])
    return resolved, lines
