"""Whether greedy answers are the reference's, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evals.samples import Sample
from mk.errors import MkError
from mk.model.greedy_oracle import GreedyOracle
from mk.model.opening import Model


def count_equal(
    model: Model, samples: Sequence[Sample], progress: Callable[[int], None] = lambda done: None
) -> tuple[str, int]:
    """(whose decode is the reference, how many samples equal it); prints where the others leave it.

    Raises MkError for a sample without token ids.
    """
    oracle = GreedyOracle(model)
    equal = 0
    for index, sample in enumerate(samples):
        found = sample.completion
        if found.prompt_ids is None or found.token_ids is None:
            raise MkError(f"the server gave no token ids for {sample.problem}", hint="experiment.check=false")
        # the oracle decodes as many tokens as there are
        apart = oracle.compare(index, found.prompt_ids, found.token_ids, model.tokenizer.eos)
        equal += not apart
        for first in apart[:1]:
            print(
                f"{sample.problem}: token {first.index} is {first.got}, {oracle.name}'s {first.expected}, "
                f"whose margin is {first.margin:.2e}"
            )
        progress(index + 1)
    return oracle.name, equal
