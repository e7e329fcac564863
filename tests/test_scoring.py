"""Scoring against case 9 of the public cases and the edges around it."""

from __future__ import annotations

import pytest

from kveval.samples.scoring import numbers, score, status, visible

EXPECTED = "1234567"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("81234567", 0.0),
        ("12345678", 0.0),
        ("1,234,567", 1.0),
        ("1234567.", 1.0),
        ("<think>1234567</think>7654321", 0.0),
    ],
)
def test_public_case_9(answer: str, right: float) -> None:
    assert score(EXPECTED, answer) == right


@pytest.mark.parametrize(
    "answer",
    [
        " 1234567",
        "**1234567**",
        "it is 7654321 or 1234567",
        "12, 1234567",
        "1_234_567",
        "1\u00a0234\u202f567",
        "1'234'567",
    ],
)
def test_value_within_other_text(answer: str) -> None:
    assert score(EXPECTED, answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "one million",
        "1234567.5",
        "0.1234567",
        "1,234,5678",
        "81,234,567",
        "1,234,567,890",
        "12345671234567",
        "123 4567",
    ],
)
def test_other_numbers(answer: str) -> None:
    assert score(EXPECTED, answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("<think>1234567", 0.0),  # never closed
        ("1234567</think> 7654321", 0.0),  # opened by the chat template
        ("<think>what was it?</think> 1234567", 1.0),
        ("<THINK>1234567</THINK>", 0.0),
        ("1234567 <think>or 7654321", 1.0),
        ("<think>a</think>1234567<think>b</think>", 1.0),
    ],
)
def test_thoughts_never_count(answer: str, right: float) -> None:
    assert score(EXPECTED, answer) == right


def test_visible_and_numbers() -> None:
    assert visible("<think>5</think> 6 <think>7") == " 6 "
    assert numbers("10 of 1,000, not 2.5 or 12,34") == ["10", "1000", "2.5", "12", "34"]


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (" 1234567", "incomplete"),  # one more digit would make it another number
        (" 12345", "incomplete"),
        (" 1,234,", "incomplete"),
        ("12, 1234567", "incomplete"),
        ("<think>it is 1234567", "incomplete"),
        ("<think>a</think><think>b", "incomplete"),
        (" 1234567 and 1", "scored"),  # the value stands before the cut
        (" 7654321", "scored"),  # whatever follows, it is another number
        (" the the the the", "scored"),
        ("", "scored"),
    ],
)
def test_status_of_answers_cut_by_the_length_limit(answer: str, state: str) -> None:
    assert status(answer, "length", EXPECTED) == state


@pytest.mark.parametrize("reason", ["stop", "eos"])
def test_answers_that_ended_by_themselves_are_scored(reason: str) -> None:
    assert status("<think>1234567", reason, EXPECTED) == status(" 12345", reason, EXPECTED) == "scored"
