"""The text of a grid's context: haystack, needles of one kind at every depth, and where each length is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.encoded import Encoded, encode
from kveval.samples.haystack import Haystack
from kveval.samples.laying import JOINT_TOKENS, Wanted, lay, needle_tokens
from kveval.samples.layout import CLEAR_TOKENS, Grid, targets
from kveval.samples.needles import ANSWER_TOKENS, draw, needle_text, question_text
from kveval.samples.tokenised import tokenised


@dataclass(frozen=True)
class Planted:
    """Text with needles. ``spans``: first and end character of each of ``pairs``; ``cuts``: length -> characters."""

    encoded: Encoded
    pairs: list[tuple[str, str]]
    spans: list[tuple[int, int]]
    cuts: dict[int, int]
    haystack_chars: int


def plant(
    tokenizer: Any, grid: Grid, haystack: Haystack, *, seed: int, context: int, prefix_tokens: int, reserve_tokens: int
) -> Planted:
    """The text of context number ``context``, as long as the longest length allows.

    A length loses the room of its longest question, of the answer, of ``prefix_tokens`` (BOS) and ``reserve_tokens``.
    Raises KvevalError when the needles or the questions do not fit.
    """
    hay, boundaries = tokenised(tokenizer, haystack.pieces(seed, context), grid.lengths[-1])
    pairs = draw(seed, context, grid.most_needles, hay.text)
    sizes = needle_tokens(tokenizer, [needle_text(*pair) for pair in pairs])
    question_tokens = max(len(text) for text in encode(tokenizer, [question_text(key) for key, _ in pairs]))
    overhead = question_tokens + ANSWER_TOKENS + JOINT_TOKENS + prefix_tokens + reserve_tokens
    _refuse_short(grid, overhead, max(sizes))
    rooms = {length: length - overhead for length in grid.lengths}
    wanted = targets(grid, rooms, float(np.mean(sizes)))
    pairs = pairs[: len(wanted)]
    needles = [
        Wanted(target, needle_text(*pair), size) for target, pair, size in zip(wanted, pairs, sizes, strict=False)
    ]
    laid = lay(tokenizer, hay, boundaries, needles, rooms, crowded=grid.crowded)
    return Planted(laid.encoded, pairs, laid.spans, laid.cuts, laid.haystack_chars)


def _refuse_short(grid: Grid, overhead: int, needle_tokens: int) -> None:
    shortest = overhead + CLEAR_TOKENS + 2 * needle_tokens
    if grid.lengths[0] < shortest:
        raise KvevalError(
            f"length {grid.lengths[0]:,} is too short: a question and room for its answer take {overhead} tokens and a "
            f"needle {needle_tokens}; give lengths of {shortest:,} tokens or more"
        )
