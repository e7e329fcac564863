"""Where the needles of a context go, in tokens, before there is a text with needles in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.encoded import Ints

CLEAR_TOKENS = 8  # no needle in the first tokens: they are attention sinks, which every cache keeps
SENTENCE_TOKENS = 32  # a longer sentence may be broken between words for a needle
MAX_NEEDLE_SHARE = 0.30  # of the tokens of any length


@dataclass(frozen=True)
class Grid:
    """What is asked: ``needles_per_cell`` questions for each length (tokens) and depth (0 start .. 1 end)."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    needles_per_cell: int

    @classmethod
    def of(cls, lengths: Sequence[int], depths: Sequence[float], needles_per_cell: int) -> Grid:
        """The grid, sorted. Raises KvevalError on no lengths, no depths, depths outside 0..1 or no needles."""
        if not lengths or any(isinstance(length, bool) or int(length) != length or length < 1 for length in lengths):
            raise KvevalError(f"lengths {list(lengths)} are not usable: give one or more whole numbers of tokens")
        if not depths or any(not 0 <= depth <= 1 for depth in depths):
            raise KvevalError(
                f"depths {list(depths)} are not usable: give one or more numbers between 0 (start) and 1 (end)"
            )
        if isinstance(needles_per_cell, bool) or int(needles_per_cell) != needles_per_cell or needles_per_cell < 1:
            raise KvevalError(
                f"needles_per_cell is {needles_per_cell}: with no needle there is nothing to ask; give 1 or more"
            )
        whole = tuple(sorted({int(length) for length in lengths}))
        return cls(whole, tuple(sorted({float(depth) for depth in depths})), int(needles_per_cell))

    @property
    def most_needles(self) -> int:
        """Needles when no two lengths share one."""
        return len(self.lengths) * len(self.depths) * self.needles_per_cell

    def tolerance(self, length: int, needle_tokens: float) -> float:
        """How far a needle may lie from its depth: 2 % of the length, or a cell's needles and two sentences."""
        return max(0.02 * length, self.needles_per_cell * needle_tokens + 2 * SENTENCE_TOKENS)

    def crowded(self, length: int) -> KvevalError:
        """The error for a length that cannot hold its needles."""
        return KvevalError(
            f"length {length:,} cannot hold {self.needles_per_cell} needles at each of {len(self.depths)} depths (at "
            f"most {MAX_NEEDLE_SHARE:.0%} of its tokens): ask about fewer needles (--needles, needles_per_cell) or "
            "depths, or raise the length"
        )


@dataclass(frozen=True, eq=False)
class Target:
    """A needle to plant: its first token is wanted at ``first``; it must end before token ``limit``, for ``length``."""

    first: float
    limit: int
    length: int


def targets(grid: Grid, rooms: dict[int, int], needle_tokens: float) -> list[Target]:
    """Where needles are wanted, left to right. A length asks about the needles of shorter lengths where they lie well.

    ``rooms``: tokens of context that each length has room for.
    """
    planned: list[Target] = []
    for length in grid.lengths:
        room, near = rooms[length], 0.015 * length  # nearer than the tolerance: planting moves a needle a little
        used: set[Target] = set()
        for depth in grid.depths:
            centre = depth * (room - needle_tokens)
            there = [t for t in planned if t not in used and abs(t.first - centre) <= near and t.limit <= room]
            there = sorted(there, key=lambda target: abs(target.first - centre))[: grid.needles_per_cell]
            fresh = _cluster(centre, grid.needles_per_cell - len(there), room, length, needle_tokens)
            planned += fresh
            used.update(there, fresh)
        share = sum(target.first < room for target in planned) * needle_tokens / length
        if share > MAX_NEEDLE_SHARE:
            raise grid.crowded(length)
    return sorted(planned, key=lambda target: target.first)


def _cluster(centre: float, count: int, room: int, length: int, needle_tokens: float) -> list[Target]:
    """``count`` needles around ``centre`` with about a sentence between them, moved to fit into the room."""
    stride = needle_tokens + min(12.0, 0.01 * length / max(count, 1))
    last = room - math.ceil(needle_tokens)
    first = min(max(centre - (count - 1) / 2 * stride, CLEAR_TOKENS), last - (count - 1) * stride)
    return [Target(first + number * stride, room, length) for number in range(count)]


def place(
    wanted: Sequence[Target],
    boundaries: Ints,
    needle_tokens: Sequence[int],
    spare_tokens: float,
    *,
    crowded: Callable[[int], KvevalError],
    clear_tokens: int = CLEAR_TOKENS,
) -> list[int]:
    """For each target the index of the boundary that its needle is planted at.

    ``boundaries``: haystack tokens before each sentence boundary, rising. A boundary may get several needles; none
    before the first ``clear_tokens``. ``spare_tokens``: how many tokens the text around a needle may gain by it, for
    each needle so far. Raises ``crowded(length)`` when a length cannot hold its needles.
    """
    latest = [0.0] * len(wanted)  # first tokens at which each needle and, right behind it, all later ones still fit
    after = math.inf
    for number in range(len(wanted) - 1, -1, -1):
        limit = wanted[number].limit - math.ceil(spare_tokens * (number + 1))
        after = latest[number] = min(limit, after) - needle_tokens[number]
    chosen: list[int] = []
    lowest, planted = int(np.searchsorted(boundaries, clear_tokens)), 0
    for target, tokens, last in zip(wanted, needle_tokens, latest, strict=True):
        at = max(_nearest(boundaries, target.first - planted), lowest)
        while at > lowest and boundaries[at] + planted > last:
            at -= 1
        if at >= len(boundaries) or boundaries[at] + planted > last:
            raise crowded(target.length)
        chosen.append(at)
        lowest, planted = at, planted + tokens
    return chosen


def _nearest(rising: Ints, value: float) -> int:
    right = int(np.searchsorted(rising, value))
    if right == 0:
        return 0
    if right == len(rising):
        return right - 1
    return right if rising[right] - value < value - rising[right - 1] else right - 1
