"""Servers in processes of their own, for as long as somebody asks them: ours, and vLLM's over the same model.

Neither shares a process with the client that measures it. Random weights are the same for both: vLLM starts on dummies
of the geometry, and its worker then makes ours in their place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evals.served import ABOUT_S, fetch
from experiments import vllm_serve
from experiments.baselines.vllm_process import add_info, find, parse_log
from experiments.device_weights import open_weights
from experiments.settings.serving import Serve
from mk.compose import to_yaml
from mk.config import Config
from mk.errors import MkError
from mk.model.random_weights import RandomWeights
from mk.processes import log_end, started
from mk.results.rows import dtype_of
from mk.results.sources import ROOT
from mk.server.launch import API_KEY, listen

STOP_S = 20.0  # that a server may take to end its processes before they are killed
DYING_S = 2.0  # between a connection that breaks and the end of the process that broke it


@dataclass(frozen=True, slots=True)
class Running:
    """base_url: with /v1. fields: of a row, what ran there. lines: of its log, those that say so."""

    base_url: str
    fields: dict[str, Any]
    lines: list[str] = field(default_factory=list)


@contextlib.contextmanager
def our_server(cfg: Config, log: Path, timeout_s: float) -> Iterator[Running]:
    """experiment=serve with this configuration, on a free port. What it prints goes to `log`.

    Raises MkError where it is not up within `timeout_s`, with the end of its log.
    """
    served = dataclasses.replace(_on_a_free_port(cfg), experiment=Serve("serve"))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        config = Path(scratch) / "server.yaml"
        config.write_text(to_yaml(served))
        command = [sys.executable, "-m", "experiments.serve", str(config)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        env.pop(API_KEY, None)  # anybody may ask it here
        with _process("our server", command, env, log, served, timeout_s, "experiment.start_s=<more>") as url:
            about = fetch(f"{url}/version", None, ABOUT_S)
            engine, build_hash = str(about["engine"]), about["build_hash"]
            dtype = dtype_of(engine, cfg.engine.numerics)
            yield Running(f"{url}/v1", {"engine": engine, "dtype": dtype, "build_hash": build_hash})


@contextlib.contextmanager
def vllm_server(cfg: Config, log: Path) -> Iterator[Running]:
    """vLLM's server over the configured model, on a free port. What it prints goes to `log`.

    Raises as `find` does, and MkError where it is not up within baseline.vllm.timeout_s, with the end of its log.
    """
    config = cfg.baseline.vllm
    assert config is not None
    python, env, version = find(config)
    served = _on_a_free_port(cfg)
    print(f"vLLM {version} is started, its log is {log}", flush=True)
    fields: dict[str, Any] = dict.fromkeys(("schedule", "wave_order", "placement"), "vllm")
    fields |= {"engine": "vllm", "dtype": "bfloat16", "version": version}
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        random = cfg.weights.name == "random"
        if random:
            env["VLLM_SERVER_DEV_MODE"] = "1"  # else nobody can ask its worker to make the weights
            arguments = vllm_serve.arguments(served, _geometry(cfg, Path(scratch)))
            arguments += ["--load-format=dummy", f"--worker-extension-cls={vllm_serve.EXTENSION}"]
        else:
            arguments = vllm_serve.arguments(served, vllm_serve.checkpoint(cfg))
        hint = "baseline.vllm.timeout_s=<more>"
        with _process("vLLM's server", [python, *arguments], env, log, served, config.timeout_s, hint) as url:
            resolved, lines = parse_log(log.read_text(errors="replace").splitlines())
            if random:
                fields |= _make_weights(cfg, url, scratch, resolved)
            yield Running(f"{url}/v1", fields | resolved, lines)


def _on_a_free_port(cfg: Config) -> Config:
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    return dataclasses.replace(cfg, server=dataclasses.replace(cfg.server, host="127.0.0.1", port=port))


def _geometry(cfg: Config, folder: Path) -> Path:
    """`folder`, with all of a model in it but its weights."""
    source = open_weights(cfg, torch.device("cpu"))
    assert isinstance(source, RandomWeights)
    source.write_folder(folder)
    return folder


def _make_weights(cfg: Config, url: str, folder: str, resolved: dict[str, str]) -> dict[str, Any]:
    """Has vLLM's worker put our random weights in the place of its dummies, and adds to `resolved` what it settled on.
    same_weights: whether they are ours value by value, or else only as distributed."""
    config, weights = cfg.baseline.vllm, cfg.weights
    assert config is not None

    def call(method: str, *arguments: Any) -> Any:
        asked = {"method": method, "args": list(arguments), "timeout": config.timeout_s}
        (result,) = fetch(f"{url}/collective_rpc", asked, config.timeout_s)["results"]
        return result

    started = time.monotonic()
    said = call("mk_load_weights", folder, weights.seed or 0, weights.qk_scale or 1.0)
    print(f"vLLM's weights: {said}, after {time.monotonic() - started:.0f} s more", flush=True)
    add_info(resolved, call("mk_info"))
    return {"same_weights": said == "same"}


@contextlib.contextmanager
def _process(
    name: str, command: list[str], env: Mapping[str, str], log: Path, cfg: Config, timeout_s: float, hint: str
) -> Iterator[str]:
    """A server's process, from when it answers; its URL.

    Raises MkError with the end of its log for one that ends before, or while somebody asks it.
    """
    url = f"http://{cfg.server.host}:{cfg.server.port}"
    with started(command, env, log, STOP_S) as process:
        _wait_for(name, f"{url}/health", process, log, timeout_s, hint)
        try:
            yield url
        except MkError as error:  # as which a client knows a broken connection
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(DYING_S)
                raise MkError(f"{name} ended with status {status} while it was asked: {log_end(log)}") from error
            raise


def _wait_for(name: str, url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float, hint: str) -> None:
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            print(f"{name} answers after {time.monotonic() - started:.0f} s", flush=True)
            return
        time.sleep(0.2)
    if process.poll() is not None:
        raise MkError(f"{name} ended with status {process.returncode}: {log_end(log)}")
    raise MkError(f"{name} does not answer after {timeout_s:g} s: {log_end(log)}", hint=hint)
