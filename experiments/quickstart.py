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
from experiments.prompts import sample_prompts, text_prompts
from experiments.quickstart_report import Decoded, Report, indent
from mk.config import Config
from mk.decode import Decoder, Request
from mk.engines import make_engine, require_engine
from mk.errors import MkError
from mk.model.opening import Model, open_model
from mk.model.packing import WeightLayout
from mk.runs import RunFolder
from mk.sampling import SamplingParams

Prompts = Sequence[Sequence[int]]


def main(cfg: Config) -> int:
    """Exit status: 0, or 1 when a token differs from the oracle's."""
    settings = cfg.experiment
    if settings.new_tokens < 1:
        raise MkError(f"experiment.new_tokens={settings.new_tokens} must be at least 1")
    require_engine(cfg.engine.name)  # an engine that is not here is refused before anything is loaded,
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        model = open_model(cfg.model, cfg.weights, Path(scratch))
        prompts = _first_batch(cfg, model)
        decoder = _decoder(cfg, model, prompts)  # a plan that does not fit before there is a run folder
        with RunFolder.create(cfg) as run:
            report = Report(cfg, run, model)
            report.header()
            report.add(_decode(cfg, model, decoder, prompts))
            if cfg.batch.size == 1 and settings.ragged:
                prompts = sample_prompts(model.tokenizer, settings.ragged)
                report.add(_decode(cfg, model, _decoder(cfg, model, prompts), prompts), "-ragged")
            print(f"\nrun folder: {run.path}")
            return 0 if report.agree else 1


def _first_batch(cfg: Config, model: Model) -> Prompts:
    """The prompts of the configured batch; an empty one is an inactive row."""
    if cfg.batch.contexts is not None:
        if not any(cfg.batch.contexts):
            raise MkError("batch.contexts: every row is inactive", hint="give at least one row a context")
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


def _decode(cfg: Config, model: Model, decoder: Decoder, prompts: Prompts) -> Decoded:
    """Prefill and decode one batch, showing text as it comes (batch 1) or a bar (more rows)."""
    s, new_tokens = cfg.sampling, cfg.experiment.new_tokens
    params = SamplingParams(s.temperature, s.top_k, s.top_p, s.seed)
    requests = [Request(prompt, new_tokens, params) if prompt else None for prompt in prompts]
    decoded = Decoded(decoder.engine, requests)
    print(f"\nbatch {len(prompts)}, context {', '.join(str(len(prompt)) for prompt in prompts)}", flush=True)
    started = time.perf_counter()
    with progress("prefill", len(prompts)) as done:
        for row, request in decoded.rows:
            decoder.add(request, row)
            done(row + 1)
    decoded.prefill_s = time.perf_counter() - started
    started = time.perf_counter()
    if len(prompts) == 1:
        _stream(decoder, model, decoded)
    else:
        with progress("decode", new_tokens - 1) as done:
            for out in decoder.run():
                decoded.outputs.append(out)
                done(len(decoded.outputs))
    decoded.decode_s = time.perf_counter() - started
    return decoded


def _stream(decoder: Decoder, model: Model, decoded: Decoded) -> None:
    """Print the prompt and, as tokens complete some text, the continuation."""
    (_, request), *_ = decoded.rows
    text = model.tokenizer.stream()
    prompt = model.tokenizer.decode(request.prompt, skip_special=True)
    print("  | " + indent(prompt + text.step(request.tokens[0])), end="", flush=True)
    for out in decoder.run():
        decoded.outputs.append(out)
        print(indent(text.step(request.tokens[-1])), end="", flush=True)
    print(indent(text.finish()), flush=True)
