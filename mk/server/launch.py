"""From a configuration to a server that answers: engine, core, worker, service; and uvicorn around them.

`Server` runs in the foreground (`make serve`), `in_background` beside a client of this process.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import importlib.metadata
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from mk.batching.core import Core
from mk.batching.policy import Policy
from mk.batching.worker import Worker
from mk.config import Config, resolved
from mk.engines.choice import make_paged_engine
from mk.engines.cuda import CudaEngine
from mk.errors import MkError
from mk.kv import blocks_of
from mk.model.files import digest_files
from mk.model.opening import Model
from mk.model.tokenizer import Tokenizer
from mk.server.generation import Service
from mk.server.grammar import Grammars
from mk.server.metrics import Metrics

API_KEY = "MK_API_KEY"  # the environment's: a key on a command line is everybody's to read
LAST_WORDS_S = 2.0  # for clients to read the error that ends their answers
# groups of the configuration that decide which numbers an answer is made of, beside parts of model and server
_OF_ANSWERS = ("weights", "schedule", "wave_order", "placement", "routing", "gpu", "engine", "prefill")


def build_service(config: Config, model: Model, progress: Callable[[int, int], None] | None = None) -> Service:
    """The engine, and what the endpoints need of it. Raises MkError for a model or an engine that cannot serve.

    progress: as of `make_engine`.
    """
    server, engine_config, prefix = config.server, config.engine, config.engine.prefix_cache
    if server.context > model.geometry.max_positions:
        raise MkError(
            f"server.context={server.context} exceeds the model's {model.geometry.max_positions} positions",
            hint=f"server.context={model.geometry.max_positions}",
        )
    pages = {"full": blocks_of(server.kv_tokens.full), "sliding": blocks_of(server.kv_tokens.sliding)}
    engine = make_paged_engine(config, model, server.slots, server.context, pages, progress, server.sizes)
    policy = Policy(
        chunk=config.prefill.chunk,
        prefill=engine_config.prefill_policy,
        steps_between=engine_config.steps_between_chunks,
        cache=prefix.enabled,
        cache_generated=prefix.enabled and prefix.generated,
        deliver=server.deliver,
        held=engine_config.held_steps,
    )
    worker = Worker(Core(engine, model.tokenizer.eos, policy))
    build_hash = engine.runtime.build_hash if isinstance(engine, CudaEngine) else None
    return Service(
        worker=worker,
        tokenizer=model.tokenizer,
        model_id=server.model_id or (Path(config.model.path).name if config.model.path else config.model.name),
        fingerprint=fingerprint(config, model, build_hash or engine.name),
        context=server.context,
        max_waiting=server.max_waiting,
        created=int(time.time()),
        metrics=Metrics(worker),
        grammars=Grammars(model.tokenizer),
        defaults=sampling_defaults(model.tokenizer),
        build_hash=build_hash,
    )


def sampling_defaults(tokenizer: Tokenizer) -> dict[str, float | int]:
    """What generation_config.json says about sampling, under the names of request fields."""
    given = tokenizer.generation
    defaults: dict[str, float | int] = {
        key: given[key] for key in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty") if key in given
    }
    if given.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def fingerprint(config: Config, model: Model, library: str) -> str:
    """What answers depend on besides the request: configuration (the schedule is part of it), model and library.

    The model is known by its files, not by its place, as far as `digest_files` reads them.
    """
    given = resolved(config)
    digest = hashlib.sha256(json.dumps([library, model.weights_label]).encode())
    of_answers = {group: given[group] for group in _OF_ANSWERS}
    of_answers["model"] = {key: value for key, value in given["model"].items() if key not in ("path", "revision")}
    of_answers["server"] = {key: given["server"][key] for key in ("slots", "batches", "context", "kv_tokens")}
    digest.update(json.dumps(of_answers, sort_keys=True).encode())
    digest_files(model.folder, digest)
    return f"fp_{digest.hexdigest()[:16]}"


def version() -> str:
    try:
        return importlib.metadata.version("mini-mk")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that nobody installed
        return "0"


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises MkError for an address that is taken or not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        hint = f"server.port={port % 65535 + 1}, or stop what uses it" if taken else "server.host=127.0.0.1"
        if error.errno == errno.EACCES:
            hint = "server.port=8000: lower ones than 1024 are the system's"
        raise MkError(f"{host}:{port} cannot be listened on ({error.strerror})", hint=hint) from error
    return listener


class Server(uvicorn.Server):
    """uvicorn, which says when it is ready, and whose end every client hears of.

    The first signal lets answers end for `drain_s`. Then, or at the second signal, the worker stops, which gives what
    still runs an error. uvicorn's own limit would cancel the answers instead: a stream that breaks off is asked for
    again for ever. Signals are not raised again afterwards, so that the caller's `finally` runs.
    """

    def __init__(self, app: FastAPI, worker: Worker, drain_s: float, ready: Callable[[], None]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_keep_alive=30, server_header=False))
        self._worker, self._drain_s, self._ready = worker, drain_s, ready
        self._hurried = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self._hurried  # the third signal waits for nobody
        self._hurried = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        end = time.monotonic() + self._drain_s
        while time.monotonic() < end and not self._hurried:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(self._worker.stop)
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


@contextmanager
def in_background(app: FastAPI, worker: Worker, drain_s: float) -> Iterator[str]:
    """Serve on a free port of this machine while the context lasts; the server's URL, without a path.

    drain_s: how long the end waits for answers.

    Raises MkError where the server does not come up.
    """
    with in_thread(Server(app, worker, drain_s, lambda: None)) as url:
        yield url


@contextmanager
def in_thread(server: uvicorn.Server) -> Iterator[str]:
    """As `in_background`, of any server."""
    with listen("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="mk-server", daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise MkError("the server did not start; its log says why")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def api_key() -> str | None:
    return os.environ.get(API_KEY) or None
