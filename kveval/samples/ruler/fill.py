"""Filling a room with very many short words: what they will take is told beforehand, so that the text is tokenised once.

What a few words take would be off by more than is left free, because the numbers of a list grow and how many tokens a
number takes depends on its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.encoded import encode
from kveval.samples.ruler.sample import Draft, count_tokens

FILL = 0.993  # of the room: what is aimed at, so that an estimate may be off by 0.7 %


def word_tokens(tokenizer: Any, words: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Tokens of each word where it stands between spaces. Tokenises the words once."""
    text = "".join(f" {word}" for word in words)
    (encoded,) = encode(tokenizer, [text])
    ends = np.cumsum([len(word) + 1 for word in words])
    return np.diff(np.searchsorted(encoded.ends, ends, side="right"), prepend=0).astype(np.float64)


def number_tokens(tokenizer: Any, most: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Element n: tokens, about, that the numbers 1 to n of a list take with their dots; n up to ``most``.

    Tokenises about eight of all numbers that begin with the same two digits: tokenizers have some digits in one token.
    """
    widths = [10**power for power in range(len(str(most))) for _ in range(90 if power else 100)]
    starts = np.cumsum([0, *widths[:-1]])
    blocks = [range(start, start + width) for start, width in zip(starts, widths, strict=True) if start <= most]
    drawn = [block[len(block) // 32 :: len(block) // 8 | 3] for block in blocks]
    sizes = word_tokens(tokenizer, [f"{number}." for some in drawn for number in some])
    firsts = np.cumsum([0, *(len(some) for some in drawn[:-1])])
    means = np.add.reduceat(sizes, firsts) / [len(some) for some in drawn]
    each = np.repeat(means, [len(block) for block in blocks])[: most + 1]
    each[0] = 0.0
    return np.cumsum(each)


def settled(
    tokenizer: Any, make: Callable[[int], Draft], room: int, count: int, each_tokens: float
) -> tuple[Draft, int]:
    """``make(count)`` and its tokens when it fills the room; else that of a better count. Tokenises each once.

    A text may grow by leaps: the best count is then the last before one. Raises KvevalError when no count fits.
    """
    best: tuple[Draft, int] | None = None
    low, high = 0, 2 * room + count  # counts that fit, and that do not
    count = max(count, 1)
    for _ in range(24):
        draft = make(count)
        tokens = count_tokens(tokenizer, draft.text)
        if 0.985 * room <= tokens <= room:
            return draft, tokens
        if tokens <= room:
            low, best = count, (draft, tokens)
        else:
            high = count
        if high - low <= 1:
            break
        step = int((FILL * room - tokens) / each_tokens)
        count = min(max(count + step, low + 1), high - 1)
    if best is None:
        raise KvevalError(f"the words do not fit into {room:,} tokens with this tokenizer: ask for a longer length")
    return best
