"""Requests made up from the server's own OpenAPI document, right ones and wrong ones: none of them breaks it.

schemathesis draws them from a fixed seed and holds every answer against the document.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server_rig import TOKENIZER, Served, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 50
WITH_BODY = ("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize")
TOKENS = ("prompt", "tokens", "stop_token_ids")
WITHOUT = (
    "GET /health",
    "GET /metrics",
    "GET /tokenizer_info",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /version",
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(pages=64) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def document(served: Served) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def test_the_document_has_every_route(document: BaseSchema) -> None:
    assert {found.ok().label for found in document.get_all_operations()} == {*WITH_BODY, *WITHOUT}


def statuses(
    document: BaseSchema, label: str, mode: GenerationMode, edit: Callable[[Any], Any] = lambda body: body
) -> Counter[int]:
    """Send an operation's examples, and check the answers; how many had each status. edit: what is sent for a body."""
    operation = next(found.ok() for found in document.get_all_operations() if found.ok().label == label)
    counted: Counter[int] = Counter()

    @seed(5)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def asked(case: schemathesis.Case) -> None:
        case.body = edit(case.body)
        answer = case.call(timeout=60)
        counted[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    asked()
    return counted


def servable(body: Any, key: str = "") -> Any:
    """The same with tokens that the model has, integers written as such, text alone, and no other model's name."""
    if isinstance(body, dict):
        edited = {name: servable(value, name) for name, value in body.items() if name != "model"}
        if key == "logit_bias":
            return {str(crc32(token.encode(errors="replace")) % TOKENIZER.vocab): edited[token] for token in edited}
        if edited.get("prompt") is not None:
            edited.pop("messages", None)  # /tokenize takes one of them
        return edited
    if isinstance(body, list):
        if key == "content":
            return [{"type": "text", "text": repr(part)} for part in body]
        return [servable(item, key) for item in body]
    if isinstance(body, float) and body.is_integer():
        body = int(body)
    return body % TOKENIZER.vocab if type(body) is int and key in TOKENS else body


@pytest.mark.parametrize("label", [*WITH_BODY, *WITHOUT])
def test_right_requests(document: BaseSchema, label: str) -> None:
    """Right by their types; a token may still be out of range, and a name unknown."""
    found = statuses(document, label, GenerationMode.POSITIVE)
    assert set(found) <= {200, 400, 404}


@pytest.mark.parametrize("label", WITH_BODY)
def test_requests_that_get_past_the_types(document: BaseSchema, label: str) -> None:
    found = statuses(document, label, GenerationMode.POSITIVE, servable)
    assert set(found) <= {200, 400} and found[200] >= EXAMPLES // 20


@pytest.mark.parametrize("label", WITH_BODY)
def test_wrong_requests(document: BaseSchema, label: str) -> None:
    found = statuses(document, label, GenerationMode.NEGATIVE)
    assert set(found) <= {400, 404}
