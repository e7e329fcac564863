"""Is the value in the answer? Scores 0 or 1, and the status of answers that were cut before they could tell."""

from __future__ import annotations

import re

# A closed thought and one that never closes; then one that a chat template opened before the answer began.
_THOUGHTS = re.compile(r"<think>.*?</think>|<think>.*\Z", re.DOTALL | re.IGNORECASE)
_OPENED_BEFORE = re.compile(r"\A.*</think>", re.DOTALL | re.IGNORECASE)
_UNCLOSED = re.compile(r"<think>(?!.*</think>)", re.DOTALL | re.IGNORECASE)
_BETWEEN = ",_'\u2019\u00a0\u202f "  # thousands separators
# A number with or without thousands separators. Decimals belong to it: 1234567.5 and 0.1234567 are other numbers.
_NUMBER = re.compile(
    rf"(?<![0-9])(?<![0-9][.])(?:[0-9]{{1,3}}(?:[{_BETWEEN}][0-9]{{3}})+|[0-9]+)(?![0-9])(?:[.][0-9]+)?"
)
_AT_END = re.compile(rf"(?<![0-9])(?=([0-9][0-9{_BETWEEN}]*)\Z)")
_SEPARATOR = re.compile(rf"[{_BETWEEN}]")


def visible(answer: str) -> str:
    """``answer`` without what was only thought (<think> blocks, closed or not)."""
    return _OPENED_BEFORE.sub("", _THOUGHTS.sub("", answer))


def numbers(text: str) -> list[str]:
    """The numbers written in ``text``, without thousands separators: ``"1,234,567."`` holds ``1234567``."""
    return [_SEPARATOR.sub("", match[0]) for match in _NUMBER.finditer(text)]


def score(expected: str, answer: str) -> float:
    """1.0 when the number ``expected`` (digits only) stands in ``answer`` as a whole number outside thoughts, else 0.0.

    >>> [score("1234567", text) for text in (" 1234567.", "1,234,567", "81234567", "<think>1234567</think>7654321")]
    [1.0, 1.0, 0.0, 0.0]
    """
    return float(expected in numbers(visible(answer)))


def status(answer: str, finish_reason: str, expected: str) -> str:
    """``scored``, or ``incomplete`` when the length limit (``finish_reason == "length"``) cut off what would decide.

    Cut within a thought: incomplete. Cut within a number that is ``expected`` so far, be it the whole of it (one more
    digit would make it another number): incomplete, unless the value stands before it too. Any other cut answer has had
    room for the value (generation_budget) and used it for something else: it is scored, so that a format which ruins a
    model cannot hide behind answers without an end.
    """
    if finish_reason != "length":
        return "scored"
    if _UNCLOSED.search(answer):
        return "incomplete"
    text = visible(answer)
    for match in _AT_END.finditer(text):
        begun = _SEPARATOR.sub("", match[1])
        if expected.startswith(begun) and expected not in numbers(text[: match.start()]):
            return "incomplete"
    return "scored"
