"""Serve the configured checkpoint with vLLM, as `experiment=serve` does with ours: for experiment=accuracy's base_url.

This process becomes vLLM's server, in the interpreter and with the packages that `baseline.vllm` names, so whatever
ends it ends vLLM. It takes from `server` what ours takes from there: host, port, slots, context and the model's id.
"""

from __future__ import annotations

import os
from pathlib import Path

from experiments.baselines.vllm_process import find
from mk.config import Config
from mk.errors import MkError
from mk.model.hub import resolve_folder
from mk.model.opening import NANO

EXTENSION = "experiments.baselines.vllm_extension.Extension"  # of its worker, where weights are made there


def main(cfg: Config) -> int:
    """Never returns: raises MkError, or becomes vLLM."""
    config = cfg.baseline.vllm
    if config is None:
        raise MkError("vllm_serve starts vLLM", hint="baseline=vllm")
    python, env, version = find(config)
    command = [python, *arguments(cfg, checkpoint(cfg))]
    print(f"vLLM {version}: {' '.join(command)}", flush=True)
    os.execve(python, command, env)


def arguments(cfg: Config, folder: Path) -> list[str]:
    """Of vLLM's interpreter, to serve the model in `folder`."""
    config, server = cfg.baseline.vllm, cfg.server
    assert config is not None
    options = {
        "model": str(folder),
        "served-model-name": server.model_id or (folder.name if cfg.model.path else cfg.model.name),
        "host": server.host,
        "port": server.port,
        "max-model-len": server.context,
        "max-num-seqs": server.slots,
        "dtype": "bfloat16",
        "gpu-memory-utilization": config.gpu_memory,
        "attention-backend": config.attention_backend,
        "moe-backend": config.moe_backends[0],
        "generation-config": "vllm",  # a request says how it is sampled; what it leaves out is OpenAI's default
    }
    if config.reasoning_parser is not None:
        options["reasoning-parser"] = config.reasoning_parser
    if config.tool_parser is not None:
        options["tool-call-parser"] = config.tool_parser
    pairs = [f"--{name}={value}" for name, value in options.items()]
    flags = ["--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    flags += ["--enable-auto-tool-choice"] * (config.tool_parser is not None)
    return ["-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *config.arguments]


def checkpoint(cfg: Config) -> Path:
    """The folder of the configured weights. Raises MkError where there is none."""
    model = cfg.model
    if cfg.weights.name == "checkpoint" and model.path is not None:
        return resolve_folder(model.path, model.revision)
    if cfg.weights.name == "checkpoint" and model.preset == "nano":
        return NANO
    raise MkError(f"model={model.name} weights={cfg.weights.name}: no checkpoint to serve", hint="model.path=<folder>")
