"""RULER's prompts at an exact length: needles in a haystack, and texts that are nothing but needles."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from random import Random
from typing import Any

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.encoded import Encoded, encode, extend
from kveval.samples.haystack import haystack
from kveval.samples.laying import JOINT_TOKENS, Wanted, lay, needle_tokens
from kveval.samples.layout import SENTENCE_TOKENS, Target
from kveval.samples.ruler.sample import spread
from kveval.samples.tokenised import tokenised

AUTO = "pydoc"  # where RULER has essays
_UNUSED_SHARE = 0.015  # of the text at its end; the joints and BOS take a few tokens more of the 2 % of the length

_haystack = lru_cache(maxsize=2)(haystack)  # read once a process: that takes as long as a short sample


def depths_of(name: str, index: int, count: int, ordered: bool = False) -> list[float]:
    """Depths (0..1) of ``count`` passages in sample ``index`` of a task: the first, and where there are more, all, even.

    ``ordered``: one in each of ``count`` equal parts of the text, rising.
    """
    depth = spread(index, zlib.crc32(name.encode()) / 2**32)
    if ordered:
        return [(number + depth) / count for number in range(count)]
    return [(depth + number / count) % 1 for number in range(count)]


def source_of(name: str, random: Callable[[str], Random]) -> Iterator[str]:
    """The pieces of haystack ``name`` for one sample."""
    return _haystack(AUTO if name == "auto" else name).pieces(random("haystack").getrandbits(32), 0)


def spans(text: str, passages: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """First and end character of each of ``passages`` in ``text``."""
    starts = [text.index(passage) for passage in passages]
    return tuple((start, start + len(passage)) for start, passage in zip(starts, passages, strict=True))


def filled(
    tokenizer: Any,
    source: Iterator[str],
    room: int,
    *,
    name: str,
    header: str,
    make: Callable[[str], tuple[Sequence[str], str]],
    depths: Sequence[float],
) -> tuple[str, int]:
    """The longest text of at most ``room`` tokens, and its tokens: header, haystack with needles, and what is asked.

    Needles lie between sentences, but for sentences of over 2 % of the room: those are broken between words.
    ``make(text)`` gives the needles, one for each of ``depths``, and the question, none of them in the haystack's
    ``text``. Raises KvevalError, with the task's ``name``, when the needles do not fit.
    """
    (head,) = encode(tokenizer, [header])
    hay, boundaries = tokenised(tokenizer, chain([header], source), room, max(SENTENCE_TOKENS, room // 50))
    words, tail = make(hay.text)
    inside = room - len(encode(tokenizer, [tail])[0]) - JOINT_TOKENS
    sizes = needle_tokens(tokenizer, words)
    low, high = len(head), inside - max(sizes)

    def crowded(tokens: int) -> KvevalError:
        return KvevalError(
            f"{name} has no room for {len(words)} needles and a question in {tokens:,} tokens (the length less the "
            "answer's): ask for a longer length"
        )

    if high - low < 2 * sum(sizes):
        raise crowded(room)
    needles = [
        Wanted(Target(low + depth * (high - low), inside, room), text, size)
        for depth, text, size in sorted(zip(depths, words, sizes, strict=True))
    ]
    laid = lay(
        tokenizer,
        hay,
        boundaries,
        needles,
        {room: inside},
        crowded=crowded,
        clear_tokens=len(head),
        unused_share=_UNUSED_SHARE,
    )
    return _with_tail(tokenizer, laid.encoded, tail)


def streamed(
    tokenizer: Any,
    sentences: Iterator[str],
    room: int,
    *,
    name: str,
    header: str,
    ask: Callable[[int], str],
    depth: float,
) -> tuple[str, int]:
    """The longest text of at most ``room`` tokens, and its tokens: header, one sentence after another, and what is asked.

    ``ask(number)`` gives the question about sentence ``number``, the one at ``depth``. What is left of the room at the end
    holds the beginning of one more sentence. Raises KvevalError, with the task's ``name``, when the room holds none.
    """
    (head,) = encode(tokenizer, [header])
    ends = [len(header)]

    def crowded(tokens: int) -> KvevalError:
        return KvevalError(
            f"{name} has no room for a needle and a question in {tokens:,} tokens (the length less the answer's): ask "
            "for a longer length"
        )

    def told() -> Iterator[str]:
        for sentence in sentences:
            ends.append(ends[-1] + len(sentence))
            yield sentence

    hay, boundaries = tokenised(tokenizer, chain([header], told()), room)

    def inside(number: int) -> int:
        return room - len(encode(tokenizer, [ask(number)])[0]) - JOINT_TOKENS

    before = np.searchsorted(hay.ends, ends, side="right")
    number = round(depth * (int(np.searchsorted(before, inside(0), side="right")) - 2))
    while number > 0 and before[number + 1] > inside(number):
        number -= 1  # a longer question than the first sentence's leaves less room
    if number < 0 or before[number + 1] > inside(number):
        raise crowded(room)
    laid = lay(
        tokenizer,
        hay,
        boundaries,
        [],
        {room: inside(number)},
        crowded=crowded,
        clear_tokens=len(head),
        unused_share=_UNUSED_SHARE,
    )
    tail = ask(number)
    return _with_tail(tokenizer, laid.encoded, tail)


def _with_tail(tokenizer: Any, encoded: Encoded, tail: str) -> tuple[str, int]:
    keep, ids = extend(tokenizer, encoded, tail)
    return encoded.text + tail, keep + len(ids)
