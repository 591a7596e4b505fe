"""Time decode steps and the bound of every schedule: the same steps without a wait for another SM, at wrong numbers.

Rows of decode_throughput, those of the bound beside the kernel's; by the simulator without a card.
"""

from __future__ import annotations

import torch

from experiments import decode_throughput, simulated_variants
from mk.config import Config
from mk.results.runs import RunFolder


def main(cfg: Config) -> int:
    """Exit status 0; whatever is wrong is an MkError."""
    job = decode_throughput.job_of(cfg, zero_wait=True)
    decode_throughput.check_settings(job, cfg.experiment.name)
    if not torch.cuda.is_available():
        return simulated_variants.run(cfg, [(simulated_variants.ALONE, job)], zero_wait=True)
    decode_throughput.check(job, cfg.experiment.name)
    with RunFolder.create(cfg) as run:
        decode_throughput.run(job, within=run)
    return 0
