"""Needles of several tasks in one haystack: prose for RULER's needle tasks, repeated noise for single_1 and vt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from random import Random
from typing import Any

from kveval.samples.encoded import encode, special_prefix
from kveval.samples.haystack import Haystack
from kveval.samples.laying import Wanted, lay, needle_tokens
from kveval.samples.layout import MAX_NEEDLE_SHARE, Target
from kveval.samples.lexicon import NEEDLE
from kveval.samples.ruler import hard, niah, vt
from kveval.samples.ruler.keys import KINDS
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

HEADER = "Access codes and variables are told in the text below. Remember them: questions about them follow the text.\n"
PROSE_TASKS = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
HARD_TASKS = ("needle_hard",)
REPEAT_TASKS = ("niah_single_1", "vt")
_KEYS = 4  # of a multi-key question, and values of a multi-value one, as in RULER
_HOPS = 4


@dataclass(frozen=True)
class Passage:
    """A sentence to plant, with its leading space, wanted at ``depth`` (0..1) of ``length``."""

    words: str
    depth: float
    length: int


class Draws:
    """Keys, values and variables of one context: each kind has a generator of its own, and none gives anything twice."""

    def __init__(self, seed: int, kind: str, context: int, text: str) -> None:
        self._name, self._text = f"{seed}:shared:{kind}:{context}", text
        self._streams: dict[str, Iterator[str]] = {}
        self.random = {what: Random(f"{self._name}:{what}") for what in ("vt", "needle_hard")}
        self.names: set[str] = set()

    def next(self, kind: str) -> str:
        """One more of ``words``, ``numbers`` or ``uuids``."""
        if kind not in self._streams:
            self._streams[kind] = KINDS[kind](Random(f"{self._name}:{kind}"), self._text)
        return next(self._streams[kind])

    def chain(self) -> tuple[list[str], str]:
        """The variables of one more chain, and its value: none of them drawn before."""
        random = self.random["vt"]
        while True:
            _, names, value = vt.drawn_chains(random, _HOPS + 1)
            if not self.names & {*names, value}:
                self.names |= {*names, value}
                return names, value


class Planting:
    """What is planted into one context, and what is asked about it."""

    def __init__(self, draws: Draws) -> None:
        self.draws = draws
        self.passages: list[Passage] = []
        self.asked: list[Asking] = []

    def add(self, task: str, length: int, depths_of: Callable[[int], list[float]]) -> None:
        """One question of ``task`` at ``length``; ``depths_of(count)`` gives depths of so many passages."""
        if task == "vt":
            self._chain(length, depths_of)
        elif task == "needle_hard":
            self._alike(length, depths_of)
        elif task == "niah_multivalue":
            key, values = self.draws.next("words"), [self.draws.next("numbers") for _ in range(_KEYS)]
            self._needles(task, length, [(key, value) for value in values], depths_of(_KEYS), told=_KEYS, many=True)
        elif task == "niah_multiquery":
            self._needles(task, length, self._pairs(_KEYS), depths_of(_KEYS), told=_KEYS)
        else:
            pairs = self._pairs(
                _KEYS if task == "niah_multikey_1" else 1, "uuids" if task == "niah_single_3" else "numbers"
            )
            (depth,) = depths_of(1)
            others = [(depth + number / len(pairs)) % 1 for number in range(1, len(pairs))]
            self._needles(task, length, pairs, [depth, *others], told=1)

    def _pairs(self, count: int, values: str = "numbers") -> list[tuple[str, str]]:
        return [(self.draws.next("words"), self.draws.next(values)) for _ in range(count)]

    def _needles(
        self, task: str, length: int, pairs: list[tuple[str, str]], at: list[float], *, told: int, many: bool = False
    ) -> None:
        template = niah.ONE_OF_MANY if many else NEEDLE
        words = [template.format(key=key, value=value) for key, value in pairs]
        keys = list(dict.fromkeys(key for key, _ in pairs[:told]))
        self._ask(task, length, words, at, niah.asked(keys, many=many), [value for _, value in pairs[:told]])

    def _alike(self, length: int, depths_of: Callable[[int], list[float]]) -> None:
        (group,) = hard.alike(self.draws.random["needle_hard"], 1)
        (depth,) = depths_of(1)
        others = [(depth + number / len(group)) % 1 for number in range(1, len(group))]
        self._needles("needle_hard", length, group, [depth, *others], told=1)

    def _chain(self, length: int, depths_of: Callable[[int], list[float]]) -> None:
        names, value = self.draws.chain()
        at = depths_of(len(names))
        tail = vt.QUESTION.format(value=value), vt.PREFIX.format(value=value)
        self._ask("vt", length, vt.statements(names, value), at, tail, names)

    def _ask(
        self, task: str, length: int, words: list[str], at: list[float], tail: tuple[str, str], expected: list[str]
    ) -> None:
        first = len(self.passages)
        self.passages += [Passage(text, depth, length) for text, depth in zip(words, at, strict=True)]
        told = tuple(range(first, first + len(expected)))
        groups = tuple((value,) for value in expected)
        depth = int(10 * min(at[: len(expected)]) + 0.5) / 10
        self.asked.append(Asking(task, length, depth, "".join(tail), groups, False, told))


def build_prose(
    tokenizer: Any,
    tasks: Sequence[str],
    haystack: Haystack,
    *,
    seed: int,
    context: int,
    lengths: Sequence[int],
    per_task: int,
    reserve_tokens: int = 0,
) -> SharedContext:
    """Context number ``context`` with ``per_task`` questions of each of ``tasks`` at each length.

    The same arguments give the same context in any process and order. Raises KvevalError when a length cannot hold its
    passages.
    """
    kind = "repeat" if haystack.name == "repeat" else "prose"
    origin = Origin(kind, seed, context, (haystack.name, haystack.sha256))
    (head,) = encode(tokenizer, [HEADER])
    hay, boundaries = tokenised(tokenizer, chain([HEADER], haystack.pieces(seed, context)), max(lengths))
    planting = Planting(Draws(seed, kind, context, hay.text))
    for length in sorted(lengths):
        for task in tasks:
            for number in range(per_task):
                planting.add(task, length, partial(depths, task, context, number, per_task))
    passages, asked = planting.passages, planting.asked
    overhead = tail_tokens(tokenizer, asked) + len(special_prefix(tokenizer)) + reserve_tokens
    rooms = {length: length - overhead for length in lengths}
    sizes = needle_tokens(tokenizer, [passage.words for passage in passages])
    _refuse_crowded(passages, sizes, rooms)
    firsts = [_first(passage, rooms, len(head), size) for passage, size in zip(passages, sizes, strict=True)]
    order = sorted(range(len(passages)), key=firsts.__getitem__)
    needles = [
        Wanted(Target(firsts[i], rooms[passages[i].length], passages[i].length), passages[i].words, sizes[i])
        for i in order
    ]
    laid = lay(
        tokenizer,
        hay,
        boundaries,
        needles,
        rooms,
        crowded=crowded,
        clear_tokens=len(head),
        unused_share=PART_SHARE,
    )
    spans = {i: (*span, passages[i].words.strip(" .")) for i, span in zip(order, laid.spans, strict=True)}
    told = [spans[i] for i in range(len(passages))]
    return finish(tokenizer, origin, laid.encoded, laid.cuts, told, asked, planted=True)


def _first(passage: Passage, rooms: dict[int, int], head: int, size: int) -> float:
    """The token at which a passage is wanted."""
    return head + passage.depth * (rooms[passage.length] - head - size)


def _refuse_crowded(passages: Sequence[Passage], sizes: Sequence[int], rooms: dict[int, int]) -> None:
    for length, room in sorted(rooms.items()):
        inside = sum(
            size for passage, size in zip(passages, sizes, strict=True) if passage.depth * rooms[passage.length] < room
        )
        if inside > MAX_NEEDLE_SHARE * length:
            raise crowded(length)
