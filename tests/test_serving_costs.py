"""What serving changes and costs: the experiment on nano, small, and a cache that it would have to notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import serving_costs
from experiments.serving_costs import Asked
from mk.batching.prefix_cache import Hit, PrefixCache
from mk.batching.request import Delivery
from mk.compose import load_config
from mk.errors import MkError
from mk.results.rows import Row, read_rows
from tests.promotion import committed, folder_of, no, repository, require_kept

__all__ = ["committed", "repository"]

SMALL = [
    "experiment=serving_costs",
    "engine=interpreter",
    "experiment.conversations=2",
    "experiment.context=60",
    "experiment.answer=70",
    "experiment.batches=[1,2]",
    "experiment.steps=2",
    "experiment.rounds=1",
    "server.context=512",
    "server.slots=2",
]


@pytest.fixture(autouse=True)
def few_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_costs, "CHOICES", 2)
    monkeypatch.setattr(serving_costs, "VOCABULARY", 5000)
    few = {name: serving_costs.OPTIONS[name] for name in ("greedy", "top_p 0.95", "logprobs 20", "min_p 0.1")}
    monkeypatch.setattr(serving_costs, "OPTIONS", few)


def run(tmp_path: Path, *overrides: str) -> tuple[int, list[Row]]:
    status = serving_costs.main(load_config([*SMALL, f"run_dir={tmp_path}", *overrides]))
    (folder,) = tmp_path.iterdir()
    return status, read_rows(folder / "rows.jsonl")


def test_a_row_for_the_cache_and_one_for_every_option_and_batch(committed: Path, tmp_path: Path) -> None:
    status, (cache, *options) = run(tmp_path / "runs")
    names = ("positions", "logprob_shift", "logprob_shift_most", "wall_ms", "choice_us", "steps")
    require_kept(committed, folder_of(tmp_path / "runs"), **dict.fromkeys(names, lambda value: value + 1), checks=no)
    assert status == 0 and cache.checks == {"generated_blocks_hit": True}
    assert cache.positions and 0 < cache.positions <= 140
    # not the same bits, or the cold turn was not cold; and float32's rounding, or a page was mistaken
    assert cache.logprob_shift_most and 0 < cache.logprob_shift_most < 1e-3
    assert [(row.sampling, row.batch) for row in options] == [
        (name, batch) for name in serving_costs.OPTIONS for batch in (1, 2)
    ]
    for row in options:
        assert row.wall_ms and row.steps == 2 and row.checks == {"all_tokens_came": True}
        on_host = row.sampling in ("logprobs 20", "min_p 0.1")
        assert (row.choice_us is not None) == on_host


def test_a_cache_that_misses_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "match", lambda self, hashes: Hit())
    status, (cache, *_) = run(tmp_path, "experiment.batches=[1]")
    assert status == 1 and cache.checks == {"generated_blocks_hit": False}


def test_an_option_whose_tokens_do_not_come_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Asked._take

    def forgetful(self: Asked, delivery: Delivery) -> None:
        take(self, delivery)
        if self.request.id == "row 0":
            del self.sampled[1:]

    monkeypatch.setattr(Asked, "_take", forgetful)
    status, (cache, *options) = run(tmp_path, "experiment.batches=[1]")
    assert status == 1 and cache.checks == {"generated_blocks_hit": True}
    assert all(row.checks == {"all_tokens_came": False} for row in options)


def test_what_it_cannot_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MkError, match="nothing to compare"):
        run(tmp_path / "a", "engine.prefix_cache.generated=false")
    with pytest.raises(MkError, match="a batch of 3 needs as many server.slots"):
        run(tmp_path / "b", "experiment.batches=[3]")
