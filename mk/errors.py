"""The one exception that means "the user's input is wrong", as opposed to a defect of this code."""

from __future__ import annotations

import sys
import tempfile
import traceback


class MkError(Exception):
    """An input that cannot be served: one line naming it, and optionally one line saying what to do.

    `tell` prints the message after "error: " and the hint after "hint: ", and the exit status is 2.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def tell(error: Exception, trace: bool) -> int:
    """Print an error as a line and a hint; returns its exit status: 2 for a wrong input, 1 for a defect."""
    if trace:
        traceback.print_exception(error)
    if isinstance(error, MkError):
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return 2
    if not trace:
        with tempfile.NamedTemporaryFile("w", prefix="mk-traceback-", suffix=".txt", delete=False) as file:
            traceback.print_exception(error, file=file)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: {text}\nhint: the traceback is in {file.name}; MK_TRACEBACK=1 prints it", file=sys.stderr)
    return 1
