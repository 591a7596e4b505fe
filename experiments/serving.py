"""Serve two workloads end to end over HTTP, our server and vLLM's in turn, and compare what a client sees.

The same client sends both the same token ids, `batch.size` requests in flight: the next goes out when one has ended.
Each request generates a given number of tokens past any end token, which the server's usage confirms. Each server has a
process of its own and the card alone; experiment.base_url names another server instead. A ratio stands only between
engines that generated as many tokens for each request.
"""

from __future__ import annotations

import torch

from experiments import load
from experiments.console import progress
from experiments.device_weights import open_weights
from experiments.load_report import Engine, check_engines, measure_engines
from experiments.opening import sampling_of
from mk.config import Config
from mk.device import card_state
from mk.errors import MkError
from mk.results.runs import RunFolder


def main(cfg: Config) -> int:
    """Exit status: 0, also where no vLLM is configured; 1 where a check failed, or vLLM did."""
    settings = cfg.experiment
    longest = max(load.longest_of(getattr(settings, name), settings.seed) for name in settings.workloads)
    if longest > cfg.server.context:
        raise MkError(
            f"requests of {longest} tokens exceed server.context={cfg.server.context}", hint=f"server.context={longest}"
        )
    missing = check_engines(cfg)
    with RunFolder.create(cfg) as run:
        return measure_engines(cfg, run, missing, lambda engine: measure(cfg, engine))


def measure(cfg: Config, engine: Engine) -> None:
    """A row of each workload, after a warming."""
    settings, parallel, sampling = cfg.experiment, cfg.batch.size, sampling_of(cfg)
    vocab = open_weights(cfg, torch.device("cpu")).geometry.vocab
    for name in settings.workloads:
        workload = getattr(settings, name)
        asked = load.bodies(workload, vocab, settings.seed, sampling)
        for wave in load.warming(workload, vocab, settings.seed, parallel, sampling):
            engine.client.drive(load.COMPLETIONS, wave, parallel, lambda _: None)
        before = card_state()
        with progress(f"{engine.name}, {name}", len(asked)) as done:
            answers = engine.client.drive(load.COMPLETIONS, asked, parallel, done)
        engine.append_load(
            answers,
            [body["max_tokens"] for body in asked],
            parallel,
            [before, card_state()],
            workload=name,
            context=[workload.prompt] * parallel,
            requests_hash=load.digest(asked),
        )
