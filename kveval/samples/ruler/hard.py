"""Hard needles: keys and values that differ in one word, one number or one digit, because plain needles saturate.

Sixty plain needles found of sixty bound a loss only at 5 % (rule of three, Hanley & Lippman-Hand 1983); a format that
blurs keys shows up first where keys are nearly alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from kveval.samples.lexicon import KEY_ADJECTIVES, KEY_NOUNS, NEEDLE
from kveval.samples.ruler.niah import HEADER, asked
from kveval.samples.ruler.prose import depths_of, filled, source_of, spans
from kveval.samples.ruler.sample import Draft, Family

LIKENESSES = 8  # needles of one group: the asked one, and seven that differ from it a little


@dataclass(frozen=True)
class HardNeedle:
    """``groups`` groups of eight look-alike needles, one of which is asked for; no two groups share a word of a key."""

    name: str = "needle_hard"
    haystack: str = "auto"
    groups: int = 4
    budget_tokens: int = 128
    any_of: bool = False

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens, and its tokens (see ``Family``)."""
        (depth, *others) = depths_of(self.name, index, LIKENESSES * self.groups)
        random("places").shuffle(others)
        pairs: list[tuple[str, str]] = []

        def make(text: str) -> tuple[list[str], str]:
            pairs.extend(pair for group in alike(random("groups"), self.groups, text) for pair in group)
            return [NEEDLE.format(key=key, value=value) for key, value in pairs], "".join(asked([pairs[0][0]]))

        text, tokens = filled(
            tokenizer,
            source_of(self.haystack, random),
            room,
            name=self.name,
            header=HEADER,
            make=make,
            depths=[depth, *others],
        )
        planted = spans(text, [NEEDLE.format(key=key, value=value) for key, value in pairs])
        return Draft(text, asked([pairs[0][0]])[1], ((pairs[0][1],),), (depth,), planted), tokens


def alike(random: Random, groups: int, text: str = "") -> list[list[tuple[str, str]]]:
    """``groups`` groups of eight (key, value). Keys: ``crimson walrus 41`` and, each time one part changed, its likes.

    Values of a group differ from the first one's in one of the first three digits. Words and numbers of one group are in
    no other; no key and no value is in ``text``.
    """
    pools = (KEY_ADJECTIVES, KEY_NOUNS, tuple(str(mark) for mark in range(10, 100)))
    parts = [random.sample(pool, 2 * groups) for pool in pools]
    stems = random.sample(range(1000, 10_000), groups)
    found = []
    for group in range(groups):
        keys = [" ".join(words) for words in product(*(drawn[2 * group : 2 * group + 2] for drawn in parts))]
        values = [f"{head}{stems[group]}" for head in _near(random)]
        order = random.sample(range(LIKENESSES), LIKENESSES)
        found.append([(keys[number], values[number]) for number in order])
    if any(part in text for group in found for pair in group for part in pair):
        return alike(random, groups, text)
    return found


def _near(random: Random) -> list[str]:
    """Eight numbers of three digits, each of which differs from the first in one digit."""
    first = [random.randrange(1, 10), random.randrange(10), random.randrange(10)]
    near = [first]
    places = [0, 1, 2, 0, 1, 2, 0]
    for place in places:
        taken = {tuple(digits) for digits in near}
        changes = [[*first[:place], digit, *first[place + 1 :]] for digit in range(1, 10)]
        near.append(random.choice([digits for digits in changes if tuple(digits) not in taken]))
    return ["".join(map(str, digits)) for digits in near]


FAMILIES_HARD: dict[str, Family] = {"needle_hard": HardNeedle()}
