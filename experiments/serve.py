"""Serve a model to OpenAI's clients: `make serve [port= model=]`; --cfg job shows what can be set.

Prints where it listens once it does. Ctrl-C or SIGTERM lets running answers end for server.drain_s; what runs then,
or at a second signal, ends with an error. `python -m experiments.serve FILE` takes its configuration from a YAML file
that holds a resolved one: experiments/server_process.py starts it so.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from omegaconf import OmegaConf

from experiments.agents.programs import opencode_settings
from experiments.console import progress
from mk.compose import stored_config
from mk.config import Config
from mk.engines.choice import require_engine
from mk.engines.cuda import CudaEngine
from mk.errors import tell
from mk.model.opening import open_model
from mk.model.packing import WeightLayout
from mk.programs_ahead import made_ahead
from mk.server.app import create_app
from mk.server.generation import Service
from mk.server.launch import Server, api_key, build_service, listen, version


def main(cfg: Config) -> int:
    """Exit status: 0 after an orderly end."""
    require_engine(cfg, cfg.server.slots)
    listener = listen(cfg.server.host, cfg.server.port)  # before minutes of loading
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch, listener:
        device = "cuda" if cfg.engine.name == "cuda" else "cpu"  # where random weights are made
        model = open_model(cfg.model, cfg.weights, Path(scratch), device)
        with progress("pack weights", len(WeightLayout(model.geometry).entries())) as done:
            service = build_service(cfg, model, lambda packed, _: done(packed))
        app = create_app(service, version(), api_key())
        server = Server(app, service.worker, cfg.server.drain_s, lambda: print(welcome(cfg, service), flush=True))
        engine = service.worker.core.engine
        ahead = made_ahead(engine.programs, cfg.server.context) if isinstance(engine, CudaEngine) else nullcontext()
        try:
            with ahead:  # on a CPU a program takes milliseconds
                server.run(sockets=[listener])
        finally:
            service.worker.stop()
    return 0


def welcome(cfg: Config, service: Service) -> str:
    """What to paste where."""
    url = f"http://{cfg.server.host}:{cfg.server.port}"
    messages = [{"role": "user", "content": "Write hello world in Python."}]
    body = {"model": service.model_id, "messages": messages, "max_tokens": 64}  # nano by itself knows no end
    key = " -H 'Authorization: Bearer '$MK_API_KEY" if api_key() else ""
    lines = [
        f"serving {service.model_id} at {url}/v1",
        f"context {service.context} tokens, {cfg.server.slots} requests at a time, "
        f"engine {service.worker.core.engine.name}, weights: {cfg.weights.name}",
        "",
        f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        "",
        "opencode.json:",
        json.dumps(opencode(url, service), indent=2),
    ]
    if cfg.model.preset == "nano" and cfg.model.path is None:
        lines += ["", "nano is a toy: it shows agents that the protocol works, and writes no program worth running."]
    return "\n".join(lines)


def opencode(url: str, service: Service) -> dict[str, object]:
    """OpenCode's configuration for this server."""
    key = "{env:MK_API_KEY}" if api_key() else "none"
    return opencode_settings(f"{url}/v1", service.model_id, service.context, key)


if __name__ == "__main__":
    try:
        sys.exit(main(stored_config(OmegaConf.load(sys.argv[1]))))
    except Exception as error:
        sys.exit(tell(error, os.environ.get("MK_TRACEBACK") == "1"))
