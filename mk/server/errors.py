"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} and a status."""

from __future__ import annotations

import json
from typing import Any

from fastapi.responses import Response
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What every answer that is an error holds, as the OpenAPI document says."""

    error: ErrorDetail


# beside a route's own answers; with them FastAPI does not promise a 422 in its own form
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "the request is at fault"},
    "5XX": {"model": ErrorBody, "description": "the server is at fault, or out of order"},
}


class ApiError(Exception):
    """An answer that is an error. status: of HTTP. param: the request's field at fault."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that is wrong."""
    return ApiError(400, message, code, param)


def engine_error(message: str) -> ApiError:
    """A request that was right and failed."""
    return ApiError(500, message, "engine_error")


def unavailable(message: str) -> ApiError:
    """A request that was right and is not served, now or any more."""
    return ApiError(503, message, "unavailable")


def dumps(value: Any) -> str:
    """JSON in UTF-8; what a request smuggled in that is no UTF-8 (half a surrogate pair) stays escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return json_response(error.body(), error.status, headers)
