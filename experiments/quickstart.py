"""Decode real text through the machine and check it against transformers, token by token.

A prompt at batch 1, streamed; then a ragged batch whose contexts cross the sliding window. Writes a run folder with the
configuration, a row a batch, the expert ids of every step and a picture of the schedule.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments.console import progress
from experiments.opening import sampling_of
from experiments.prompts import sample_prompts, text_prompts
from experiments.quickstart_report import Decoded, Report, indent
from mk.config import Config
from mk.decode import Decoder, Request
from mk.engines.choice import make_engine, require_engine, require_positions
from mk.model.opening import Model, open_model
from mk.model.packing import WeightLayout
from mk.results.runs import RunFolder
from mk.routing import make_router

Prompts = Sequence[Sequence[int]]
RAGGED = "-ragged"  # in the file names of the second batch


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a token differs from the oracle's."""
    new_tokens = cfg.experiment.new_tokens
    require_engine(cfg, cfg.batch.size)  # an engine that is not here is refused before anything is loaded,
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        model = open_model(cfg.model, cfg.weights, Path(scratch))
        make_router(cfg.routing, model.geometry, cfg.batch.size, steps=new_tokens - 1)  # a routing before packing,
        batches = _batches(cfg, model)
        decoders = {suffix: _decoder(cfg, model, prompts) for suffix, prompts in batches.items()}
        sampling = sampling_of(cfg)
        with RunFolder.create(cfg) as run:  # and the rest before there is a run folder
            report = Report(cfg, run, model)
            report.header()
            for suffix, prompts in batches.items():
                requests = [Request(prompt, new_tokens, sampling) if prompt else None for prompt in prompts]
                report.add(_decode(model, decoders[suffix], requests), suffix)
            if cfg.batch.size == 1 and cfg.experiment.ragged and RAGGED not in batches:
                print("\nno ragged batch: the trace of routing=replay is of a single row")
            print(f"\nrun folder: {run.path}")
            return 0 if report.agree else 1


def _batches(cfg: Config, model: Model) -> dict[str, Prompts]:
    """The prompts of every batch, by the suffix of its files. A recorded trace fits the rows of the first one alone."""
    for contexts in (cfg.batch.contexts, cfg.experiment.ragged):
        require_positions(model.geometry, max(contexts or [0]))  # before so many tokens are made
    batches = {"": _first_batch(cfg, model)}
    if cfg.batch.size == 1 and cfg.experiment.ragged and cfg.routing.name != "replay":
        batches[RAGGED] = sample_prompts(model.tokenizer, cfg.experiment.ragged)
    return batches


def _first_batch(cfg: Config, model: Model) -> Prompts:
    """The prompts of the configured batch; an empty one is an inactive row."""
    if cfg.batch.contexts is not None:
        return sample_prompts(model.tokenizer, cfg.batch.contexts)
    settings = cfg.experiment
    return text_prompts(model.tokenizer, settings.prompts or [settings.prompt], cfg.batch.size)


def _decoder(cfg: Config, model: Model, prompts: Prompts) -> Decoder:
    """A decoder with room for the batch. Raises MkError for contexts, a plan or a routing that cannot be."""
    # the last token is decoded, but never put in the cache
    context = max(map(len, prompts)) + cfg.experiment.new_tokens - 1
    matrices = len(WeightLayout(model.geometry).entries())
    with progress("pack weights", matrices) as done:
        engine = make_engine(cfg, model, len(prompts), context, lambda packed, _: done(packed))
    return Decoder(engine, model.tokenizer.eos)


def _decode(model: Model, decoder: Decoder, requests: Sequence[Request | None]) -> Decoded:
    """Prefill and decode one batch, showing text as it comes (batch 1) or a bar (more rows)."""
    decoded = Decoded(decoder.engine, requests)
    contexts = ["0" if request is None else str(len(request.prompt)) for request in requests]
    print(f"\nbatch {len(requests)}, context {', '.join(contexts)}", flush=True)
    started = time.perf_counter()
    with progress("prefill", len(requests)) as done:
        for row, request in decoded.rows:
            decoder.add(request, row)
            done(row + 1)
    decoded.prefill_s = time.perf_counter() - started
    started = time.perf_counter()
    if len(requests) == 1:
        _stream(decoder, model, decoded)
    else:
        with progress("decode", max(request.max_tokens for _, request in decoded.rows) - 1) as done:
            for out in decoder.run():
                decoded.outputs.append(out)
                done(len(decoded.outputs))
    decoded.decode_s = time.perf_counter() - started
    return decoded


def _stream(decoder: Decoder, model: Model, decoded: Decoded) -> None:
    """Print the prompt and, as tokens complete some text, the continuation; the line ends whatever breaks it off."""
    (_, request), *_ = decoded.rows
    text = model.tokenizer.stream()
    prompt = model.tokenizer.decode(request.prompt, skip_special=True)
    try:
        print("  | " + indent(prompt + text.step(request.tokens[0])), end="", flush=True)
        for out in decoder.run():
            decoded.outputs.append(out)
            print(indent(text.step(request.tokens[-1])), end="", flush=True)
        print(indent(text.finish()), end="")
    finally:
        print(flush=True)  # an error's text begins a line of its own
