"""Needles laid into a tokenised haystack, and where each of the nested lengths is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.encoded import Encoded, Ints, cut, encode, insert
from kveval.samples.layout import CLEAR_TOKENS, Target, place

JOINT_TOKENS = 2  # a question may take so many tokens more after a context than on its own
# What a needle adds to the tokens of the text around it, tried in this order. Tokenizers that split text at white space
# gain a token for 30 needles; those that merge across line breaks more.
_SPARE_TOKENS = (0.1, 0.5, 2.0)
UNUSED_SHARE = 0.02  # of a length, at most


@dataclass(frozen=True)
class Wanted:
    """A needle, where it is wanted. ``words`` begin with a space, end with a full stop and take ``tokens`` tokens."""

    target: Target
    words: str
    tokens: int


@dataclass(frozen=True, eq=False)
class Laid:
    """Text with needles. ``spans``: first and end character of each needle; ``cuts``: length -> characters."""

    encoded: Encoded
    spans: list[tuple[int, int]]
    cuts: dict[int, int]
    haystack_chars: int


def lay(
    tokenizer: Any,
    hay: Encoded,
    boundaries: Ints,
    needles: Sequence[Wanted],
    rooms: dict[int, int],
    *,
    crowded: Callable[[int], KvevalError],
    clear_tokens: int = CLEAR_TOKENS,
    unused_share: float = UNUSED_SHARE,
) -> Laid:
    """``needles`` laid into ``hay``, from left to right, each near where it is wanted; cut at the longest length.

    ``boundaries``: characters of ``hay`` at which something may be put in. ``rooms``: length -> tokens of its text.
    A length is cut after a sentence, or after a word where more than
    ``unused_share`` of it would be left. Raises ``crowded(length)`` when a length cannot hold its needles.
    """
    before = np.searchsorted(hay.ends, boundaries, side="right").astype(np.int32)
    longest = max(rooms)
    enough = int(np.searchsorted(before, rooms[longest] - sum(needle.tokens for needle in needles) + 2 * CLEAR_TOKENS))
    hay = hay.part(0, int(boundaries[min(enough, len(boundaries) - 1)]))
    wanted, sizes = [needle.target for needle in needles], [needle.tokens for needle in needles]
    for spare in _SPARE_TOKENS:
        places = place(wanted, before, sizes, spare, crowded=crowded, clear_tokens=clear_tokens)
        inserts = [(int(boundaries[at]), needle.words) for at, needle in zip(places, needles, strict=True)]
        whole, spans = insert(tokenizer, hay, inserts), _spans(inserts)
        if all(whole.tokens_until(end + 1) <= target.limit for (_, end), target in zip(spans, wanted, strict=True)):
            break
    else:
        raise crowded(min(rooms))
    ends = _sentence_ends(boundaries[boundaries <= len(hay.text)], inserts, spans)
    cuts = {
        length: _cut(whole, ends, spans, room, int(unused_share * length) - JOINT_TOKENS)
        for length, room in rooms.items()
    }
    return Laid(cut(tokenizer, whole, cuts[longest]), spans, cuts, len(hay.text))


def needle_tokens(tokenizer: Any, words: Sequence[str]) -> list[int]:
    """Tokens of each needle within a text."""
    stem = "The end."
    alone, *planted = encode(tokenizer, [stem, *(stem + text for text in words)])
    return [len(text) - len(alone) for text in planted]


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
    if not inserts:
        return boundaries
    moved = boundaries + shifts[np.searchsorted(chars, boundaries, side="left")]
    return np.unique(np.concatenate([moved, [end + 1 for _, end in spans]]).astype(np.int32))


def _cut(whole: Encoded, ends: Ints, spans: list[tuple[int, int]], room: int, unused: int) -> int:
    """Characters of the whole sentences that fit into ``room`` tokens. Where that wastes over ``unused`` tokens: of whole
    words; and where words are that long (tables, UUIDs): anything but the part of a needle."""
    at = int(np.searchsorted(np.searchsorted(whole.ends, ends, side="right"), room, side="right")) - 1
    best = int(ends[at]) if at >= 0 else 0
    for words in (True, False):
        if room - whole.tokens_until(best) <= unused:
            return best
        best = max(best, _last(whole, spans, room, whole.tokens_until(best), words=words))
    return best


def _last(whole: Encoded, spans: list[tuple[int, int]], room: int, least: int, *, words: bool) -> int:
    """The last character before token ``room`` at which the text may be cut, and a word ends for ``words``; 0 without one."""
    for token in range(room, least, -1):
        char = int(whole.ends[token - 1])
        if whole.tokens_until(char) > room or any(start <= char <= end for start, end in spans):
            continue  # the first of several tokens that one character takes, or within a needle
        between = whole.text[char - 1 : char + 1]
        if not words or (len(between) == 2 and between[1].isspace() and not between[0].isspace()):
            return char
    return 0
