"""The README against the repository: its tables and lists are of rows of results/, its paths exist, its command lines
compose."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mk.compose import expand_sweep, load_config
from mk.launched import check, split
from mk.results.rows import read_rows
from mk.results.verify import verify
from run import parse

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python run\.py ([^#\n]+)", TEXT, flags=re.MULTILINE)


def test_the_figures_are_those_of_the_rows_and_the_rows_those_of_their_raw_data() -> None:
    problems, _ = verify(ROOT / "results", ROOT / "README.md")
    assert not problems


def test_the_rows_of_the_cpu_table_are_one_clean_run_that_agreed_with_transformers() -> None:
    rows = read_rows(ROOT / "results" / "cpu" / "quickstart.jsonl")
    assert {row.commit for row in rows} == {rows[0].commit} and "dirty" not in rows[0].commit
    assert all(row.checks["equal_to_transformers"] and row.checks["schedule_verified"] for row in rows)
    assert rows[0].env["device"] in TEXT and rows[0].env["torch"].split("+")[0] in TEXT


def test_what_serving_costs_is_the_rows() -> None:
    cache, *options = read_rows(ROOT / "results" / "cpu" / "serving_costs.jsonl")
    assert f"over {cache.positions} tokens" in TEXT and cache.checks == {"generated_blocks_hit": True}
    assert f"{cache.logprob_shift:.1e} on average and {cache.logprob_shift_most:.1e} at most" in TEXT
    told = {
        "logit_bias": "logit_bias {} us",
        "penalties": "penalties {}",
        "min_p 0.1": "min-p {}",
        "logprobs 0": "logprobs {},",
        "logprobs 20": "alternatives {};",
        "top_p 0.95, penalties, logprobs 20": "tokens, {}.",
    }
    found = {row.sampling: row.choice_us for row in options if row.choice_us is not None}
    assert set(found) == set(told)
    for option, text in told.items():
        assert text.format(f"{found[option]:,.0f}") in TEXT, option
    times = [row.wall_ms or 0 for row in options]
    assert f"({min(times):.0f} to\n  {max(times):.0f} ms, batch 1 and 8)" in TEXT
    assert {row.commit for row in (cache, *options)} == {cache.commit} and "dirty" not in cache.commit


def test_the_map_names_what_is_there() -> None:
    table = TEXT[TEXT.index("## How it fits together") : TEXT.index("## Choosing a plan")]
    places = re.findall(r"`([\w/]+(?:/|\.py))`", table)
    assert len(places) > 20
    for place in places:
        assert (ROOT / place).exists(), place
    packages = {path.parent.name for path in (ROOT / "mk").glob("*/*.py")} - {"csrc"}
    assert all(f"`mk/{package}/`" in table for package in packages)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_compose(command: str) -> None:
    args = parse(shlex.split(command))
    overrides, of_hydra = split(args.overrides)
    if of_hydra:
        check(overrides, of_hydra, args.multirun)
    for job in expand_sweep(overrides):
        load_config(job)
