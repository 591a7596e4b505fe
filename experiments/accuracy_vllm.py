"""Score a benchmark through the built-in server, then through vLLM's over the same checkpoint, and their difference.

One after the other, so that the card is free for each; both are asked the same requests, byte for byte. Each leaves a
run folder of experiment=accuracy, the second one's with the interval of the difference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch

from experiments import accuracy, vllm_serve
from experiments.baselines.vllm_process import find
from mk.config import Config
from mk.errors import MkError
from mk.server.launch import listen

STOP_S = 20.0  # that vLLM may take to end its processes before they are killed


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a check of either evaluation fails; the scores are none of them."""
    config = cfg.baseline.vllm
    if config is None or cfg.experiment.base_url is not None:
        raise MkError("accuracy_vllm starts both servers", hint="baseline=vllm, and no experiment.base_url")
    find(config)  # before minutes of the other engine
    vllm_serve.arguments(cfg)
    settings = dataclasses.replace(cfg.experiment, name="accuracy")
    status, ours = accuracy.score(dataclasses.replace(cfg, experiment=settings))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the engine had on the card
    with vllm_server(cfg, ours / "vllm.log") as url:
        theirs = dataclasses.replace(settings, base_url=url, compare=str(ours), resume=None)
        second, _ = accuracy.score(dataclasses.replace(cfg, experiment=theirs))
    return status or second


@contextlib.contextmanager
def vllm_server(cfg: Config, log: Path) -> Iterator[str]:
    """vLLM's server on a free port, for as long as the context lasts; its base URL. What it prints goes to `log`.

    Raises MkError where it is not up within baseline.vllm.timeout_s, with the end of its log.
    """
    config = cfg.baseline.vllm
    assert config is not None
    python, env, version = find(config)
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    served = dataclasses.replace(cfg, server=dataclasses.replace(cfg.server, host="127.0.0.1", port=port))
    print(f"vLLM {version} is started, its log is {log}", flush=True)
    with log.open("w") as file:
        command = [python, *vllm_serve.arguments(served)]
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log, config.timeout_s)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine has a process of its own
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            print(f"vLLM answers after {time.monotonic() - started:.0f} s", flush=True)
            return
        time.sleep(0.5)
    end = " | ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-5:])
    why = "does not answer" if process.poll() is None else f"ended with status {process.returncode}"
    raise MkError(f"vLLM's server {why}: {end}"[:1000], hint=f"{log}; baseline.vllm.timeout_s=<more>")
