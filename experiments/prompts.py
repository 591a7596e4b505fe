"""Prompts as tokens: the configured text, or real Python cut to the lengths that a batch asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mk.errors import MkError
from mk.model.opening import NANO
from mk.model.tokenizer import Tokenizer

SAMPLE = NANO / "held_out_sample.txt"  # Python that the nano checkpoint was not trained on


def text_prompts(tokenizer: Tokenizer, texts: Sequence[str], rows: int) -> list[list[int]]:
    """One prompt a row; a single text goes into every row. Raises MkError for another number, or an empty one."""
    if len(texts) not in (1, rows):
        raise MkError(
            f"experiment.prompts has {len(texts)} entries for batch.size={rows}",
            hint="give one a row, or a single one for all rows",
        )
    for row, text in enumerate(texts):
        if not text:
            raise MkError(f"experiment.prompt: prompt {row} is empty", hint="'experiment.prompt=\"def main():\"'")
    encoded = [tokenizer.encode(text, bos=True) for text in texts]
    return encoded * rows if len(encoded) == 1 else encoded


def sample_prompts(tokenizer: Tokenizer, contexts: Sequence[int], path: Path = SAMPLE) -> list[list[int]]:
    """A prompt of exactly `contexts[i]` tokens a row, none where that is 0: stretches of one text, begun line by line.

    Rows start at different places; a row longer than the text goes round it again.
    """
    lines = path.read_text().splitlines(keepends=True)
    prompts = []
    for row, context in enumerate(contexts):
        first = row * len(lines) // len(contexts)
        text = "".join(lines[first:] + lines[:first])
        tokens = tokenizer.encode(text, bos=True)
        if len(tokens) < context:
            again = tokenizer.encode(text)
            tokens += again * -(-(context - len(tokens)) // len(again))
        prompts.append(tokens[:context])
    return prompts
