"""Keys and values of needles: two words, seven digits, or a UUID; unique, and in no haystack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice, product
from random import Random
from uuid import UUID

from kveval.samples.lexicon import KEY_ADJECTIVES, KEY_NOUNS

_SEVEN_DIGITS = re.compile(r"(?<!\d)\d{7}(?!\d)")


def words(random: Random, text: str = "") -> Iterator[str]:
    """Keys such as ``amber falcon`` without end: first all of two words, and then of three adjectives, so that no key is a
    part of another one. None is in ``text``."""
    two = list(_two_words())
    random.shuffle(two)
    yield from (key for key in two if key not in text)
    seen: set[str] = set()
    while True:
        key = " ".join(random.sample(KEY_ADJECTIVES, 3))
        if key not in seen and key not in text:
            seen.add(key)
            yield key


def numbers(random: Random, text: str = "") -> Iterator[str]:
    """Seven digits each, without end; none stands in ``text``."""
    seen = set(_SEVEN_DIGITS.findall(text))
    while True:
        value = str(random.randrange(1_000_000, 10_000_000))
        if value not in seen:
            seen.add(value)
            yield value


def uuids(random: Random, text: str = "") -> Iterator[str]:
    """Random UUIDs (version 4) without end; none stands in ``text``."""
    while True:
        value = str(UUID(int=random.getrandbits(128), version=4))
        if value not in text:
            yield value


KINDS: dict[str, Callable[[Random, str], Iterator[str]]] = {"words": words, "numbers": numbers, "uuids": uuids}


def draw(kind: str, random: Random, count: int, text: str = "") -> list[str]:
    """The first ``count`` of a kind: ``words``, ``numbers`` or ``uuids``."""
    return list(islice(KINDS[kind](random, text), count))


@lru_cache(maxsize=1)
def _two_words() -> tuple[str, ...]:
    return tuple(f"{adjective} {noun}" for adjective, noun in product(KEY_ADJECTIVES, KEY_NOUNS))
