"""Which leaves of the configuration code reads: every schema's attributes, watched while experiments run.

Composing, checking, copying, hashing and printing a configuration touch every leaf and use none, so what those read is
not counted. A leaf is named by the class that declares it: `RingConfig.window_kb`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from experiments import settings
from mk.config import Config

# code that goes through all leaves alike: by the end of its file's name; generated methods have "<string>"
PLUMBING = ("dataclasses.py", "<string>", "copy.py", "mk/validation.py", "mk/compose.py")
COPYING = ("__post_init__", "job_of")  # functions that do
PACKAGES = ("/omegaconf/", "/hydra/")


def schemas() -> list[type]:
    """Every dataclass of a configuration: the groups', those nested in them, and the experiments' settings."""
    found: list[type] = []
    waiting: list[Any] = [Config, *(of for of in vars(settings).values() if isinstance(of, type))]
    while waiting:
        of = waiting.pop()
        if not dataclasses.is_dataclass(of) or of in found:
            continue
        assert isinstance(of, type)
        found.append(of)
        for hint in typing.get_type_hints(of).values():
            waiting += [hint, *typing.get_args(hint)]
    return found


def leaves_of(settings: Any) -> set[str]:
    """Of an experiment's own part of a configuration."""
    found = set()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            found |= leaves_of(value)
        elif field.name != "name":
            found.add(owner(type(settings), field.name))
    return found


def owner(schema: type, leaf: str) -> str:
    """`Class.leaf`, of the class that declares it."""
    declaring = [of for of in schema.__mro__ if leaf in vars(of).get("__annotations__", {})]
    return f"{declaring[-1].__name__}.{leaf}"


def all_leaves() -> set[str]:
    """But for an option's own name, and for what holds further leaves."""
    found = set()
    for schema in schemas():
        for leaf, hint in typing.get_type_hints(schema).items():
            nested = any(dataclasses.is_dataclass(of) for of in (hint, *typing.get_args(hint)))
            if leaf not in ("name", "experiment") and not nested:
                found.add(owner(schema, leaf))
    return found


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """The leaves that were read so far, in this process."""
    read: set[str] = set()
    classes = schemas()
    leaves = all_leaves()
    named = {of: {field.name: owner(of, field.name) for field in dataclasses.fields(of)} for of in classes}
    fields = {of: {name: leaf for name, leaf in own.items() if leaf in leaves} for of, own in named.items()}

    def look(self: Any, name: str) -> Any:
        leaf = fields[type(self)].get(name)
        if leaf is not None and leaf not in read and not _plumbing(sys._getframe(1)):
            read.add(leaf)
        return object.__getattribute__(self, name)

    for of in classes:
        of.__getattribute__ = look  # type: ignore[method-assign,assignment]
    try:
        yield read
    finally:
        for of in classes:
            del of.__getattribute__


def _plumbing(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    generic = file.endswith(PLUMBING) or any(package in file for package in PACKAGES)
    return generic or frame.f_code.co_name in COPYING
