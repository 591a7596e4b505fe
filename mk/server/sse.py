"""Server-sent events: chunks, then an error or [DONE]."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mk.server.errors import ApiError, dumps

log = logging.getLogger("mk.server")


class EventStream(StreamingResponse):
    """A stream never just breaks off: clients take that for a lost connection and ask again, at once and for ever."""

    def __init__(self, chunks: AsyncIterator[dict[str, Any]], close: Callable[[], None]) -> None:
        """close: called at the end, however it comes about: the client may have gone."""
        super().__init__(_events(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    try:
        async for chunk in chunks:
            yield f"data: {dumps(chunk)}\n\n"
    except ApiError as error:
        yield f"data: {dumps(error.body())}\n\n"
        return
    except Exception as error:
        log.exception("a stream failed")
        wrapped = ApiError(500, f"{type(error).__name__}: {error}", "internal_error")
        yield f"data: {dumps(wrapped.body())}\n\n"
        return
    yield "data: [DONE]\n\n"


def usage(prompt: int, completion: int, cached: int, reasoning: int | None = None) -> dict[str, Any]:
    """Tokens of a request, all choices together."""
    counted: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        counted["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counted
