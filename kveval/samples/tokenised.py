"""An endless text tokenised once, as far as it is needed, with the places where a sentence ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.encoded import Encoded, Ints, encode, join
from kveval.samples.layout import SENTENCE_TOKENS

_BLOCK_CHARS = 16_384  # blocks are tokenised together, on all cores
_ROUND_CHARS = 512  # read at least, each time
_SPACE = re.compile(r"\s")


def tokenised(
    tokenizer: Any, source: Iterator[str], tokens: int, sentence_tokens: int = SENTENCE_TOKENS
) -> tuple[Encoded, Ints]:
    """At least ``tokens`` tokens of the endless ``source``, tokenised once; and the characters at which sentences end.

    Sentences of over ``sentence_tokens`` tokens have ends about every so many tokens, between words where there are any.
    Raises KvevalError when the tokenizer makes no tokens.
    """
    pieces = [next(source).lstrip()]
    blocks: list[Encoded] = []
    done, have = 0, 0
    chars = max(tokens / 4, _ROUND_CHARS)  # the first round is short, and tells how many characters a token takes
    while have < tokens:
        wanted = int(chars) + 1
        while wanted > 0:
            pieces.append(next(source))
            wanted -= len(pieces[-1])
        blocks += encode(tokenizer, _blocks(pieces[done:]))
        done, have = len(pieces), sum(len(block) for block in blocks)
        if have == 0:
            raise KvevalError("the tokenizer makes no tokens of text: give a model directory with a whole tokenizer")
        chars = 1.01 * (tokens - have) * sum(len(block.text) for block in blocks) / have + _ROUND_CHARS
    hay = join(tokenizer, blocks)
    return hay, _break_long(hay, np.cumsum([len(piece) for piece in pieces], dtype=np.int32), sentence_tokens)


def _break_long(hay: Encoded, boundaries: Ints, most: int) -> Ints:
    """The boundaries, and one about every ``most`` tokens of a longer sentence: between words where there are any."""
    before = np.searchsorted(hay.ends, boundaries, side="right")
    added = []
    for number in np.flatnonzero(np.diff(before, prepend=0) > most):
        first, end = int(before[number - 1]) if number else 0, int(before[number])
        for token in range(first + most, end, most):
            char = int(hay.ends[token - 1])
            space = _SPACE.search(hay.text, char, int(hay.ends[min(token + most, end) - 1]))
            added.append(space.start() if space else char)
    return np.unique(np.concatenate([boundaries, np.asarray(added, dtype=np.int32)]))


def _blocks(pieces: list[str]) -> list[str]:
    """The pieces in blocks of about 16,384 characters, none of them so short that its two joints would meet."""
    blocks: list[list[str]] = [[]]
    chars = 0
    for piece in pieces:
        if chars >= _BLOCK_CHARS:
            blocks.append([])
            chars = 0
        blocks[-1].append(piece)
        chars += len(piece)
    if len(blocks) > 1 and chars < _ROUND_CHARS:
        short = blocks.pop()
        blocks[-1] += short
    return ["".join(block) for block in blocks]
