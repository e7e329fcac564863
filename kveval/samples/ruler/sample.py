"""One RULER sample: a prompt of an exact length, what its answer must hold, and where that lies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from kveval.errors import KvevalError
from kveval.samples.encoded import encode, special_prefix

USED_SHARE = 0.98  # of the asked length, at least


@dataclass(frozen=True)
class Draft:
    """A prompt before its length is settled. ``text`` ends with ``answer_prefix``, which the answer goes on from.

    ``expected``: groups; each group's strings are aliases of one another. ``depths``: where the asked-about passages begin,
    0 the start of the context .. 1 its end. ``planted``: first and end character of what was put into a haystack, those
    asked about first.
    """

    text: str
    answer_prefix: str
    expected: tuple[tuple[str, ...], ...]
    depths: tuple[float, ...]
    planted: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Sample:
    """Sample ``index`` of (seed, task, length). ``tokens``: of the prompt, BOS and ``reserve_tokens`` of a chat template in it."""

    task: str
    seed: int
    length: int
    index: int
    draft: Draft
    tokens: int
    budget_tokens: int  # room for the answer

    @property
    def sha256(self) -> str:
        """Of the text and of what is expected."""
        content = [self.task, self.length, self.draft.text, self.draft.expected, self.draft.depths]
        return hashlib.sha256(json.dumps(content, ensure_ascii=False).encode()).hexdigest()


class Family(Protocol):
    """A task. Frozen values; ``build`` is their one idea."""

    @property
    def name(self) -> str:
        """niah_single_1 ..."""

    @property
    def budget_tokens(self) -> int:
        """RULER's tokens_to_generate."""

    @property
    def any_of(self) -> bool:
        """True: one expected string is enough (RULER's string_match_part); False: the share found (string_match_all)."""

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens and its tokens, both without special tokens.

        ``random(what)`` gives a generator of its own for each purpose; ``index`` spreads depths evenly over samples.
        """


def sample(tokenizer: Any, family: Family, *, seed: int, length: int, index: int, reserve_tokens: int = 0) -> Sample:
    """Sample ``index``: it depends on the arguments alone, not on which others were built before.

    Raises KvevalError when the length has no room for the task, or the text cannot be made to fill it.
    """
    special = len(special_prefix(tokenizer)) + reserve_tokens
    room = length - special - family.budget_tokens

    def random(what: str) -> Random:
        return Random(f"{seed}:{family.name}:{length}:{index}:{what}")

    if room < 64:
        raise KvevalError(f"length {length:,} has no room for {family.name}: ask for 1k or more")
    draft, tokens = family.build(tokenizer, room, random, index)
    used = tokens + special + family.budget_tokens
    if used > length or used < USED_SHARE * length:
        raise KvevalError(
            f"{family.name} fills {used:,} of {length:,} tokens with this tokenizer: ask for another length, or report this"
        )
    return Sample(family.name, seed, length, index, draft, tokens + special, family.budget_tokens)


def spread(index: int, turn: float) -> float:
    """Depth of sample ``index`` in 0..1: multiples of the golden ratio from ``turn`` on, even over any run of indices."""
    return (turn + index * (5**0.5 - 1) / 2) % 1


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of ``text`` without special tokens."""
    return len(encode(tokenizer, [text])[0])
