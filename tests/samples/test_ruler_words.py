"""Common and frequent words: RULER's counts read back from the prompt, exact lengths, the same sample every time."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import islice
from math import pi
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_samples import TOKENIZERS, one_byte_a_token

from kveval.errors import KvevalError
from kveval.samples.ruler import fill, words
from kveval.samples.ruler.sample import Draft, Sample, count_tokens, sample

CASES = [
    (kind, name, length)
    for kind, name, lengths in [
        ("probe", "cwe", (1024, 2048, 4096, 8192)),
        ("gpt2", "cwe", (2048, 4096, 8192)),
        ("llama3", "cwe", (2048, 8192)),
        *((kind, "fwe", (1024, 2048, 4096, 8192)) for kind in TOKENIZERS),
    ]
    for length in lengths
]
ITEM = re.compile(r"(?<!\S)(\d+)\. (\S+)")


class Counting:
    """A tokenizer that keeps count of the tokens it was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        batch = self.tokenizer(*args, **options)
        rows = batch["input_ids"]
        self.tokens += sum(len(row) if isinstance(row, list) else 1 for row in rows)
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@cache
def made(kind: str, name: str, length: int, index: int = 0, reserve: int = 0) -> Sample:
    return sample(TOKENIZERS[kind](), words.FAMILIES[name], seed=3, length=length, index=index, reserve_tokens=reserve)


def lists(text: str) -> tuple[Counter[str], Counter[str]]:
    """Counts of the words of the example's list and of the list asked about; their numbers are checked."""
    parts = [part.split("\nQuestion")[0] for part in text.split(words.LIST_HEADER)[1:]]
    found = []
    for part in parts:
        items = ITEM.findall(part)
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        assert " ".join(f"{number}. {word}" for number, word in items) == part
        found.append(Counter(word for _, word in items))
    example, asked = found
    return example, asked


@pytest.mark.parametrize(("kind", "name", "length"), CASES)
def test_the_length_is_exact_and_used(kind: str, name: str, length: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    for reserve in (0, 40):
        built = made(kind, name, length, 0, reserve)
        tokens = len(tokenizer(built.draft.text, add_special_tokens=True)["input_ids"])
        assert built.tokens == tokens + reserve
        assert 0.98 * length <= built.tokens + built.budget_tokens <= length
    assert built.draft.text.endswith(built.draft.answer_prefix)


@pytest.mark.parametrize("kind", ["probe", "gpt2"])
@pytest.mark.parametrize("length", [4096, 8192])
def test_common_words_have_rulers_counts(kind: str, length: int) -> None:
    """synthetic.yaml: freq_cw 30, freq_ucw 3, num_cw 10; the example has 40 words, 10 of them 10 times, others 3."""
    for index in range(3):
        draft = made(kind, "cwe", length, index).draft
        example, asked = lists(draft.text)
        expected = [group[0] for group in draft.expected]
        assert len(expected) == 10
        assert {word for word, times in asked.items() if times == 30} == set(expected)
        assert set(asked.values()) == {3, 30}
        assert sorted(example.values()) == [3] * 30 + [10] * 10
        assert not set(example) & set(asked)


@pytest.mark.parametrize(("kind", "length"), [("probe", 1024), ("llama3", 2048)])
def test_shorter_prompts_have_rulers_shorter_lists(kind: str, length: int) -> None:
    """common_words_extraction.py under 4,096: 6 times and once; the example has 20 words, 3 times and once."""
    draft = made(kind, "cwe", length).draft
    example, asked = lists(draft.text)
    assert {word for word, times in asked.items() if times == 6} == {group[0] for group in draft.expected}
    assert set(asked.values()) == {1, 6}
    assert sorted(example.values()) == [1] * 10 + [3] * 10


def test_the_example_is_answered_rightly() -> None:
    draft = made("probe", "cwe", 4096).draft
    example, _ = lists(draft.text)
    shown = draft.text.split(words.LIST_HEADER)[1].split(words.LIST_PREFIX)[1]
    answer = ITEM.findall(shown)
    assert [int(number) for number, _ in answer] == list(range(1, 11))
    assert {word for _, word in answer} == {word for word, times in example.items() if times == 10}
    assert shown.endswith("\n\n")


@pytest.mark.parametrize("length", [4096, 131_072])
def test_no_common_word_is_in_another_word(length: int) -> None:
    draft = made("probe", "cwe", length).draft
    example, asked = lists(draft.text)
    for (word,) in draft.expected:
        assert not [other for other in (*asked, *example) if other != word and (word in other or other in word)]


def test_common_words_cover_the_list() -> None:
    draft = made("probe", "cwe", 8192).draft
    listed = [word for _, word in ITEM.findall(draft.text.split(words.LIST_HEADER)[2])]
    asked = {group[0] for group in draft.expected}
    places = [number / (len(listed) - 1) for number, word in enumerate(listed) if word in asked]
    tenths = Counter(min(int(10 * place), 9) for place in places)
    assert len(places) == 300
    assert min(tenths[tenth] for tenth in range(10)) >= 15  # 30 on average
    first = tuple(listed.index(word) / (len(listed) - 1) for (word,) in draft.expected)
    assert draft.depths == first


def zeta(count: int, kinds: int) -> list[int]:
    return [int(count * rank**-2.0 / (pi * pi / 6)) for rank in range(1, kinds + 1)]


@pytest.mark.parametrize(("kind", "name", "length"), [case for case in CASES if case[1] == "fwe"])
def test_frequent_words_have_the_counts_of_the_zeta_distribution(kind: str, name: str, length: int) -> None:
    """freq_words_extraction.py: int(n k^-2 / zeta(2)) of the k-th of (length - budget) // 50 words; the first is '...'."""
    for index in range(3):
        built = made(kind, name, length, index)
        draft = built.draft
        text = draft.text.removeprefix(words.CODED_HEADER).removesuffix(words.CODED_QUESTION + words.CODED_PREFIX)
        listed = text.split(" ")
        counts = Counter(listed)
        ranked = [word for word, _ in counts.most_common()]
        kinds = (built.length - built.budget_tokens - (kind == "llama3")) // 50
        number = next(n for n in range(len(listed), 2 * len(listed)) if sum(zeta(n, kinds)) >= len(listed))
        assert [counts[word] for word in ranked] == [times for times in zeta(number, kinds) if times]
        assert ranked[0] == "..."
        assert {group[0] for group in draft.expected} == set(ranked[1:4])
        assert [counts[group[0]] for group in draft.expected] == sorted((counts[w] for w in ranked[1:4]), reverse=True)
        assert counts[ranked[3]] > counts[ranked[4]]
        assert all(re.fullmatch(r"[a-z]{6}|\.\.\.", word) for word in ranked)
        assert draft.depths == tuple(listed.index(group[0]) / (len(listed) - 1) for group in draft.expected)


@pytest.mark.parametrize("name", list(words.FAMILIES))
def test_128k_is_tokenised_about_once(name: str) -> None:
    for kind in TOKENIZERS:
        counting = Counting(TOKENIZERS[kind]())
        built = sample(counting, words.FAMILIES[name], seed=3, length=131_072, index=0)
        assert counting.tokens < 1.5 * 131_072
        assert built.tokens + built.budget_tokens >= 0.98 * 131_072


def test_budgets_and_metrics_are_rulers() -> None:
    assert {name: (family.budget_tokens, family.any_of) for name, family in words.FAMILIES.items()} == {
        "cwe": (120, False),
        "fwe": (50, False),
    }


def test_a_sample_is_the_same_alone_and_in_any_order() -> None:
    order = [(name, index) for name in words.FAMILIES for index in range(3)]
    tokenizer = TOKENIZERS["probe"]()

    def hashes(asked: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
        return {
            (name, i): sample(tokenizer, words.FAMILIES[name], seed=0, length=4096, index=i).sha256 for name, i in asked
        }

    forth = hashes(order)
    assert hashes(order[::-1]) == forth
    assert hashes(order[4:5])[order[4]] == forth[order[4]]
    assert len(set(forth.values())) == len(order)


GOLDEN = {
    ("cwe", 2048): "10e6669a9aeb1b62",
    ("cwe", 8192): "c673882f05d723bc",
    ("fwe", 1024): "6746d7eb879456bb",
    ("fwe", 8192): "b3edbd03d7ac23ec",
}


@pytest.mark.parametrize(("name", "length"), GOLDEN)
def test_golden(name: str, length: int) -> None:
    built = sample(one_byte_a_token(), words.FAMILIES[name], seed=0, length=length, index=0)
    assert built.sha256[:16] == GOLDEN[name, length]


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [("cwe", 4096, r"30 times each.*ask for a longer"), ("fwe", 256, "too few coded words")],
)
def test_no_room(name: str, length: int, message: str) -> None:
    with pytest.raises(KvevalError, match=message):
        sample(one_byte_a_token(), words.FAMILIES[name], seed=0, length=length, index=0)


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=10, deadline=None)
def test_words_are_distinct_and_can_be_said(seed: int, written: bool) -> None:
    drawn = list(islice(words.distinct(Random(seed), 10, written=written), 3000))
    assert len(set(drawn)) == len(drawn)
    assert all(re.fullmatch("[a-z]{4,}", word) for word in drawn)
    assert (drawn[0] in words.lexicon_words()) == written
    made_up = [word for word in drawn if word not in words.lexicon_words()]
    assert all(re.fullmatch("([^aeiou][aeiou][^aeiou]){2}", word) for word in made_up)


@given(st.integers(0, 2**32), st.integers(0, 500))
@settings(max_examples=20, deadline=None)
def test_coded_words_are_unlike(seed: int, count: int) -> None:
    coded = words.coded_words(Random(seed), count, 6)
    assert len(set(coded)) == count
    assert all(re.fullmatch("[a-z]{6}", word) for word in coded)


def test_zeta_counts() -> None:
    """1000 / zeta(2) = 607.93; a quarter of it is 151.98, a ninth 67.55, a sixteenth 38.00 (37.995)."""
    assert words.zeta_counts(1000, 5) == [607, 151, 67, 37, 24]


@pytest.mark.parametrize("kind", list(TOKENIZERS))
def test_estimates_are_near_what_is_counted(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    told = [str(number) + "." for number in range(1, 3001)]
    whole = count_tokens(tokenizer, "".join(f" {number}" for number in told))
    assert fill.number_tokens(tokenizer, 3000)[3000] == pytest.approx(whole, rel=0.01)
    assert fill.word_tokens(tokenizer, told).sum() == whole


def test_settled_corrects_a_wrong_count_and_gives_up_where_none_fits() -> None:
    def make(count: int) -> Draft:
        return Draft("x" * (5 * count), "x", (("x",),), (0.0,))

    for first in (1, 50, 500):
        draft, tokens = fill.settled(one_byte_a_token(), make, 1000, first, 5.0)
        assert 985 <= tokens == len(draft.text) <= 1000
    with pytest.raises(KvevalError, match="do not fit into 4 tokens"):
        fill.settled(one_byte_a_token(), make, 4, 3, 5.0)
