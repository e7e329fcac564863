"""Counting words, RULER's two aggregation tasks: the common words of a list, and the frequent ones of a coded text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from math import pi
from random import Random
from string import ascii_lowercase
from typing import Any

import numpy as np

from kveval.errors import KvevalError
from kveval.samples.lexicon import KEY_ADJECTIVES, KEY_NOUNS, haystack_words
from kveval.samples.ruler.fill import FILL, number_tokens, settled, word_tokens
from kveval.samples.ruler.sample import Draft, Family, count_tokens

LIST_HEADER = (
    "The words of the list below are numbered. Some of them come far more often than others: remember those.\n"
)
LIST_QUESTION = "\nQuestion: Which 10 words come most often in the list above?\nAnswer:"
LIST_PREFIX = " The 10 words that come most often are:"
CODED_HEADER = "The text below is written in code. Keep count of its words, to tell which three come most often.\n"
CODED_QUESTION = (
    "\nQuestion: Leaving out the dots, which three words of the coded text come most often? Only name them."
)
CODED_PREFIX = " Answer: The three words that come most often are:"
DOTS = "..."
_SHORT_TOKENS = 3_584  # RULER makes the counts smaller under a length of 4,096; a chat template takes up to 512 of it
_WRITTEN_TOKENS = 10_000  # up to here the lexicon has enough words; a longer list is all of made-up ones
_BLOCK_WORDS = 256
_ONSETS, _VOWELS, _CODAS = "bdfghjklmnprstvz", "aeiou", "klmnrst"


@dataclass(frozen=True)
class CommonWords:
    """A numbered list with ``common`` words that come ``repeats`` times each and others that come ``others`` times each.

    A worked example stands before it (Hsieh et al. 2024, section 3.3; RULER's common_words_extraction.py).
    """

    name: str = "cwe"
    common: int = 10
    repeats: int = 30
    others: int = 3
    budget_tokens: int = 120
    any_of: bool = False

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens, and its tokens (see ``Family``). The list's order is random."""
        short = room + self.budget_tokens < _SHORT_TOKENS
        repeats, others = (6, 1) if short else (self.repeats, self.others)
        # Distinct words of the example, and how often its common ones and its others come.
        shown, times = (20, (3, 1)) if short else (40, (10, 3))
        source = distinct(random("words"), self.common, written=room < _WRITTEN_TOKENS)
        asked, example = list(islice(source, self.common)), list(islice(source, shown))
        before = self._example(example, times, random("example")) + LIST_HEADER
        after = LIST_QUESTION + LIST_PREFIX
        rest: list[str] = []

        def make(count: int) -> Draft:
            rest.extend(islice(source, max(0, count - len(rest))))
            listed = asked * repeats + rest[:count] * others
            random("order").shuffle(listed)
            depths = tuple(listed.index(word) / (len(listed) - 1) for word in asked)
            return Draft(before + _numbered(listed) + after, LIST_PREFIX, tuple((word,) for word in asked), depths)

        fixed = count_tokens(tokenizer, before + after) + repeats * int(word_tokens(tokenizer, asked).sum())
        count, each = self._enough(tokenizer, room, fixed, repeats, others, source, rest)
        return settled(tokenizer, make, room, count, each)

    def _enough(
        self, tokenizer: Any, room: int, fixed: int, repeats: int, others: int, source: Iterator[str], rest: list[str]
    ) -> tuple[int, float]:
        """(how many other words fill the room, about; tokens that each takes). Adds words of ``source`` to ``rest``.

        ``fixed``: tokens of all but the other words and the numbers before the words.
        """
        first = self.common * repeats  # so many words of the list are common ones
        numbers = number_tokens(tokenizer, room // 2 + first + others * _BLOCK_WORDS)
        if fixed + numbers[first] > room:
            raise KvevalError(
                f"{self.name} needs over {int(fixed + numbers[first]):,} tokens with this tokenizer ({self.common} words "
                f"{repeats} times each, and an example), and {room:,} are there: ask for a longer length"
            )
        sizes, totals = np.zeros(0), np.zeros(1)
        while totals[-1] < FILL * room:
            rest += (block := list(islice(source, _BLOCK_WORDS)))
            sizes = np.concatenate([sizes, word_tokens(tokenizer, block)])
            totals = fixed + others * np.cumsum(sizes) + numbers[first + others :: others][: len(sizes)]
        each = others * float(totals[-1] - fixed) / (first + others * len(sizes))
        return int(np.searchsorted(totals, FILL * room)), each

    def _example(self, words: Sequence[str], times: tuple[int, int], random: Random) -> str:
        """A short list with its question, and the answer in the way that is wanted."""
        listed = list(words[: self.common]) * times[0] + list(words[self.common :]) * times[1]
        random.shuffle(listed)
        answer = _numbered(words[: self.common])
        return f"{LIST_HEADER}{_numbered(listed)}{LIST_QUESTION}{LIST_PREFIX} {answer}\n\n"


@dataclass(frozen=True)
class FrequentWords:
    """Words in code, the k-th of which comes int(n / k^2 / zeta(2)) times (Hsieh et al. 2024, section 3.3).

    As in RULER's freq_words_extraction.py the first of them is noise, dots, and the three after it are asked for; there
    are as many words as the prompt has tokens over 50, and n is what fills the room.
    """

    name: str = "fwe"
    letters: int = 6
    asked: int = 3
    tokens_per_word: int = 50
    budget_tokens: int = 50
    any_of: bool = False

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens, and its tokens (see ``Family``). The text's order is random."""
        coded = [DOTS, *coded_words(random("words"), room // self.tokens_per_word - 1, self.letters)]
        expected = coded[1 : self.asked + 1]

        def make(count: int) -> Draft:
            listed = [
                word for word, times in zip(coded, zeta_counts(count, len(coded)), strict=True) for _ in range(times)
            ]
            if listed.count(expected[-1]) <= listed.count(coded[self.asked + 1]):
                raise KvevalError(f"{room:,} tokens hold too few coded words to tell the frequent ones: ask for more")
            random("order").shuffle(listed)
            depths = tuple(listed.index(word) / (len(listed) - 1) for word in expected)
            text = CODED_HEADER + " ".join(listed) + CODED_QUESTION + CODED_PREFIX
            return Draft(text, CODED_PREFIX, tuple((word,) for word in expected), depths)

        if len(coded) < self.asked + 2:
            raise KvevalError(f"{room:,} tokens hold too few coded words to tell the frequent ones: ask for more")
        fixed = count_tokens(tokenizer, CODED_HEADER + CODED_QUESTION + CODED_PREFIX)
        used = coded[: int(sum(times > 0 for times in zeta_counts(room, len(coded))))]
        sizes = word_tokens(tokenizer, used)

        def estimate(count: int) -> float:
            return fixed + float(sizes @ np.asarray(zeta_counts(count, len(used))))

        low, high = 1, room  # a word takes a token at least
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if estimate(middle) <= FILL * room else (low, middle)
        return settled(tokenizer, make, room, low, (estimate(low) - fixed) / low)


def distinct(random: Random, common: int, *, written: bool) -> Iterator[str]:
    """Words without end, none twice. The first ``common`` are in no other one and no other one is in them.

    ``written``: the words of the lexicon come first. The others are made of syllables, six letters each.
    """
    words = _words(random, written)
    first: list[str] = []
    for word in words:
        if any(word in other or other in word for other in first):
            continue
        if len(first) < common:
            first.append(word)
        yield word


def _words(random: Random, written: bool) -> Iterator[str]:
    known = lexicon_words()
    if written:
        yield from random.sample(known, len(known))
    seen = set(known)
    while True:
        word = "".join(random.choice(letters) for letters in (_ONSETS, _VOWELS, _CODAS) * 2)
        if word not in seen:
            seen.add(word)
            yield word


@lru_cache(maxsize=1)
def lexicon_words() -> tuple[str, ...]:
    """The lexicon's words in lower case, four letters and more, sorted."""
    words = {word.lower() for word in (*KEY_ADJECTIVES, *KEY_NOUNS, *haystack_words())}
    return tuple(sorted(word for word in words if len(word) >= 4))


def coded_words(random: Random, count: int, letters: int) -> list[str]:
    """``count`` unlike strings of ``letters`` random lower-case letters."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(random.choices(ascii_lowercase, k=letters))] = None
    return list(words)


def zeta_counts(count: int, kinds: int) -> list[int]:
    """How often the k-th of ``kinds`` words comes: int(count / k^2 / zeta(2)), where zeta(2) is pi^2 / 6."""
    ranks = np.arange(1, kinds + 1, dtype=np.float64)
    return [int(times) for times in count * ranks**-2.0 / (pi**2 / 6)]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


FAMILIES: dict[str, Family] = {"cwe": CommonWords(), "fwe": FrequentWords()}
