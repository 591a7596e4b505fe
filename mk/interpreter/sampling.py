"""Executors of sampling: the waves of `mk/shortlist.py`, and the task that ends the step with each row's token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mk.errors import MkError
from mk.interpreter.numerics import Floats
from mk.interpreter.registry import Bench, Run, Task, executes
from mk.interpreter.step import Status, Step
from mk.isa import Word
from mk.sampling import NO_TOKEN, noisy_scores
from mk.shortlist import BINS, Bounds, Histogram, Row


def _row(bench: Bench, step: Step, row: int) -> Row | None:
    """A row that is drawn; None for a greedy one, and for one without a distribution."""
    vocab, params = bench.shape.geometry.vocab, step.sampling[row]
    logits = bench.memory.logits[row, :vocab]
    if params.greedy or not np.isfinite(logits).all():
        return None
    maxima = [part.max() for part in np.array_split(logits, bench.shape.n_sm) if len(part)]
    return Row.of(params, logits, np.array(maxima))


def _histogram(bench: Bench, step: Step, number: int, row: Row) -> Histogram:
    memory, parity = bench.memory, step.parity
    return Histogram(row, memory.bin_counts[parity, number], memory.bin_masses[parity, number])


@executes("histogram")
def histogram(bench: Bench, task: Task) -> Run:
    memory, vocab = bench.memory, bench.shape.geometry.vocab
    ids = slice(task.columns.start, min(task.columns.stop, vocab))
    bins = slice(BINS * task[Word.RANK] // task[Word.RANKS], BINS * (task[Word.RANK] + 1) // task[Word.RANKS])

    def run(step: Step) -> None:
        memory.bin_counts[1 - step.parity, :, bins] = 0
        memory.bin_masses[1 - step.parity, :, bins] = 0
        if task[Word.RANK] == 0:
            for tokens in memory.undecided[1 - step.parity]:
                tokens.clear()
        for number in step.active.tolist():
            row = _row(bench, step, number)
            if row is not None and row.params.cuts(vocab) and not row.listed:
                logits = memory.logits[number, ids]
                into = row.bins(logits)
                reached = into >= 0
                np.add.at(memory.bin_counts[step.parity, number], into[reached], 1)
                np.add.at(memory.bin_masses[step.parity, number], into[reached], row.masses(logits)[reached])

    return run


@executes("shortlist")
def shortlist(bench: Bench, task: Task) -> Run:
    memory, vocab, rank = bench.memory, bench.shape.geometry.vocab, task[Word.RANK]
    ids = np.arange(task.columns.start, min(task.columns.stop, vocab))

    def run(step: Step) -> None:
        for number in step.active.tolist():
            row = _row(bench, step, number)
            if row is None:
                continue
            bounds = Bounds(BINS, BINS)
            if row.params.cuts(vocab):
                bounds = _histogram(bench, step, number, row).bounds()
            logits = memory.logits[number, ids]
            bins = row.bins(logits)
            sure = bounds.sure(bins)
            memory.best_score[rank, number], memory.best_id[rank, number] = _best(logits[sure], ids[sure], step, number)
            memory.undecided[step.parity][number] += ids[bounds.undecided(bins)].tolist()

    return run


def _best(logits: Floats, ids: np.ndarray, step: Step, number: int) -> tuple[float, int]:
    """The largest score and its id, the lowest of equals; ids ascend. (-inf, NO_TOKEN) of none."""
    if not len(ids):
        return -np.inf, NO_TOKEN
    scores = noisy_scores(logits, ids, step.sampling[number], int(step.keys[number]))
    at = int(np.argmax(scores))
    return float(scores[at]), int(ids[at])


def _publishing(bench: Bench, draw: Callable[[Step, int], int]) -> Run:
    """Ends a step: feeds each active row's token back and reports it, or why there is none."""
    memory, vocab = bench.memory, bench.shape.geometry.vocab

    def run(step: Step) -> None:
        outputs = step.outputs
        outputs.logits[step.rows] = memory.logits[step.rows, :vocab]
        for row in step.active.tolist():
            finite = bool(np.isfinite(outputs.logits[row]).all())
            token = draw(step, row) if finite else NO_TOKEN
            memory.tokens[row] = token
            outputs.tokens[row] = token
            if not finite:
                outputs.status[row] |= Status.LOGITS

    return run


@executes("sample")
def sample(bench: Bench, task: Task) -> Run:
    memory, vocab = bench.memory, bench.shape.geometry.vocab

    def likeliest(step: Step, row: int) -> int:
        if not step.sampling[row].greedy:
            raise MkError(f"row {row}: the program only takes the likeliest token", hint="lower it with draws=True")
        return int(np.argmax(memory.logits[row, :vocab]))

    return _publishing(bench, likeliest)


@executes("draw")
def draw(bench: Bench, task: Task) -> Run:
    memory, vocab = bench.memory, bench.shape.geometry.vocab

    def drawn(step: Step, number: int) -> int:
        row = _row(bench, step, number)
        if row is None:
            return int(np.argmax(memory.logits[number, :vocab]))
        scores, ids = memory.best_score[:, number], memory.best_id[:, number]
        chosen = [(-float(score), int(token)) for score, token in zip(scores, ids, strict=True) if token != NO_TOKEN]
        undecided = np.array(memory.undecided[step.parity][number], np.int64)
        if len(undecided):
            kept = np.sort(_histogram(bench, step, number, row).kept(memory.logits[number, undecided], undecided))
            score, token = _best(memory.logits[number, kept], kept, step, number)
            chosen += [(-score, token)] if token != NO_TOKEN else []
        return min(chosen)[1]

    return _publishing(bench, drawn)
