"""The routes, the key, and errors in one shape."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from mk.server.bodies import BodyLimit, beside_the_loop
from mk.server.chat import chat_completions
from mk.server.completions import completions
from mk.server.errors import ERROR_RESPONSES, ApiError, error_response, invalid, json_response
from mk.server.generation import Disconnected, Service
from mk.server.prompts import encode, render_chat
from mk.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

log = logging.getLogger("mk.server")
CLIENT_CLOSED = 499  # nobody reads it
STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}  # besides JSON


def create_app(service: Service, version: str, api_key: str | None = None) -> FastAPI:
    """The application; it starts and stops the service's worker. api_key: None = anybody may ask."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.stop()

    app = FastAPI(
        title="mini-mk", version=version, lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERROR_RESPONSES
    )
    _errors(app)
    app.add_middleware(BodyLimit)  # inside the guard, whose task group would hide what this one raises
    if api_key:
        _require_key(app, api_key)
    _generation(app, service)
    _about(app, service, version)
    _tokens(app, service)
    return app


def _generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=STREAMED)
    async def chat(asked: ChatRequest, http: Request) -> Response:
        return await chat_completions(service, asked, http)

    @app.post("/v1/completions", responses=STREAMED)
    async def complete(asked: CompletionRequest, http: Request) -> Response:
        return await completions(service, asked, http)


def _about(app: FastAPI, service: Service, version: str) -> None:
    model = {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "mini-mk",
        "max_model_len": service.context,
    }

    @app.get("/health")
    async def health() -> Response:
        failed = service.worker.failed
        return json_response({"status": failed or "ok"}, 503 if failed else 200)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.check_model(name)
        return json_response(model)

    @app.get("/version")
    async def what_version() -> Response:
        engine = {"engine": service.worker.core.engine.name, "build_hash": service.build_hash}
        return json_response({"version": version, "system_fingerprint": service.fingerprint, **engine})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _tokens(app: FastAPI, service: Service) -> None:
    tokenizer = service.tokenizer

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        template = tokenizer.folder / "chat_template.jinja"
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": tokenizer.decode(tokenizer.eos[:1]),
                "bos_token": tokenizer.decode([tokenizer.bos]),
                "pad_token": None,
                "chat_template": template.read_text() if template.exists() else None,
                "model_max_length": service.context,
                "vocab_size": tokenizer.vocab,
            }
        )

    @app.post("/tokenize")
    async def tokenize(asked: TokenizeRequest, http: Request) -> Response:
        asked.check_fields()
        service.check_model(asked.model)

        def answer() -> dict[str, Any]:
            if asked.messages is not None:
                options, begin = asked.chat_template_kwargs, asked.add_generation_prompt
                tokens = render_chat(tokenizer, asked.messages, asked.tools, options, begin)
            else:
                assert asked.prompt is not None
                tokens = encode(tokenizer, asked.prompt, "prompt", bos=asked.add_special_tokens)
            strings = [tokenizer.decode([t]) for t in tokens] if asked.return_token_strs else None
            return {
                "count": len(tokens), "max_model_len": service.context, "tokens": tokens, "token_strs": strings
            }  # fmt: skip

        return json_response(await beside_the_loop(http, answer))

    @app.post("/detokenize")
    async def detokenize(asked: DetokenizeRequest, http: Request) -> Response:
        asked.check_fields()
        service.check_model(asked.model)

        def text() -> str:
            service.check_tokens(asked.tokens, "tokens")
            return tokenizer.decode(asked.tokens)

        return json_response({"prompt": await beside_the_loop(http, text)})


def _require_key(app: FastAPI, api_key: str) -> None:
    """Every route but /health needs the key; so does one that does not exist."""
    expected = f"Bearer {api_key}".encode()

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        preflight = request.method == "OPTIONS" and "access-control-request-method" in request.headers
        if request.url.path != "/health" and not preflight and not hmac.compare_digest(given, expected):
            return error_response(ApiError(401, "the API key is missing or wrong", "invalid_api_key"))
        return await call_next(request)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def wrong_request(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"][1:]]
        if first["type"] == "json_invalid":
            return error_response(invalid(f"the body is not JSON: {first['ctx']['error']}", code="invalid_json"))
        where = ".".join(path)
        code = "missing_required_parameter" if first["type"] == "missing" and path else "invalid_value"
        return error_response(ApiError(400, f"{where or 'the body'}: {first['msg']}", code, path[0] if path else None))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400 and isinstance(error.__cause__, (RecursionError, ValueError)):  # json's, of a body
            why = "it is nested too deep" if isinstance(error.__cause__, RecursionError) else str(error.__cause__)
            return error_response(invalid(f"the body cannot be read: {why}", code="invalid_json"))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(ApiError(error.status_code, message, code))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Disconnected)
    async def gone(_: Request, error: Disconnected) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.url.path)
        return error_response(ApiError(500, f"internal error: {type(error).__name__}", "internal_error"))
