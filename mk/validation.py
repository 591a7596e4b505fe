"""Checks that a type cannot say, shared by the schemas of a configuration and the command line."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from mk.errors import MkError


def closest(word: str, words: Iterable[str]) -> str | None:
    """The entry of `words` that `word` is most likely a misspelling of, or None."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return found[0] if found else None


def require_one_of(key: str, value: str, allowed: Iterable[str]) -> None:
    words = list(allowed)
    if value not in words:
        near = closest(value, words)
        raise MkError(f"{key}={value} is not one of {', '.join(words)}", hint=f"{key}={near}" if near else None)


def require_some_of(key: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    """A list that names at least one of `allowed`, and nothing else."""
    if not values:
        raise MkError(f"{key} is empty", hint=f"{key}=[{allowed[0]}]")
    for value in values:
        require_one_of(key, value, allowed)


def require_once(key: str, values: Sequence[object]) -> None:
    """A list that names nothing twice."""
    for value in values:
        if values.count(value) > 1:
            raise MkError(f"{key} names {value!r} twice")


def require_at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise MkError(f"{key}={value} must be at least {least}", hint=f"{key}={least}")


def require_at_most(key: str, value: float | None, most: float) -> None:
    if value is not None and value > most:
        raise MkError(f"{key}={value} must be at most {most}", hint=f"{key}={most}")


def check_contexts(key: str, contexts: Sequence[int]) -> None:
    """Context lengths of a batch, one a row: none is negative, and one row at least is active."""
    if any(context < 0 for context in contexts):
        raise MkError(f"{key}={list(contexts)}: a context must be at least 0", hint="0 is an inactive row")
    if not any(contexts):
        raise MkError(f"{key}={list(contexts)}: every row is inactive", hint="give at least one row a context")


def check_values(key: str, config: Any) -> None:
    """Refuse, in every field of a schema and of the schemas inside it, what its type admits and nothing can use.

    Floats are finite, seeds unsigned 64-bit numbers, other integers fit the descriptors' int32 words, and a path is
    not empty, which would mean the current folder.
    """
    for field in dataclasses.fields(config):
        name = f"{key}.{field.name}" if key else field.name
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_values(name, value)
        if isinstance(value, dict):
            for entry, item in value.items():
                check_values(f"{name}.{entry}", item)
        for item in value if isinstance(value, list) else [value]:
            _check_value(name, field.name, item)


def _check_value(key: str, name: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise MkError(f"{key}={value} is not a finite number", hint=f"{key}=1.0")
    if isinstance(value, int) and name.endswith("seed"):
        if not 0 <= value < 2**64:
            raise MkError(f"{key}={value} must be an unsigned 64-bit number", hint=f"{key}=0")
    elif isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise MkError(f"{key}={value} does not fit in 32 bits", hint=f"{key}={2**31 - 1} is the most")
    if value == "" and (name == "path" or name.endswith("_dir")):
        raise MkError(f"{key} is empty", hint=f"{key}=<path>")


def check_optional(group: str, config: Any, needed: Collection[str]) -> None:
    """The fields that default to None must be set where this option needs them, and only there.

    Without the second half a key that the option ignores would pass unnoticed and stand in the results.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.default is None and (value is not None) != (field.name in needed):
            key = f"{group}.{field.name}"
            if value is None:
                raise MkError(f"{group}={config.name} needs {key}", hint=f"add {key}=...")
            raise MkError(f"{key}={value} means nothing with {group}={config.name}", hint="leave it out")
