"""RULER's recipe for niah_multikey_1 done again, from what its authors say of it, and compared sample by sample.

Hsieh et al. 2024, section 3.1 and appendix B: a haystack of sentences; four needles, each of which gives a key of an
adjective and a noun a number of seven digits, between its sentences; one key is asked for and its number is the answer.
The haystack is as long as the length leaves room for, the tokens of the answer (128) counted in. Nothing of kveval is used
here but the samples.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from ruler_prompts import TOKENIZERS

from kveval.samples.ruler.niah import Niah
from kveval.samples.ruler.sample import Sample, sample

KEYS, ANSWER_TOKENS = 4, 128
LENGTHS = (4096, 8192, 16_384, 32_768)
PLACES = "barn attic cellar chapel harbour kitchen library market orchard station".split()
BOOK = [
    f"Page {n} tells of a cupboard in the {PLACES[n % 10]} beneath a broken {PLACES[n // 10 % 10]}." for n in range(700)
]


@dataclass(frozen=True)
class Read:
    """What a reader finds in a prompt: ``sentences`` of the haystack, with the white space before each; ``needles``: key,
    value, and the number of sentences before it."""

    header: str
    sentences: list[str]
    needles: list[tuple[str, str, int]]
    question: str
    asked: str

    def prompt(self, sentences: list[str]) -> str:
        """The prompt with another haystack, each needle as deep in it as it is in its own."""
        told = [f" The access code of {key} is {value}." for key, value, _ in self.needles]
        places = [round(before / len(self.sentences) * len(sentences)) for _, _, before in self.needles]
        parts = list(sentences)
        for place, needle in sorted(zip(places, told, strict=True), reverse=True):
            parts.insert(place, needle)
        return self.header + "".join(parts) + self.question

    def answers(self) -> list[str]:
        """The values of the asked key."""
        return [value for key, value, _ in self.needles if key == self.asked]


def read(prompt: str) -> Read:
    """The prompt taken apart; fails when there is anything else in it."""
    match = re.fullmatch(r"([^\n]*\n)(.*)(\n\nQuestion: .*of ([a-z]+ [a-z]+)\?\nAnswer: .*)", prompt, re.DOTALL)
    assert match is not None
    sentences: list[str] = []
    needles: list[tuple[str, str, int]] = []
    for sentence in re.findall(r"[^.]+\.", match[2]):
        needle = re.fullmatch(r" The access code of ([a-z]+ [a-z]+) is (\d{7})\.", sentence)
        if needle:
            needles.append((needle[1], needle[2], len(sentences)))
        else:
            sentences.append(sentence)
    return Read(match[1], sentences, needles, match[3], match[4])


def haystack_by_recipe(found: Read, tokenizer: Any, length: int) -> list[str]:
    """The longest haystack that goes on from the prompt's first sentence and leaves room for all else: by bisection."""

    def tokens(count: int) -> int:
        prompt = found.prompt(book_from(found.sentences[0], count))
        return len(tokenizer(prompt, verbose=False)["input_ids"])

    low, high = 1, length // 15  # no sentence takes fewer tokens
    assert tokens(high) + ANSWER_TOKENS > length
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) + ANSWER_TOKENS <= length else (low, middle)
    return book_from(found.sentences[0], low)


def book_from(sentence: str, count: int) -> list[str]:
    """``count`` sentences of the book from this one on, round and round, each with a space before it."""
    start = BOOK.index(sentence.strip())
    return [" " + one for one in islice(cycle(BOOK), start, start + count)]


def is_the_book(sentences: list[str]) -> bool:
    """Whether no sentence is missing, changed or doubled, whatever white space is before each."""
    wanted = book_from(sentences[0], len(sentences))
    return [one.strip() for one in sentences] == [one.strip() for one in wanted]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("book") / "book.txt"
    file.write_text(" ".join(BOOK), encoding="utf-8")
    return file


def made(book: Path, tokenizer: Any, length: int, index: int) -> Sample:
    return sample(tokenizer, Niah("niah_multikey_1", str(book), keys=KEYS), seed=0, length=length, index=index)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["probe", "gpt2", "llama3"])
def test_samples_are_those_of_the_recipe(name: str, length: int, book: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    for index in range(3 if length <= 8192 else 1):
        ours = made(book, tokenizer, length, index)
        found = read(ours.draft.text)

        # Counts: four needles, all of them with a key and a value of their own; no sentence is lost, changed or doubled.
        assert len(found.needles) == KEYS
        assert len({key for key, _, _ in found.needles}) == len({value for _, value, _ in found.needles}) == KEYS
        assert is_the_book(found.sentences)
        assert found.prompt(found.sentences) == ours.draft.text

        # Answers: what the asked key's needle says, and nothing else.
        assert [(value,) for value in found.answers()] == list(ours.draft.expected)
        assert found.question.endswith(f" The access code of {found.asked} is")
        assert ours.draft.answer_prefix == f" The access code of {found.asked} is"

        # Length: as many sentences as the recipe finds room for, but for 2 % of the length.
        assert ours.budget_tokens == ANSWER_TOKENS
        assert ours.tokens == len(tokenizer(ours.draft.text, verbose=False)["input_ids"])
        best = haystack_by_recipe(found, tokenizer, length)
        each = ours.tokens / len(found.sentences)
        assert 0 <= len(best) - len(found.sentences) <= 0.02 * length / each

        # Depths: the needles lie where the recipe puts them, between sentences; the asked one where the sample says.
        total = len(found.sentences)
        (before,) = [place for key, _, place in found.needles if key == found.asked]
        assert abs(before - ours.draft.depths[0] * total) <= max(2, 0.02 * total)
        assert len({place for _, _, place in found.needles}) == KEYS


def test_depths_of_all_needles_are_spread_as_the_recipes(book: Path) -> None:
    """RULER draws each needle's depth from 40 even ones: the mean is a half and every quarter is met as often."""
    asked: list[float] = []
    all_depths: list[float] = []
    for index in range(40):
        found = read(made(book, TOKENIZERS["gpt2"](), 4096, index).draft.text)
        depths = {key: before / len(found.sentences) for key, _, before in found.needles}
        asked.append(depths[found.asked])
        all_depths += depths.values()
    for depths_found in (asked, all_depths):
        share = len(depths_found) / 4
        quarters = [sum(int(min(depth, 0.999) * 4) == quarter for depth in depths_found) for quarter in range(4)]
        assert all(abs(count - share) <= 0.2 * share for count in quarters), quarters
        assert sum(depths_found) / len(depths_found) == pytest.approx(0.5, abs=0.03)
    assert min(asked) < 0.05
    assert max(asked) > 0.95


def test_keys_and_order_of_needles_vary(book: Path) -> None:
    """The asked needle is as often the first, second, third and last of the four."""
    places, keys = [], set()
    for index in range(40):
        found = read(made(book, TOKENIZERS["gpt2"](), 4096, index).draft.text)
        order = [key for key, _, _ in found.needles]
        places.append(order.index(found.asked))
        keys.update(order)
    assert all(8 <= places.count(place) <= 12 for place in range(KEYS)), places
    assert len(keys) == 160


def test_the_recipe_tells_a_wrong_sample(book: Path) -> None:
    """A prompt with a needle more, a sentence less or another answer is not taken for one of the recipe's."""
    text = made(book, TOKENIZERS["probe"](), 4096, 0).draft.text
    found = read(text)
    middle = found.sentences[len(found.sentences) // 2]
    more = read(text.replace(middle, f"{middle} The access code of green table is 1234567.", 1))
    assert len(more.needles) == KEYS + 1
    fewer = read(text.replace(middle, "", 1))
    assert is_the_book(found.sentences)
    assert not is_the_book(fewer.sentences)
    other = read(text.replace(found.answers()[0], "7777777"))
    assert other.answers() == ["7777777"]
