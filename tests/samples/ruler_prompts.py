"""RULER's prompts as a reader finds them: built once each, needles read from the text, places read from the token ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from test_samples import one_byte_a_token, trained

from kveval.probe.tokenizer import build_tokenizer
from kveval.samples.ruler import hard, niah, vt
from kveval.samples.ruler.sample import Family, Sample, sample

FAMILIES: dict[str, Family] = {**niah.FAMILIES, **vt.FAMILIES, **hard.FAMILIES_HARD}
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "probe": cache(build_tokenizer),
    "gpt2": lambda: trained("gpt2"),
    "llama3": lambda: trained("llama3"),
    "bytes": one_byte_a_token,
}
VALUE = r"\d{7}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_NEEDLE = re.compile(rf"(?:The|One) access code of (\S+(?: \S+){{0,2}}) is ({VALUE})\.")


@cache
def built(task: str, tokenizer: str = "probe", length: int = 2048, index: int = 0) -> Sample:
    """Sample ``index`` of seed 0. The probe reads generated prose, whose words it knows."""
    family = in_noise(task) if tokenizer == "probe" else FAMILIES[task]
    return sample(TOKENIZERS[tokenizer](), family, seed=0, length=length, index=index)


def in_noise(task: str) -> Family:
    """The family with generated prose where it would take Python's documentation, which differs between Pythons."""
    family: Any = FAMILIES[task]
    return replace(family, haystack="noise") if family.haystack == "auto" else family


def context_and_question(text: str) -> tuple[str, str]:
    """What is read, headers and examples included, and what is asked about it."""
    at = text.rindex("\n\nQuestion: ")
    return text[:at], text[at:]


def needles(text: str) -> list[tuple[str, str]]:
    """(key, value) of each needle, in the order of the text."""
    return _NEEDLE.findall(text)


def first_token(tokenizer: Any, ids: list[int], passage: str) -> int:
    """The last token from which on the decoded text still holds the passage: the one that the passage begins in."""
    low, high = 0, len(ids)
    while high - low > 1:
        middle = (low + high) // 2
        if passage in tokenizer.decode(ids[middle:], clean_up_tokenization_spaces=False):
            low = middle
        else:
            high = middle
    return low
