"""Scores of RULER's answers: by value and whole words, and RULER's own string match beside it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.samples.ruler.score import ruler_score, score, status

UUID = "0f47ac1b-58cc-4372-a567-0e02b2c3d479"
Groups = Sequence[Sequence[str]]


def string_match_all(preds: Sequence[str], refs: Sequence[Sequence[str]]) -> float:
    """RULER, scripts/eval/synthetic/constants.py, in words: the mean share of the references in the prediction, in %."""
    shares = [sum(ref.lower() in pred.lower() for ref in own) / len(own) for pred, own in zip(preds, refs, strict=True)]
    return round(100 * sum(shares) / len(shares), 2)


def string_match_part(preds: Sequence[str], refs: Sequence[Sequence[str]]) -> float:
    """As above: the share of predictions with any of their references in them, in %."""
    hits = [any(ref.lower() in pred.lower() for ref in own) for pred, own in zip(preds, refs, strict=True)]
    return round(100 * sum(hits) / len(hits), 2)


# (expected strings, answer): ordinary answers of models, on which whole words and substrings agree
ALL = [
    (["7154203"], " 7154203."),
    (["7154203"], " 7154204, I think."),
    (["1111111", "2222222", "3333333", "4444444"], " 1111111, 2222222, and 4444444"),
    ([UUID], f" {UUID.upper()}.\n"),
    (["QWERT", "ASDFG", "ZXCVB", "POIUY", "LKJHG"], "QWERT ASDFG POIUY"),
    (["falcon", "harbour", "meadow"], "1. falcon 2. Meadow\n3. river"),
    (["kdjwoa", "ppqmze", "wnvyth"], "kdjwoa, ppqmze, wnvyth"),
    (["kdjwoa"], ""),
]
PART = [
    (["France", "in France", "the north of France"], "France"),
    (["10th and 11th centuries"], "In the 10th  and 11th centuries."),
    (["Denmark, Iceland and Norway", "Denmark"], "They came from Denmark, Iceland\nand Norway."),
    (["yes"], "Yes, both were."),
    (["Chief of Protocol"], "the chief of protocol"),
    (["St. Peter's"], "It is St. Peter's!"),
    (["Rollo"], "It is not told."),
]


@pytest.mark.parametrize(("pairs", "any_of"), [(ALL, False), (PART[:1] + PART[2:], True)])
def test_equals_rulers_metric_on_ordinary_answers(pairs: list[tuple[list[str], str]], any_of: bool) -> None:
    metric = string_match_part if any_of else string_match_all
    for refs, answer in pairs:
        groups = [refs] if any_of else [[ref] for ref in refs]
        assert 100 * ruler_score(groups, answer, any_of) == pytest.approx(metric([answer], [refs]), abs=0.01)
        assert score(groups, answer, any_of) == ruler_score(groups, answer, any_of), (refs, answer)
    ours = [score([refs] if any_of else [[ref] for ref in refs], answer, any_of) for refs, answer in pairs]
    published = metric([answer for _, answer in pairs], [refs for refs, _ in pairs])
    assert 100 * sum(ours) / len(ours) == pytest.approx(published, abs=0.01)


def test_one_of_three_aliases_is_a_hit() -> None:
    """lm-eval 0.4.13 gives 0.333 here."""
    groups = [["France", "in France", "the north of France"]]
    assert score(groups, "France", any_of=True) == ruler_score(groups, "France", any_of=True) == 1.0
    assert score([["one"], ["two"], ["three"]], "two", any_of=True) == 1.0


@pytest.mark.parametrize(
    ("string", "answer", "ours", "rulers"),
    [
        # Stricter than RULER: a part of a longer number or word is another number or word, a thought is no answer.
        ("1234567", "81234567", 0.0, 1.0),
        ("1234567", "12345678", 0.0, 1.0),
        ("1234567", "1234567.5", 0.0, 1.0),
        ("1234567", "<think>1234567</think>7654321", 0.0, 1.0),
        ("falcon", "<think>falcon, no", 0.0, 1.0),
        ("owl", "a bowl", 0.0, 1.0),
        ("ABCDE", "ABCDEF", 0.0, 1.0),
        (UUID, f"{UUID}-00", 0.0, 1.0),
        ("no", "nobody", 0.0, 1.0),
        # More lenient: the same value or words, written otherwise.
        ("1234567", "1,234,567", 1.0, 0.0),
        ("1234567", "1234567.", 1.0, 1.0),
        ("10,000", "10000 men", 1.0, 0.0),
        ("Denmark, Iceland", "Denmark,\n  Iceland", 1.0, 0.0),
        ('"Treaty of Paris".', "the Treaty of Paris", 1.0, 0.0),
        ("amber falcon", "Amber Falcon", 1.0, 1.0),
        ("French", "French-speaking", 1.0, 1.0),
        ("a.c", "abc", 0.0, 0.0),
        ("$", "in $", 1.0, 1.0),
    ],
)
def test_where_it_differs_from_rulers(string: str, answer: str, ours: float, rulers: float) -> None:
    assert score([[string]], answer, any_of=False) == ours
    assert ruler_score([[string]], answer, any_of=False) == rulers


def test_shares_of_groups() -> None:
    groups = [["one", "first"], ["two"], ["3"], ["4"]]
    assert score(groups, "first, and 3 and 44", any_of=False) == 0.5
    assert score([], "anything", any_of=False) == score([], "anything", any_of=True) == 0.0


@pytest.mark.parametrize(
    ("answer", "groups", "any_of", "expected"),
    [
        ("<think>let me", [["falcon"]], False, "incomplete"),
        ("<think>let me</think> no", [["falcon"]], False, "scored"),
        ("it is fal", [["falcon"]], False, "incomplete"),
        ("it is falcon", [["falcon"]], False, "incomplete"),  # perhaps falconer
        ("it is falcon.", [["falcon"]], False, "scored"),
        ("falcon and fal", [["falcon"]], False, "scored"),
        ("it is Amber ", [["amber falcon"]], False, "incomplete"),
        ("an owl and the", [["falcon"]], False, "scored"),
        ("an owl or a half", [["falcon"]], False, "scored"),
        ("123", [["1234567"]], False, "incomplete"),
        ("1,234,567", [["1234567"]], False, "incomplete"),
        ("1234567 and 12", [["1234567"]], False, "scored"),
        ("1234567 and 12", [["1234567"], ["1299999"]], False, "incomplete"),
        ("France or Den", [["France"], ["Denmark"]], True, "scored"),
        ("Germany or Den", [["France", "Denmark"]], True, "incomplete"),
        (UUID[:20], [[UUID]], False, "incomplete"),
        ("", [["falcon"]], False, "scored"),
    ],
)
def test_status_of_a_cut_answer(answer: str, groups: Groups, any_of: bool, expected: str) -> None:
    assert status(answer, "length", groups, any_of) == expected
    assert status(answer, "stop", groups, any_of) == "scored"


WORDS = st.text(st.sampled_from("abcXYZ 019-.,"), min_size=1, max_size=12).filter(lambda text: text.strip(" -.,") != "")


@given(WORDS, st.sampled_from(["", " ", "\n", '"', "(", "It is "]), st.sampled_from(["", ".", "\n", ")", ", I think"]))
@settings(deadline=None)
def test_what_is_told_as_expected_is_found(string: str, before: str, after: str) -> None:
    numeric = string.strip(" -.,").replace(",", "").replace(".", "").replace("-", "").replace(" ", "").isdigit()
    if not numeric:
        assert score([[string]], before + string + after, any_of=False) == 1.0


@given(st.text(), st.lists(st.lists(st.text(min_size=1), min_size=1), min_size=1), st.booleans())
@settings(deadline=None)
def test_any_text_has_a_score_and_a_status(answer: str, groups: Groups, any_of: bool) -> None:
    assert 0.0 <= score(groups, answer, any_of) <= 1.0
    assert status(answer, "length", groups, any_of) in ("scored", "incomplete")


@given(st.from_regex(r"[a-z]{3,8}( [a-z]{3,8})?", fullmatch=True), st.integers(1, 20))
@settings(deadline=None)
def test_every_cut_within_the_expected_words_is_incomplete(string: str, size: int) -> None:
    assert status("They are: " + string[:size], "length", [[string]], False) == "incomplete"
