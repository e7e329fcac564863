"""Is what was expected in the answer? By value and by whole words, and as RULER's own tables have it, by substring."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from kveval.samples import scoring

_NUMBER = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+")
_EDGES = re.compile(r"\A[^\w]+|[^\w]+\Z")  # punctuation and white space around a string


def score(expected: Sequence[Sequence[str]], answer: str, any_of: bool) -> float:
    """The share (0..1) of ``expected``'s groups that the answer holds; with ``any_of``, 1.0 when it holds any string at all.

    One string of a group is enough for it. Numbers count by value, other strings as whole words in any case; the text
    of <think> blocks never counts. Stricter than ``ruler_score`` only where a string is a part of a longer word or number.

    >>> score([["1234567"], ["amber falcon"]], "Amber falcon, and 81234567.", any_of=False)
    0.5
    """
    text = scoring.visible(answer)
    return _share([any(_holds(text, string) for string in group) for group in expected], any_of)


def ruler_score(expected: Sequence[Sequence[str]], answer: str, any_of: bool) -> float:
    """One sample's share (0..1) by NVIDIA's string_match_all or, with ``any_of``, string_match_part.

    Any case, anywhere in the answer, thoughts and longer numbers included (RULER, scripts/eval/synthetic/constants.py).
    """
    text = answer.lower()
    return _share([any(string.lower() in text for string in group) for group in expected], any_of)


def status(answer: str, finish_reason: str, expected: Sequence[Sequence[str]], any_of: bool) -> str:
    """``scored``, or ``incomplete`` when the length limit (``finish_reason == "length"``) cut off what would decide.

    Cut within a thought: incomplete. Cut where the answer's last words are, so far, an expected string (or the whole of
    it: one more letter would make it another word) that is not in the answer before them: incomplete. Any other cut
    answer had room for what was expected and used it for something else (see ``kveval.samples.scoring.status``).
    """
    if finish_reason != "length":
        return "scored"
    lowered = answer.lower()
    if lowered.rfind("<think>") > lowered.rfind("</think>"):
        return "incomplete"
    text = scoring.visible(answer)
    states = [{_state(text, string) for string in group} for group in expected]
    if any_of:
        states = [set().union(*states)]
    return "incomplete" if any("held" not in group and "begun" in group for group in states) else "scored"


def _share(found: Sequence[bool], any_of: bool) -> float:
    if not found:
        return 0.0
    return float(any(found)) if any_of else sum(found) / len(found)


def _holds(text: str, string: str) -> bool:
    if _NUMBER.fullmatch(string.strip()):
        return string.strip().replace(",", "") in scoring.numbers(text)
    return _pattern(string).search(text) is not None


def _state(text: str, string: str) -> str:
    """Of an answer that was cut: it held ``string`` before its end, its end is the beginning of it, or neither."""
    if _NUMBER.fullmatch(string.strip()):
        value = string.strip().replace(",", "")
        if scoring.status(text, "length", value) == "incomplete":
            return "begun"
        return "held" if value in scoring.numbers(text) else "missing"
    if any(match.end() < len(text) for match in _pattern(string).finditer(text)):
        return "held"
    end, begun = " ".join(text.split()) + " " * text[-1:].isspace(), " ".join(_bare(string).split())
    for size in range(min(len(begun), len(end)), 0, -1):
        if end[-size:].casefold() == begun[:size].casefold() and not re.search(r"\w\Z", end[:-size]):
            return "begun"
    return "missing"


def _bare(string: str) -> str:
    """Without punctuation around it, unless it is nothing but punctuation."""
    return _EDGES.sub("", string) or string.strip()


@lru_cache(maxsize=4096)
def _pattern(string: str) -> re.Pattern[str]:
    """Whole words, any white space between them. In a string with hyphens (a UUID) a hyphen goes on with the word."""
    bare = _bare(string)
    words = r"\s+".join(re.escape(word) for word in bare.split())
    before, after = (r"(?<!\w)(?<!\w-)", r"(?!\w|-\w)") if "-" in bare else (r"(?<!\w)", r"(?!\w)")
    return re.compile(before + words + after, re.IGNORECASE)
