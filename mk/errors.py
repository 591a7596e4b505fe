"""The one exception that means "the user's input is wrong", as opposed to a defect of this code."""

from __future__ import annotations


class MkError(Exception):
    """An input that cannot be served: one line naming it, and optionally one line saying what to do.

    `run.py` prints the message after "error: " and the hint after "hint: ", and exits with status 2.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
