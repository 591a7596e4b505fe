"""Between an agent and its server: passes everything on, keeps each request with its answer, and when its tokens came.

Whatever the server, figures are then by this process's clock and the server's usage. Streams are asked for their usage
in every chunk; the agent is shown of it what it asked for itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from evals.served import API_KEY
from experiments.agents.exchange import Exchange
from experiments.load_client import COUNTED, Answer
from mk.server.launch import in_thread

ASKED = ("chat/completions", "completions")  # what is a request to the model
CONNECT_S = 10.0
END_S = 1  # that an answer may go on when its agent has ended


class Proxy:
    """upstream: with /v1. exchanges: in the order that they were sent. lost: set where the server did not answer, or
    went away amid an answer."""

    def __init__(self, upstream: str) -> None:
        self.exchanges: list[Exchange] = []
        self.lost = threading.Event()
        self.upstream = upstream
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def __call__(self, request: Request) -> Response:
        path, content = request.path_params["path"], await request.body()
        exchange = self._opened(path, content) if request.method == "POST" and path in ASKED else None
        if exchange is not None and exchange.body.get("stream") and exchange.options is not None:
            options = {**exchange.options, **COUNTED}
            content = json.dumps({**exchange.body, "stream_options": options}).encode()
        url = f"{self.upstream}/{path}" + (f"?{request.url.query}" if request.url.query else "")
        asked = self._client.build_request(request.method, url, content=content, headers=self._headers(request))
        try:
            reply = await self._client.send(asked, stream=True)
            if exchange is not None:
                exchange.status = reply.status_code
            kind = reply.headers.get("content-type", "application/json")
            if kind.startswith("text/event-stream") and exchange is not None:
                return StreamingResponse(self._stream(reply, exchange), reply.status_code, media_type=kind)
            try:
                content = await reply.aread()
            finally:
                await reply.aclose()
        except httpx.TransportError as error:
            self.lost.set()
            if exchange is not None:
                exchange.error = f"{type(error).__name__}: {error}"
            return JSONResponse({"error": {"message": f"the server does not answer: {error}"}}, 502)
        if exchange is not None:
            self._take(exchange, reply.status_code, content)
        return Response(content, reply.status_code, media_type=kind)

    def _opened(self, path: str, content: bytes) -> Exchange | None:
        """None for what is no object: the server refuses it."""
        try:
            body = dict(json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        exchange = Exchange(path, body, Answer(time.perf_counter()))
        self.exchanges.append(exchange)
        return exchange

    def _headers(self, request: Request) -> dict[str, str]:
        """With the key of the environment, which the agent does not know."""
        headers = {"accept-encoding": "identity", "content-type": request.headers.get("content-type", "text/plain")}
        if key := os.environ.get(API_KEY):
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _take(self, exchange: Exchange, status: int, content: bytes) -> None:
        if status != 200:
            exchange.error = content[:1000].decode(errors="replace")
            return
        try:
            exchange.take_whole(json.loads(content), time.perf_counter())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            exchange.error = f"no answer: {error!r}"

    async def _stream(self, reply: httpx.Response, exchange: Exchange) -> AsyncIterator[bytes]:
        """What has come of lines, as it comes."""
        rest = b""
        try:
            async for part in reply.aiter_raw():
                now = time.perf_counter()
                *lines, rest = (rest + part).split(b"\n")  # a JSON text may hold other ends of lines
                if lines:
                    yield b"\n".join([*(exchange.take_line(line, now) for line in lines), b""])
            yield exchange.take_line(rest, time.perf_counter())
        except httpx.TransportError as error:
            exchange.error = f"{type(error).__name__}: {error}"
            self.lost.set()
            raise  # the agent sees the stream break off, as it does without this
        finally:
            await reply.aclose()


@contextlib.contextmanager
def recording(upstream: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy that serves, and its URL with /v1. upstream: of the server, with /v1."""
    proxy = Proxy(upstream)
    app = Starlette(routes=[Route("/v1/{path:path}", proxy.__call__, methods=["GET", "POST"])], lifespan=proxy.lifespan)
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=END_S)
    with in_thread(uvicorn.Server(config)) as url:
        yield proxy, f"{url}/v1"
