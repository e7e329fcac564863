"""The text of a context: haystack, needles planted in it, and where each length is cut."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.encoded import Encoded, Ints, cut, encode, insert, join
from kveval.samples.haystack import Haystack
from kveval.samples.layout import CLEAR_TOKENS, SENTENCE_TOKENS, Grid, place, targets
from kveval.samples.needles import ANSWER_TOKENS, draw, needle_text, question_text

_JOINT_TOKENS = 2  # a question may take so many tokens more after a context than on its own
_BLOCK_CHARS = 16_384  # blocks are tokenised together, on all cores
_ROUND_CHARS = 512  # read at least, each time
# What a needle adds to the tokens of the text around it, tried in this order. Tokenizers that split text at white space
# gain a token for 30 needles; those that merge across line breaks more.
_SPARE_TOKENS = (0.1, 0.5, 2.0)
_SPACE = re.compile(r"\s")
_UNUSED_SHARE = 0.02  # of a length, at most


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
    hay, boundaries = _hay(tokenizer, haystack, seed, context, grid.lengths[-1])
    pairs = draw(seed, context, grid.most_needles, hay.text)
    sizes, question_tokens = _sizes(tokenizer, pairs)
    overhead = question_tokens + ANSWER_TOKENS + _JOINT_TOKENS + prefix_tokens + reserve_tokens
    _refuse_short(grid, overhead, max(sizes))
    rooms = {length: length - overhead for length in grid.lengths}
    wanted = targets(grid, rooms, float(np.mean(sizes)))
    pairs, sizes = pairs[: len(wanted)], sizes[: len(wanted)]
    before = np.searchsorted(hay.ends, boundaries, side="right").astype(np.int32)

    enough = int(np.searchsorted(before, rooms[grid.lengths[-1]] - sum(sizes) + 2 * CLEAR_TOKENS))
    hay = hay.part(0, int(boundaries[min(enough, len(boundaries) - 1)]))
    for spare in _SPARE_TOKENS:
        places = place(grid, wanted, before, sizes, spare)
        inserts = [(int(boundaries[at]), needle_text(*pair)) for at, pair in zip(places, pairs, strict=True)]
        whole, spans = insert(tokenizer, hay, inserts), _spans(inserts)
        if all(whole.tokens_until(end + 1) <= target.limit for (_, end), target in zip(spans, wanted, strict=True)):
            break
    else:
        raise grid.crowded(grid.lengths[0])
    ends = _sentence_ends(boundaries[boundaries <= len(hay.text)], inserts, spans)
    cuts = {length: _cut(whole, ends, spans, room, length) for length, room in rooms.items()}
    whole = cut(tokenizer, whole, cuts[grid.lengths[-1]])
    return Planted(whole, pairs, spans, cuts, len(hay.text))


def _hay(tokenizer: Any, haystack: Haystack, seed: int, context: int, tokens: int) -> tuple[Encoded, Ints]:
    """At least ``tokens`` tokens of haystack, tokenised once; and the characters at which its sentences end."""
    source = haystack.pieces(seed, context)
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
    return hay, _break_long(hay, np.cumsum([len(piece) for piece in pieces], dtype=np.int32))


def _break_long(hay: Encoded, boundaries: Ints) -> Ints:
    """The boundaries, and one about every 32 tokens of a longer sentence: between words where there are any."""
    before = np.searchsorted(hay.ends, boundaries, side="right")
    added = []
    for number in np.flatnonzero(np.diff(before, prepend=0) > SENTENCE_TOKENS):
        first, end = int(before[number - 1]) if number else 0, int(before[number])
        for token in range(first + SENTENCE_TOKENS, end, SENTENCE_TOKENS):
            char = int(hay.ends[token - 1])
            space = _SPACE.search(hay.text, char, int(hay.ends[min(token + SENTENCE_TOKENS, end) - 1]))
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


def _sizes(tokenizer: Any, pairs: list[tuple[str, str]]) -> tuple[list[int], int]:
    """Tokens of each needle within a text, and of the longest question."""
    stem = "The end."
    planted = encode(tokenizer, [stem, *(stem + needle_text(*pair) for pair in pairs)])
    asked = encode(tokenizer, [question_text(key) for key, _ in pairs])
    return [len(text) - len(planted[0]) for text in planted[1:]], max(len(text) for text in asked)


def _refuse_short(grid: Grid, overhead: int, needle_tokens: int) -> None:
    shortest = overhead + CLEAR_TOKENS + 2 * needle_tokens
    if grid.lengths[0] < shortest:
        raise KvevalError(
            f"length {grid.lengths[0]:,} is too short: a question and room for its answer take {overhead} tokens and a "
            f"needle {needle_tokens}; give lengths of {shortest:,} tokens or more"
        )


def _spans(inserts: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """Characters from the first letter of each needle to the last digit of its value, in the text with needles.

    The full stop is left out: some tokenizers make one token of it and the line break of the haystack behind it.
    """
    spans, shift = [], 0
    for char, words in inserts:
        spans.append((char + shift + 1, char + shift + len(words) - 1))
        shift += len(words)
    return spans


def _sentence_ends(boundaries: Ints, inserts: list[tuple[int, str]], spans: list[tuple[int, int]]) -> Ints:
    """Characters at which a sentence or a needle ends (full stop included), in the text with needles, rising."""
    chars = np.asarray([char for char, _ in inserts])
    shifts = np.concatenate([[0], np.cumsum([len(words) for _, words in inserts])])
    moved = boundaries + shifts[np.searchsorted(chars, boundaries, side="left")]
    return np.unique(np.concatenate([moved, [end + 1 for _, end in spans]]).astype(np.int32))


def _cut(whole: Encoded, ends: Ints, spans: list[tuple[int, int]], room: int, length: int) -> int:
    """Characters of the whole sentences that fit into ``room`` tokens; of whole words where that wastes > 2 %."""
    at = int(np.searchsorted(np.searchsorted(whole.ends, ends, side="right"), room, side="right")) - 1
    best = int(ends[at]) if at >= 0 else 0
    if room - whole.tokens_until(best) <= _UNUSED_SHARE * length - _JOINT_TOKENS:
        return best
    for token in range(room, whole.tokens_until(best), -1):
        char = int(whole.ends[token - 1])
        between = whole.text[char - 1 : char + 1]
        inside = any(start <= char <= end for start, end in spans)
        if len(between) == 2 and between[1].isspace() and not between[0].isspace() and not inside:
            return char
    return best
