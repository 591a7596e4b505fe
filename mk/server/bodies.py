"""Requests with large bodies: what is too large is refused unread, and what is large holds up no other stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES = 8_000_000  # some two million tokens, of which a context holds a few hundred thousand
SHORT_BYTES = 8_000  # tokenized in a few milliseconds: less than it takes to be noticed in a stream
T = TypeVar("T")


class BodyLimit:
    """ASGI middleware: a body over `BODY_BYTES` is answered with 413, before it is read where it tells its length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        declared = int(length) if length.isdigit() else 0
        too_large = HTTPException(413, f"the body has more than {BODY_BYTES:,} bytes")
        counted = 0

        async def limited() -> Message:
            nonlocal counted
            if declared > BODY_BYTES:
                raise too_large
            message = await receive()
            counted += len(message.get("body", b""))
            if counted > BODY_BYTES:
                raise too_large
            return message

        await self._app(scope, limited, send)


async def beside_the_loop(http: Request, work: Callable[[], T]) -> T:
    """What `work` gives. Of a long body it runs on a thread, so that the event loop goes on with the others."""
    return work() if len(await http.body()) <= SHORT_BYTES else await asyncio.to_thread(work)
