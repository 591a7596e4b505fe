"""What an error quotes of a log."""

from __future__ import annotations

import pytest

from experiments import processes
from experiments.processes import log_end


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("one\n\n  two \n", "ends: one | two"),
        ("".join(f"{n}\n" for n in range(9)), "ends: 4 | 5 | 6 | 7 | 8"),
        ("x" * 5000 + "the end", "ends: " + "x" * (processes.CHARACTERS - 7) + "the end"),
        (b"\xff\xfe broken\n", "ends: \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} broken"),
        (b"\n" * processes.TAIL + b"last", "ends: last"),
    ],
)
def test_the_last_lines_that_say_something(text: str | bytes, said: str, tmp_path) -> None:
    log = tmp_path / "log.txt"
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert log_end(log) == f"its log {log} {said}"


def test_a_log_that_is_not_there_is_told(tmp_path) -> None:
    assert log_end(tmp_path / "none") == f"its log {tmp_path / 'none'} cannot be read: No such file or directory"
