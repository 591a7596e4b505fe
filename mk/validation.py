"""Checks that a type cannot say, shared by the schemas of `mk/config.py` and the command line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable
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


def require_at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        raise MkError(f"{key}={value} must be at least {least}")


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
