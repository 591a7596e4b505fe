"""A byte-level BPE tokenizer of any size, to go with random weights: every id has a piece, every text has ids."""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import islice, product

import tokenizers

from mk.errors import MkError
from mk.model.folder import special_pieces
from mk.model.tokenizer import byte_characters


def build_tokenizer(vocab: int) -> tokenizers.Tokenizer:
    """A tokenizer of exactly `vocab` pieces: the special ones, the 256 bytes, then merges of printable ASCII.

    Raises MkError if `vocab` has no room for the first two kinds or exceeds what merges of up to three bytes give.
    """
    special, characters = special_pieces(), byte_characters()
    base = [*special, *(characters[byte] for byte in range(256))]
    if vocab < len(base):
        raise MkError(f"vocab={vocab} is too small for a tokenizer, at least {len(base)} pieces are needed")
    merges = list(islice(_merges(characters), vocab - len(base)))
    if len(base) + len(merges) < vocab:
        raise MkError(f"vocab={vocab} is too large for a synthetic tokenizer of {len(base) + len(merges)} pieces")
    pieces = {piece: token for token, piece in enumerate([*base, *(left + right for left, right in merges)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=pieces, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(piece, special=True, normalized=False) for piece in special])
    return tokenizer


def _merges(characters: dict[int, str]) -> Iterator[tuple[str, str]]:
    """Pairs of characters, then pairs with a third; what text is made of first, so that a small vocabulary has it."""
    common = string.ascii_lowercase + " _" + string.ascii_uppercase + string.digits
    alphabet = [characters[ord(c)] for c in common + "".join(sorted(set(string.punctuation) - {"_"}))]
    yield from product(alphabet, alphabet)
    for left, middle, right in product(alphabet, repeat=3):
        yield left + middle, right
