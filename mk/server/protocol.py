"""What requests may hold. Types are strict: a number in quotes is an error, as it is at OpenAI.

A field that is neither declared nor listed here is ignored, with a line in the log: clients send many. One that asks
for something that is not done here is refused, so that nobody takes silence for an effect.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mk.server.errors import ApiError

log = logging.getLogger("mk.server")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[int, Field(strict=True, ge=0)]
MAX_STOPS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20

# Accepted without effect: bookkeeping of the caller's, or advice to a provider that has more than one machine.
WITHOUT_EFFECT = {"store", "metadata", "user", "service_tier", "prompt_cache_key", "safety_identifier"}

# Known to OpenAI or vLLM, and not done here. The value that asks for nothing is accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "chat_template": (None,),
    "continue_final_message": (False,),
    "documents": (None,),
    "function_call": (None,),
    "functions": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (None,),
    "suffix": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (False,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


class Lenient(BaseModel):
    """An object of which more than the declared fields may be sent."""

    model_config = ConfigDict(extra="allow")


class StreamOptions(Lenient):
    include_usage: StrictBool = False


class Message(Lenient):
    """One turn. content: text, or parts of type text (and, the assistant's, thinking)."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    thinking: StrictStr | None = None


class Function(Lenient):
    name: Annotated[str, Field(strict=True, min_length=1)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class Tool(Lenient):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Lenient):
    name: StrictStr


class NamedTool(Lenient):
    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Lenient):
    name: StrictStr | None = None
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")


class ResponseFormat(Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(Lenient):
    """What both endpoints take. null stands for "not given" everywhere."""

    model: StrictStr | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    stop: StrictStr | Annotated[list[StrictStr], Field(max_length=MAX_STOPS)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=10)] | None = None  # a float32 divided by it stays one
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: StrictBool | None = None
    return_token_ids: StrictBool | None = None  # vLLM's: the ids of prompt and answer beside the text
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    def stops(self) -> list[str]:
        """Stop strings; an empty one stops nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    def check_fields(self) -> None:
        """Raises ApiError for a field that asks for what is not done here; logs one that nobody knows."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED:
                if value not in _UNSUPPORTED[name]:
                    raise ApiError(400, f"{name} is not supported here", "unsupported_parameter", name)
            elif name not in WITHOUT_EFFECT:
                log.warning("ignoring the unknown request field %r", name)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "invalid_value", "stream_options")
        if self.return_token_ids and self.stream:
            name = "return_token_ids"
            raise ApiError(400, f"{name} is not supported here with stream=true", "unsupported_parameter", name)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: Annotated[int, Field(strict=True, ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. prompt: text or token ids, or several of either."""

    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    echo: StrictBool | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(Lenient):
    """POST /tokenize: a text, or a conversation as its prompt."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    return_token_strs: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Lenient):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[TokenId]
