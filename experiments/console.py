"""What an experiment shows while it works: a bar on a terminal, nothing in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that vanishes when done; the function it gives is told how many of `total` are done."""
    console = Console(stderr=True)
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
