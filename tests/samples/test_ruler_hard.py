"""Hard needles: look-alikes that differ a little and always, in groups that share nothing."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from ruler_prompts import TOKENIZERS, built, context_and_question, needles

from kveval.samples.ruler import hard
from kveval.samples.ruler.sample import sample


def differing(first: str, second: str) -> int:
    """In how many places two texts of one length differ."""
    return sum(a != b for a, b in zip(first, second, strict=True))


def parts_differing(first: str, second: str) -> int:
    """In how many of their three parts two keys differ."""
    return sum(a != b for a, b in zip(first.split(), second.split(), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_alike_inside_and_share_nothing(seed: int) -> None:
    groups = hard.alike(Random(seed), 4)
    assert [len(group) for group in groups] == [8] * 4
    for group in groups:
        keys, values = zip(*group, strict=True)
        assert all(re.fullmatch(r"[a-z]+ [a-z]+ [1-9]\d", key) for key in keys)
        assert all(re.fullmatch(r"[1-9]\d{6}", value) for value in values)
        assert len(set(keys)) == len(set(values)) == 8
        # All eight keys of two words for each part: of any one, three likes differ in a part, three in two, one in all.
        for key in keys:
            assert sorted(parts_differing(key, other) for other in keys if other != key) == [1, 1, 1, 2, 2, 2, 3]
        # One of the values, wherever it was put, is one digit away from all others, which are at most two apart.
        assert any(all(differing(centre, value) == 1 for value in values if value != centre) for centre in values)
        assert all(1 <= differing(*pair) <= 2 for pair in combinations(values, 2))
        assert len({value[3:] for value in values}) == 1
    for first, second in combinations(groups, 2):
        assert not words(first) & words(second)
        assert not {value[3:] for _, value in first} & {value[3:] for _, value in second}


def words(group: list[tuple[str, str]]) -> set[str]:
    """Words and numbers of a group's keys, and its values."""
    return {part for key, value in group for part in (*key.split(), value)}


def test_any_of_the_eight_may_be_asked_for() -> None:
    """The asked needle is not always the one that all others' values were made from."""
    centres = 0
    for seed in range(80):
        ((_, asked), *others) = hard.alike(Random(seed), 1)[0]
        centres += all(differing(asked, value) == 1 for _, value in others)
    assert 1 <= centres <= 40


def test_a_number_of_the_haystack_is_in_no_needle() -> None:
    plain = hard.alike(Random(3), 2)
    key, value = plain[1][4]
    for text in (f"Once there was {key}.", f"Then there were {value} of them."):
        other = hard.alike(Random(3), 2, text)
        assert other != plain
        assert not any(part in text for group in other for pair in group for part in pair)
        assert hard.alike(Random(3), 2, "nothing of the kind") == plain


def test_the_haystack_that_is_read_is_the_one_looked_in(tmp_path: Path) -> None:
    """The same sample over a haystack that holds its answer has another answer."""
    answers, number = [], "none"
    for name in ("plain.txt", "taken.txt"):
        (tmp_path / name).write_text(f"The number of the house is {number}. The road is long. " * 50, encoding="utf-8")
        family = hard.HardNeedle(haystack=str(tmp_path / name))
        made = sample(TOKENIZERS["gpt2"](), family, seed=0, length=2048, index=0)
        ((number,),) = made.draft.expected
        answers.append(number)
        assert made.draft.text.count(number) == 1
    assert answers[0] != answers[1]


@pytest.mark.parametrize("name", ["probe", "gpt2", "llama3"])
def test_one_of_four_groups_is_asked_about(name: str) -> None:
    for index in range(6):
        made = built("needle_hard", name, 4096, index)
        context, question = context_and_question(made.draft.text)
        found = dict(needles(context))
        assert len(needles(context)) == len(found) == 32 == len(set(found.values()))
        (asked,) = [key for key in found if key in question]
        assert made.draft.expected == ((found[asked],),)
        assert question.count(asked) == 2
        likes = [key for key in found if parts_differing(key, asked) < 3]
        assert len(likes) == 7  # the asked one, and six that share a part with it; the seventh shares none
        assert len({value[3:] for value in found.values()}) == 4
        group = [value for value in found.values() if value[3:] == found[asked][3:]]
        assert len(group) == 8
        assert made.draft.text.count(found[asked]) == 1


def test_needles_are_spread_over_the_text_whichever_is_asked() -> None:
    for index in range(5):
        context, _ = context_and_question(built("needle_hard", "probe", 8192, index).draft.text)
        at = [match.start() / len(context) for match in re.finditer("The access code of", context)]
        eighths = [sum(int(8 * place) == eighth for place in at) for eighth in range(8)]
        assert sum(eighths) == 32
        assert max(eighths) <= 7
        assert min(eighths) >= 1


def test_likes_of_the_asked_needle_are_not_all_on_one_side() -> None:
    """Whether the asked needle is before or after its likes must not say which one it is."""
    before = 0
    for index in range(20):
        context, _ = context_and_question(built("needle_hard", "probe", 2048, index).draft.text)
        asked = built("needle_hard", "probe", 2048, index).draft.expected[0][0]
        group = [value for _, value in needles(context) if value[3:] == asked[3:]]
        before += group.index(asked)
    assert 40 <= before <= 100  # 70 of 140 were they anywhere


def test_tokenizers_agree_on_the_needles() -> None:
    """What is planted does not depend on how it is tokenised."""
    found = {tuple(sorted(needles(built("needle_hard", name, 4096, 1).draft.text))) for name in TOKENIZERS}
    assert len(found) == 1
