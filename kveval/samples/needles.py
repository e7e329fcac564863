"""Needles: a key (two words), a value (seven digits), the sentence that says so and the question that asks for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from kveval.errors import KvevalError
from kveval.samples.lexicon import KEY_ADJECTIVES, KEY_NOUNS, NEEDLE, QUESTION

TASK = "kveval_needle_grid"
UNTIL = ("\n", ".")  # an answer ends here
ANSWER_TOKENS = 12  # room for an answer: " 1,234,567." at one token a character, and one to spare
_SEVEN_DIGITS = re.compile(r"(?<!\d)\d{7}(?!\d)")


@dataclass(frozen=True)
class Needle:
    """A planted needle, from its first letter to the last digit of its value (the full stop behind it is not in it).

    Tokens ``first``..``last``, both included, in the context's ids; characters ``start``..``end``, end excluded.
    """

    key: str
    value: str
    first: int
    last: int
    start: int
    end: int


def needle_text(key: str, value: str) -> str:
    """The sentence that is planted, with its leading space."""
    return NEEDLE.format(key=key, value=value)


def question_text(key: str) -> str:
    """What is asked after the context; the answer goes on from its last word."""
    return QUESTION.format(key=key)


def draw(seed: int, context: int, count: int, text: str) -> list[tuple[str, str]]:
    """The first ``count`` (key, value) pairs of a context: keys and values are unique and none of them is in ``text``.

    Raises KvevalError when there are not so many keys.
    """
    random = Random(f"{seed}:{TASK}:{context}:keys")
    keys = [f"{adjective} {noun}" for adjective, noun in product(KEY_ADJECTIVES, KEY_NOUNS)]
    if count > len(keys):
        raise KvevalError(
            f"{count:,} needles are more than the {len(keys):,} keys: lower needles_per_cell, depths or lengths"
        )
    random.shuffle(keys)
    unseen = (key for key in keys if key not in text)
    chosen = [key for key, _ in zip(unseen, range(count), strict=False)]
    if len(chosen) < count:
        raise KvevalError("the haystack holds too many of the needles' keys: use another haystack")
    random = Random(f"{seed}:{TASK}:{context}:values")
    taken = set(_SEVEN_DIGITS.findall(text))
    values: list[str] = []
    while len(values) < count:
        value = str(random.randrange(1_000_000, 10_000_000))
        if value not in taken:
            taken.add(value)
            values.append(value)
    return list(zip(chosen, values, strict=True))


def generation_budget(tokenizer: Any) -> int:
    """Tokens to generate for an answer: the longest writing of a value with this tokenizer and one more, at most 12."""
    values = range(1_000_003, 10_000_000, 290_161)  # 32 values with varied digits
    texts = [form for value in values for form in (f" {value}.", f" {value:,}.")]
    longest = max(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    return min(longest + 1, ANSWER_TOKENS)
