"""Whom the questions go to: a server that is named, one that somebody has started, or one that is started here."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evals.served import ServedEngine
from mk.config import Config
from mk.model.opening import Model, open_model
from mk.results.rows import dtype_of
from mk.server.app import create_app
from mk.server.launch import build_service, in_background, version


@dataclass(frozen=True, slots=True)
class Asked:
    """title: of the model, as people and samples have it. dtype: of the arithmetic. model: None = only the server's.
    fields: of a row, what else is known of what answers. log: lines of the server's own that say so."""

    engine: ServedEngine
    title: str
    dtype: str
    model: Model | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    log: Sequence[str] = ()


def named_server(cfg: Config) -> Asked:
    """The server at experiment.base_url. Raises MkError where it does not answer."""
    settings = cfg.experiment
    engine = ServedEngine(settings.base_url, settings.served_model, cfg.batch.size, _timeout_s(cfg))
    return Asked(engine, engine.model, "unknown", fields={"model": engine.model})  # a server says no more


def started_server(cfg: Config, base_url: str, fields: Mapping[str, Any], log: Sequence[str]) -> Asked:
    """A server of the configured model that runs already. fields: of a row, what runs there, engine and dtype too."""
    engine = ServedEngine(base_url, None, cfg.batch.size, _timeout_s(cfg), fields["engine"])
    return Asked(engine, engine.model, fields["dtype"], fields=fields, log=log)


@contextlib.contextmanager
def own_server(cfg: Config) -> Iterator[Asked]:
    """The built-in server with the configured engine, on a free port, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="mk-") as scratch:
        model = open_model(cfg.model, cfg.weights, Path(scratch))
        service = build_service(cfg, model)
        name = service.worker.core.engine.name
        title = cfg.model.path or cfg.model.name
        with in_background(create_app(service, version()), service.worker, cfg.server.drain_s) as url:
            parallel = min(cfg.batch.size, cfg.server.slots)
            engine = ServedEngine(f"{url}/v1", service.model_id, parallel, _timeout_s(cfg), name)
            if name == "scripted":
                yield Asked(engine, "answers from a script", "unknown")
            else:
                label = f"{title} (weights: {model.weights_label})"
                yield Asked(engine, label, dtype_of(name, cfg.engine.numerics), model)


def _timeout_s(cfg: Config) -> float:
    """Of one answer."""
    assert cfg.benchmark.timeout_s is not None
    return cfg.benchmark.timeout_s
