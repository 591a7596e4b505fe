"""Text to token ids and back, with everything about tokens read from a model's folder."""

from __future__ import annotations

import codecs
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from mk.errors import MkError

# What the tokens that structure a conversation are called here, and how vocabularies spell them; the first that exists.
MARKERS: dict[str, tuple[str, ...]] = {
    "bos": ("<BOS_TOKEN>",),
    "start_turn": ("<|START_OF_TURN_TOKEN|>",),
    "end_turn": ("<|END_OF_TURN_TOKEN|>",),
    "system": ("<|SYSTEM_TOKEN|>",),
    "user": ("<|USER_TOKEN|>",),
    "chatbot": ("<|CHATBOT_TOKEN|>",),
    "start_thinking": ("<|START_THINKING|>",),
    "end_thinking": ("<|END_THINKING|>",),
    "start_text": ("<|START_TEXT|>", "<|START_RESPONSE|>"),
    "end_text": ("<|END_TEXT|>", "<|END_RESPONSE|>"),
    "start_action": ("<|START_ACTION|>",),
    "end_action": ("<|END_ACTION|>",),
    "start_tool_result": ("<|START_TOOL_RESULT|>",),
    "end_tool_result": ("<|END_TOOL_RESULT|>",),
}


class Tokenizer:
    """A byte-level tokenizer: a token is a string of bytes, and text is what the bytes of its tokens spell."""

    def __init__(self, folder: Path) -> None:
        """Read tokenizer.json, config.json, generation_config.json and chat_template.jinja. Raises MkError."""
        self.folder = folder
        self.backend = _load_backend(folder / "tokenizer.json")
        config = _read_json(folder / "config.json", required=True)
        self.generation = _read_json(folder / "generation_config.json")
        self.vocab: int = config.get("vocab_size", 0)  # rows of the embedding; the last may have no piece
        if self.backend.get_vocab_size() > self.vocab:
            raise MkError(f"{folder}: tokenizer.json has more pieces than vocab_size={self.vocab} of config.json")
        self.eos = _token_ids("eos_token_id", self.generation, config, folder)
        self.bos = _token_ids("bos_token_id", self.generation, config, folder)[0]
        added = self.backend.get_added_tokens_decoder()
        self.special = frozenset(token for token, piece in added.items() if piece.special)
        self._literal = {token: piece.content for token, piece in added.items()}
        self.markers: dict[str, int] = {}
        for name, spellings in MARKERS.items():
            ids = [token for s in spellings if (token := self.backend.token_to_id(s)) is not None]
            if ids:
                self.markers[name] = ids[0]

    def marker(self, name: str) -> int:
        """Token id of a marker by its name in MARKERS. Raises MkError if this vocabulary has none."""
        if name not in self.markers:
            raise MkError(f"{self.folder / 'tokenizer.json'}: has no {MARKERS[name][0]} token")
        return self.markers[name]

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Token ids of a text; markers spelled out in it become their tokens."""
        return [self.bos] * bos + self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Iterable[int], skip_special: bool = False) -> str:
        """The text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(t) for t in tokens if not (skip_special and t in self.special))
        return data.decode("utf-8", errors="replace")

    def stream(self, skip_special: bool = True) -> TextStream:
        return TextStream(self, skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for an embedding row without a piece."""
        literal = self._literal.get(token)
        if literal is not None:
            return literal.encode()
        piece = self.backend.id_to_token(token)
        return b"" if piece is None else bytes(_BYTE_OF_CHARACTER[c] for c in piece)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """A conversation as prompt text by the folder's chat template; `options`: variables of it, none `reserved`.

        Raises MkError without a template, or when the template refuses the messages.
        """
        import jinja2

        if self._renderer.chat_template is None:
            raise MkError(f"{self.folder}: has no chat template", hint="chat_template.jinja belongs beside config.json")
        try:
            return self._renderer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
            )
        # ValueError: no messages at all; RecursionError: a template that descends further than Python does
        except (jinja2.TemplateError, ValueError, RecursionError) as error:
            raise MkError(f"the chat template refuses these messages: {error}") from error

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Names of variables that a request may not set: the renderer's own parameters, a template among them, and
        what is set here."""
        parameters = inspect.signature(type(self._renderer).apply_chat_template).parameters.values()
        own = (each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
        return frozenset(("messages", *own, *self._renderer.special_tokens_map))

    @cached_property
    def _renderer(self) -> Any:
        """transformers' tokenizer, for its template environment; imported late because it is slow to import."""
        from transformers import PreTrainedTokenizerFast

        path = self.folder / "chat_template.jinja"
        template = path.read_text() if path.exists() else None  # tokenizer_config.json may carry a stale one
        bos, eos = (self.backend.id_to_token(token) for token in (self.bos, self.eos[0]))
        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend, bos_token=bos, eos_token=eos, chat_template=template
        )


class TextStream:
    """Text of a growing sequence: holds bytes back until a whole code point is there, so no half character is sent."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token: int) -> str:
        """The text that one more token completes, possibly empty."""
        if self._skip_special and token in self._tokenizer.special:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left of an unfinished character: U+FFFD or nothing. All steps and this equal `decode`."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model's folder. Raises MkError naming the file that is missing or wrong."""
    return Tokenizer(Path(folder))


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.exists():
        raise MkError(f"{path}: no such file", hint="the tokenizer belongs beside config.json in the model's folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise MkError(f"{path}: not a tokenizer ({error})") from error
    if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
        raise MkError(f"{path}: decoder {backend.decoder} is not supported, only ByteLevel")
    return backend


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not required and not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise MkError(f"{path}: cannot be read as a JSON object ({error})") from error


def _token_ids(field: str, generation: dict[str, Any], config: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """One or more token ids from generation_config.json or, where that has none, config.json."""
    value = generation.get(field)
    value = config.get(field) if value is None else value
    ids = value if isinstance(value, list) else [value]
    if not ids or not all(isinstance(i, int) and 0 <= i < config["vocab_size"] for i in ids):
        raise MkError(f"{folder}: {field}={value!r} is not one or more ids below vocab_size={config['vocab_size']}")
    return tuple(ids)


def byte_characters() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Latin-1's printable bytes stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = {character: byte for byte, character in byte_characters().items()}
