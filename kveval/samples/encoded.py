"""Token ids of a long text, changed locally: a needle or a question is added without tokenising the text again.

A tokenizer looks only a little way past each token, so where two texts meet, only the tokens next to the joint change.
The joint is tokenised again with a few tokens on either side, and taken where both tokenisations agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from kveval.errors import EvidenceError, KvevalError

Ints = np.ndarray[Any, np.dtype[np.int32]]
_WINDOW = 8  # tokens on either side of a joint
_FURTHEST = 64  # a window goes on to the beginning of a word, up to so many tokens
_AGREE = 2  # so many tokens in a row must be the same in both tokenisations


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text and its tokens, without special tokens. Token i covers text[starts[i]:ends[i]], perhaps less spaces."""

    text: str
    ids: Ints  # [tokens]
    starts: Ints  # [tokens], characters
    ends: Ints  # [tokens]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens_until(self, char: int) -> int:
        """Number of tokens that end at or before character ``char``."""
        return int(np.searchsorted(self.ends, char, side="right"))

    def part(self, first: int, end: int) -> Encoded:
        """Characters first..end with the tokens that lie wholly inside; a token across either edge is left out."""
        low, high = int(np.searchsorted(self.starts, first, side="left")), self.tokens_until(end)
        high = max(low, high)
        return Encoded(
            self.text[first:end], self.ids[low:high], self.starts[low:high] - first, self.ends[low:high] - first
        )


def encode(tokenizer: Any, texts: Sequence[str]) -> list[Encoded]:
    """Each of ``texts`` tokenised on its own, in one batched call."""
    if not texts:
        return []
    batch = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [
        _encoded(text, ids, offsets)
        for text, ids, offsets in zip(texts, batch["input_ids"], batch["offset_mapping"], strict=True)
    ]


def _encoded(text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
    # Running maxima: a byte-level token that holds a part of a character has the offsets of the whole character.
    spans = np.maximum.accumulate(np.asarray(offsets, dtype=np.int32).reshape(-1, 2), axis=0)
    return Encoded(text, np.asarray(ids, dtype=np.int32), spans[:, 0].copy(), spans[:, 1].copy())


def special_prefix(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer puts before every text (a BOS token, or nothing).

    Raises KvevalError when contexts cannot be built with the tokenizer.
    """
    if not tokenizer.is_fast:
        kind = type(tokenizer).__name__
        raise KvevalError(f"{kind} gives no character offsets: use a model with a fast tokenizer (tokenizer.json)")
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True)["input_ids"]
    for first in range(len(full) - len(plain) + 1):
        if full[first : first + len(plain)] == plain:
            return list(full[:first])
    raise KvevalError(
        f"tokenizer {type(tokenizer).__name__} tokenises 'a' otherwise with special tokens: it cannot be used"
    )


def join(tokenizer: Any, parts: Sequence[Encoded]) -> Encoded:
    """The parts one after another, tokenised as their joined text is.

    Tokenises up to 16 tokens a joint. Raises EvidenceError when the tokenisations never agree around a joint.
    """
    parts = [part for part in parts if part.text]
    firsts = np.concatenate([[0], np.cumsum([len(part.text) for part in parts])])  # character where each part starts
    spans = [(_tail_start(left), _head_end(right)) for left, right in pairwise(parts)]
    windows = encode(
        tokenizer,
        [left.text[a:] + right.text[:b] for (a, b), (left, right) in zip(spans, pairwise(parts), strict=True)],
    )
    pieces: list[tuple[Ints, Ints, Ints]] = []
    begin = 0  # first token of the part at hand that is still to be taken
    for number, part in enumerate(parts):
        if number == len(parts) - 1:
            pieces.append(_slice(part, begin, len(part), firsts[number]))
            break
        (tail, _), window, right = spans[number], windows[number], parts[number + 1]
        keep, first = _agree_left(part, window, tail)
        last, skip = _agree_right(right, window, len(part.text) - tail, final=number + 2 == len(parts))
        if keep < begin or last < first:
            raise _lost(window.text)
        pieces.append(_slice(part, begin, keep, firsts[number]))
        pieces.append(_slice(window, first, last, firsts[number] + tail))
        begin = skip
    ids, starts, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return Encoded("".join(part.text for part in parts), ids, starts, ends)


def _slice(part: Encoded, first: int, end: int, char: int) -> tuple[Ints, Ints, Ints]:
    shift = np.int32(char)
    return part.ids[first:end], part.starts[first:end] + shift, part.ends[first:end] + shift


def _tail_start(left: Encoded) -> int:
    """Where the window before a joint begins: 8 tokens back, or further, at the beginning of a word.

    A window that began inside a word might see the rest of it as another word, in other tokens.
    """
    for back in range(_WINDOW, min(len(left), _FURTHEST)):
        first, end = int(left.starts[-back]), int(left.ends[-back])
        if left.text[first:end][:1].isspace() or (first and left.text[first - 1].isspace()):
            return first
    return 0 if len(left) <= _FURTHEST else int(left.starts[-_WINDOW])


def _head_end(right: Encoded) -> int:
    return len(right.text) if len(right) <= _WINDOW else int(right.ends[_WINDOW - 1])


def _same(part: Encoded, i: int, window: Encoded, j: int, shift: int) -> bool:
    """Token i of the part is token j of the window, which starts ``shift`` characters into the part."""
    return (
        0 <= i < len(part)
        and 0 <= j < len(window)
        and part.ids[i] == window.ids[j]
        and part.ends[i] == window.ends[j] + shift
    )


def _agree_left(left: Encoded, window: Encoded, tail: int) -> tuple[int, int]:
    """(tokens of ``left`` to keep, tokens of the window to skip): the last place where both agree."""
    for keep in range(len(left), max(0, len(left) - _WINDOW), -1):
        skip = int(np.searchsorted(window.ends, left.ends[keep - 1] - tail, side="left")) + 1
        if all(_same(left, keep - back, window, skip - back, tail) for back in range(1, _AGREE + 1)):
            return keep, skip
    if tail == 0:
        return 0, 0  # the window holds all of the left text
    raise _lost(window.text)


def _agree_right(right: Encoded, window: Encoded, joint: int, *, final: bool) -> tuple[int, int]:
    """(tokens of the window to take, tokens of ``right`` to skip): the first place after the joint where both agree."""
    if final and len(right) <= _WINDOW:
        return len(window), len(right)  # the window holds all of the right text
    for skip in range(min(len(right), _WINDOW)):
        last = int(np.searchsorted(window.ends, right.ends[skip] + joint, side="left"))
        if window.starts[min(last, len(window) - 1)] >= joint and all(
            _same(right, skip + ahead, window, last + ahead, -joint) for ahead in range(_AGREE)
        ):
            return last, skip
    raise _lost(window.text)


def _lost(text: str) -> EvidenceError:
    return EvidenceError(
        f"the tokenizer does not tokenise {text!r} the same way twice: contexts cannot be built exactly with it; "
        "use another model or report this tokenizer"
    )


def insert(tokenizer: Any, text: Encoded, inserts: Sequence[tuple[int, str]]) -> Encoded:
    """``text`` with each (character, words) of ``inserts`` put in before that character; characters in rising order."""
    groups: list[tuple[int, int, str]] = []  # first and last character of what is replaced, and by what
    for char, words in inserts:
        if groups and text.tokens_until(char) - text.tokens_until(groups[-1][1]) < 2 * _WINDOW:
            first, last, before = groups.pop()  # too near for two joints: one stretch of new text
            groups.append((first, char, before + text.text[last:char] + words))
        else:
            groups.append((char, char, words))
    parts, at = [], 0
    for (first, last, _), planted in zip(groups, encode(tokenizer, [words for _, _, words in groups]), strict=True):
        parts += [text.part(at, first), planted]
        at = last
    return join(tokenizer, [*parts, text.part(at, len(text.text))])


def cut(tokenizer: Any, whole: Encoded, char: int) -> Encoded:
    """The first ``char`` characters of ``whole``, tokenised as they are on their own."""
    left = whole.part(0, char)
    keep, first, window, tail = _extended(tokenizer, left, "")
    columns = zip(_slice(left, 0, keep, 0), _slice(window, first, len(window), tail), strict=True)
    return Encoded(left.text, *(np.concatenate(column) for column in columns))


def extend(tokenizer: Any, left: Encoded, text: str) -> tuple[int, list[int]]:
    """(n, ids) such that ``left.ids[:n] + ids`` are the tokens of ``left.text + text``; only the joint is tokenised."""
    keep, first, window, _ = _extended(tokenizer, left, text)
    return keep, window.ids[first:].tolist()


def _extended(tokenizer: Any, left: Encoded, text: str) -> tuple[int, int, Encoded, int]:
    tail = _tail_start(left)
    (window,) = encode(tokenizer, [left.text[tail:] + text])
    return *_agree_left(left, window, tail), window, tail
