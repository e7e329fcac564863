"""Contexts that are nothing but sentences, any of which may be asked about: RULER's haystacks of needles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Any

import numpy as np

from kveval.samples.encoded import encode, special_prefix
from kveval.samples.laying import lay
from kveval.samples.lexicon import NEEDLE
from kveval.samples.ruler import niah
from kveval.samples.shared.context import (
    PART_SHARE,
    Asking,
    Origin,
    SharedContext,
    crowded,
    depths,
    finish,
    tail_tokens,
)
from kveval.samples.tokenised import tokenised

STREAMS = {
    "niah_multikey_2": ("words", "numbers"),
    "niah_multikey_3": ("uuids", "uuids"),
}  # task -> its keys and values
_FEWEST = 4  # sentences that a length must hold
_MOST_ASKED = 0.8  # of a length is before its question, at least


@dataclass
class Sentences:
    """Sentences as they are drawn, and the characters at which each begins and ends."""

    header: str
    drawn: Iterator[str]

    def __post_init__(self) -> None:
        self.ends = [len(self.header)]

    def __iter__(self) -> Iterator[str]:
        for sentence in chain([self.header], self.drawn):
            if sentence is not self.header:
                self.ends.append(self.ends[-1] + len(sentence))
            yield sentence


def build_needles(
    tokenizer: Any,
    task: str,
    *,
    seed: int,
    context: int,
    lengths: Sequence[int],
    per_task: int,
    reserve_tokens: int = 0,
) -> SharedContext:
    """Context number ``context`` of needles without a haystack: ``per_task`` questions at each length.

    The same arguments give the same context in any process and order. Raises KvevalError when a length is too short.
    """
    keys, values = STREAMS[task]
    drawn = niah.needles(keys, values, lambda what: Random(f"{seed}:shared:{task}:{context}:{what}"))
    pairs: list[tuple[str, str]] = []

    def sentences() -> Iterator[str]:
        for pair in drawn:
            pairs.append(pair)
            yield NEEDLE.format(key=pair[0], value=pair[1])

    def asking(length: int, depth: float, count: int) -> Asking:
        number = round(depth * (count - 1))
        key, value = pairs[number]
        return Asking(task, length, depth, "".join(niah.asked([key])), ((value,),), False, (number,))

    told = Sentences(niah.HEADER, sentences())
    origin = Origin(keys, seed, context)
    return build_stream(tokenizer, origin, told, [(task, asking)], lengths, per_task, reserve_tokens)


def build_stream(
    tokenizer: Any,
    origin: Origin,
    told: Sentences,
    tasks: Sequence[tuple[str, Callable[[int, float, int], Asking]]],
    lengths: Sequence[int],
    per_task: int,
    reserve_tokens: int = 0,
) -> SharedContext:
    """A context of ``told``; each task's ``asking(length, depth, count)`` is about one of its first ``count`` sentences."""
    hay, boundaries = tokenised(tokenizer, iter(told), max(lengths))
    before = np.searchsorted(hay.ends, told.ends, side="right")
    overhead = len(special_prefix(tokenizer)) + reserve_tokens
    # The longest question decides where lengths are cut, and the cuts decide what is asked: room for twice some question.
    room = {}
    for length in lengths:
        inside = int(np.searchsorted(before, _MOST_ASKED * length, side="right")) - 1
        if inside < _FEWEST:
            raise crowded(length)
        room[length] = length - overhead - 2 * tail_tokens(tokenizer, [ask(length, 0.0, inside) for _, ask in tasks])
    asked = []
    for length in sorted(lengths):
        count = int(np.searchsorted(before, room[length], side="right")) - 1
        if count < _FEWEST:
            raise crowded(length)
        for task, asking in tasks:
            for number in range(per_task):
                (depth,) = depths(task, origin.context, number, per_task)
                asked.append(asking(length, depth, count))
    overhead += tail_tokens(tokenizer, asked)
    rooms = {length: length - overhead for length in lengths}
    clear = len(encode(tokenizer, [told.header])[0])
    laid = lay(tokenizer, hay, boundaries, [], rooms, crowded=crowded, clear_tokens=clear, unused_share=PART_SHARE)
    passages = [
        (start + 1, end - 1, hay.text[start:end].strip(" .\n"))
        for start, end in zip(told.ends, told.ends[1:], strict=False)
    ]
    return finish(tokenizer, origin, laid.encoded, laid.cuts, passages, asked, planted=False)
