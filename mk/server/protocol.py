"""What requests may hold. Types are strict: a number in quotes is an error, as it is at OpenAI.

A field that is neither declared nor listed here is ignored, with a line in the log: clients send many. One that asks
for something that is not done here is refused, so that nobody takes silence for an effect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator
from pydantic_core import PydanticCustomError

from mk.server.errors import ApiError

log = logging.getLogger("mk.server")

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenId = Annotated[int, Field(strict=True, ge=0)]
MAX_STOPS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_DEPTH = 100  # of lists and objects in each other: less than grammars (128), pydantic (255) and Python (1000) take

# Accepted without effect: bookkeeping of the caller's, or advice to a provider that has more than one machine.
WITHOUT_EFFECT = {"store", "metadata", "user", "service_tier", "prompt_cache_key", "safety_identifier"}

# Known to OpenAI or vLLM, and not done here, with the values beside null that ask for nothing and are accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "function_call": (),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "priority": (0,),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "request_id": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# The other endpoint's.
_OF_COMPLETIONS: dict[str, tuple[Any, ...]] = {"echo": (False,), "prompt": ()}
_OF_CHAT: dict[str, tuple[Any, ...]] = {
    "chat_template_kwargs": ({},),
    "max_completion_tokens": (),
    "messages": (),
    "parallel_tool_calls": (True,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "thinking_token_budget": (),
    "tool_choice": ("auto", "none"),
    "tools": ([],),
    "top_logprobs": (0,),
}


def too_deep(value: Any) -> bool:
    """Whether more than MAX_DEPTH lists and objects of a JSON value lie in each other."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, list | dict)]
    return bool(level)


class Lenient(BaseModel):
    """An object of which more than the declared fields may be sent."""

    model_config = ConfigDict(extra="allow")


class KnownFields(Lenient):
    """A request. unsupported: fields that are refused, with the values that are not."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = _UNSUPPORTED

    @field_validator("*", mode="before")
    @classmethod
    def _check_depth(cls, value: Any) -> Any:
        if too_deep(value):
            raise PydanticCustomError("too_deep", "nested deeper than {levels} levels", {"levels": MAX_DEPTH})
        return value

    def check_fields(self) -> None:
        """Raises ApiError for a field that asks for what is not done here; logs one that nobody knows."""
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported:
                if value is not None and value not in self.unsupported[name]:
                    raise unsupported(name)
            elif name not in WITHOUT_EFFECT:
                log.warning("ignoring the unknown request field %r", name)


def unsupported(name: str, where: str = "here") -> ApiError:
    return ApiError(400, f"{name} is not supported {where}", "unsupported_parameter", name)


class StreamOptions(Lenient):
    """continuous_usage_stats, vLLM's: with include_usage, every delivery of tokens is a chunk with the usage of its
    choice so far, whether there is text in it or not."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


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


class GenerationRequest(KnownFields):
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

    @property
    def usage_at_end(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        return self.usage_at_end and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def stops(self) -> list[str]:
        """Stop strings; an empty one stops nothing."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]

    def check_fields(self) -> None:
        """And for fields that do not go together."""
        super().check_fields()
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true", "invalid_value", "stream_options")
        if self.return_token_ids and self.stream:
            raise unsupported("return_token_ids", "with stream=true")


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unsupported = _UNSUPPORTED | _OF_COMPLETIONS
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

    unsupported = _UNSUPPORTED | _OF_CHAT
    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    echo: StrictBool | None = None
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(KnownFields):
    """POST /tokenize: a text, or a conversation as its prompt."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    return_token_strs: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def check_fields(self) -> None:
        """And for a field of the form that is not asked for, prompt or messages."""
        super().check_fields()
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", "invalid_value", "prompt")
        if self.messages is not None and self.add_special_tokens and "add_special_tokens" in self.model_fields_set:
            raise unsupported("add_special_tokens", "with messages: their template writes them")
        for name in ("tools", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, name):
                raise unsupported(name, "with a prompt: it has no template")


class DetokenizeRequest(KnownFields):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: list[TokenId]
