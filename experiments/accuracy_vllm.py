"""Score a benchmark through the built-in server, then through vLLM's over the same checkpoint, and their difference.

One after the other, so that the card is free for each; both are asked the same requests, byte for byte. Ours leaves a
run folder of experiment=accuracy, vLLM's one of this experiment, with the interval of the difference: each is repeated
by its own configuration.
"""

from __future__ import annotations

import dataclasses
import gc

import torch

from evals.asked import started_server
from experiments import accuracy, vllm_serve
from experiments.baselines.vllm_process import find
from experiments.server_process import vllm_server
from experiments.unread import require_router
from mk.config import Config
from mk.errors import MkError


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a check of either evaluation fails; the scores are none of them."""
    config = cfg.baseline.vllm
    if config is None or cfg.experiment.base_url is not None:
        raise MkError("accuracy_vllm starts both servers", hint="baseline=vllm, and no experiment.base_url")
    require_router(cfg)
    find(config)  # before minutes of the other engine
    vllm_serve.checkpoint(cfg)
    settings = cfg.experiment
    own = dataclasses.replace(cfg, experiment=dataclasses.replace(settings, name="accuracy"))
    status, ours = accuracy.score(own, settings.resume, settings.compare)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the engine had on the card
    with vllm_server(cfg, ours / "vllm.log") as running:
        theirs = started_server(cfg, running.base_url, running.fields, running.lines)
        second, _ = accuracy.score(cfg, None, ours, theirs)
    return status or second
