"""Question answering over documents, RULER's qa: where the answer is told moves evenly through documents that do not tell.

``FAMILIES`` are RULER's, about SQuAD and HotpotQA; ``FAMILIES_SYNTHETIC`` ask the same about a made-up world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Any

from kveval.errors import KvevalError
from kveval.samples.encoded import Encoded, cut, extend
from kveval.samples.ruler.corpora import corpus
from kveval.samples.ruler.documents import facts, world
from kveval.samples.ruler.prose import depths_of
from kveval.samples.ruler.sample import Draft, Family, count_tokens
from kveval.samples.tokenised import tokenised

HEADER = "Documents are given below. A question about them follows; the answer is to be as short as can be.\n\n"
DOCUMENT = "Document {number}:\n{text}\n\n"
QUESTION = "Give only the answer to the question about the documents above, as short as can be.\n\nQuestion: {question}"
PREFIX = " Answer:"
_BEGUN = "\nAnswer:"
_LEAST_TOKENS = 70  # of an article of the made-up world
_JOINT_TOKENS = 2


@dataclass(frozen=True)
class Asked:
    """A question, the documents that tell its answer, and documents that do not, nearest in subject first."""

    question: str
    answer_prefix: str
    aliases: tuple[str, ...]
    gold: tuple[str, ...]
    others: tuple[str, ...]


@dataclass(frozen=True)
class QuestionAnswering:
    """Sample ``index`` asks question ``index`` of ``corpus``, as in RULER (Hsieh et al. 2024, section 3.4).

    Distractors are documents on the same subject and then any, all of them again where a corpus is too small.
    """

    name: str
    corpus: str
    budget_tokens: int = 32
    any_of: bool = True

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens, and its tokens (see ``Family``)."""
        data = corpus(self.corpus)
        asked = data.questions[index % len(data.questions)]
        draw, own = random("documents"), {*asked.gold, *asked.near}
        near = draw.sample(asked.near, len(asked.near))
        far = [number for number in draw.sample(range(len(data.documents)), len(data.documents)) if number not in own]
        gold, others = (tuple(data.documents[number] for number in some) for some in (asked.gold, [*near, *far]))
        question = Asked(asked.text, PREFIX, asked.aliases, gold, others)
        return drafted(tokenizer, room, question, self.name, random, index)


@dataclass(frozen=True)
class SyntheticAnswering:
    """A question of one or two ``hops`` about a made-up world of its own (``documents.world``): not RULER's data."""

    name: str
    hops: int
    budget_tokens: int = 32
    any_of: bool = True

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens, and its tokens (see ``Family``)."""
        documents = world(random("world"), room // _LEAST_TOKENS + 4)
        fact = random("question").choice(facts(documents, self.hops))
        gold = tuple(documents[number].text for number in fact.documents)
        others = tuple(document.text for number, document in enumerate(documents) if number not in fact.documents)
        question = Asked(fact.question + _BEGUN, fact.answer_prefix, fact.expected, gold, others)
        return drafted(tokenizer, room, question, self.name, random, index)


def drafted(
    tokenizer: Any, room: int, asked: Asked, name: str, random: Callable[[str], Random], index: int
) -> tuple[Draft, int]:
    """The draft about ``asked`` that fills ``room`` tokens, and its tokens; the golds' depths are spread over ``index``.

    The last distractor is cut between words, so that the room is full; a gold document never is.
    Raises KvevalError when the room does not hold the golds, or there is no distractor.
    """
    if not asked.others:
        raise KvevalError(f"{name} has no other document than those with the answer: give more data")
    tail = QUESTION.format(question=asked.question) + asked.answer_prefix
    told = sum(count_tokens(tokenizer, text) for text in (HEADER, tail, *asked.gold)) + 16 * len(asked.gold)
    if told + 64 > room:
        raise KvevalError(f"{room:,} tokens do not hold the documents of {name}'s question: ask for a longer length")
    sample = "\n\n".join(asked.others[: max(4, room // 2000)])[: 2 * room]
    chars = (room - told) * len(sample) / count_tokens(tokenizer, sample)  # of the distractors, about
    depths = depths_of(name, index, len(asked.gold))
    stream = _Stream(asked.gold, _mixed(asked.others, 0.95 * chars, random("order")), depths, chars)
    hay, _ = tokenised(tokenizer, stream.pieces(), room)
    left, end = _cut(tokenizer, hay, stream, tail, room)
    keep, ids = extend(tokenizer, left, end)
    text = left.text + end
    places = tuple(_place(text, gold, len(text) - len(tail)) for gold in asked.gold)
    return Draft(text, asked.answer_prefix, (asked.aliases,), places), keep + len(ids)


def _mixed(others: Sequence[str], chars: float, random: Random) -> list[str]:
    """The documents that ``chars`` characters hold, in random order, and then the rest: those near are anywhere."""
    count = sum(total <= chars for total in accumulate(len(other) for other in others))
    return [*random.sample(others[:count], count), *others[count:]]


def _place(text: str, gold: str, end: int) -> float:
    """Where a document begins among the documents of ``text``, which are over at character ``end``: 0 first, 1 last."""
    told = text.index(f":\n{gold}\n\n")
    begin = text.rindex("Document ", 0, told)
    size = told + len(f":\n{gold}\n\n") - begin
    return min((begin - len(HEADER)) / max(1, end - len(HEADER) - size), 1.0)


@dataclass
class _Stream:
    """Numbered documents without end. A gold one comes where its depth says, or never where that is too far."""

    golds: Sequence[str]
    others: Sequence[str]
    depths: Sequence[float]
    chars: float  # of all distractors that will be there
    starts: list[int] = field(default_factory=list)  # where each document begins, in characters
    gold: dict[int, int] = field(default_factory=dict)  # number of a document, from 0 -> which gold it is

    def pieces(self) -> Iterator[str]:
        """The header and the documents, each numbered."""
        yield HEADER
        at, spent, turn = len(HEADER), 0, 0
        waiting = sorted(range(len(self.depths)), key=self.depths.__getitem__)
        while True:
            other = self.others[turn % len(self.others)]
            if waiting and self.depths[waiting[0]] * self.chars <= spent + len(other) / 2:
                self.gold[len(self.starts)] = waiting[0]
                text = self.golds[waiting.pop(0)]
            else:
                text, turn, spent = other, turn + 1, spent + len(other)
            self.starts.append(at)
            piece = DOCUMENT.format(number=len(self.starts), text=text)
            at += len(piece)
            yield piece


def _cut(tokenizer: Any, hay: Encoded, stream: _Stream, tail: str, room: int) -> tuple[Encoded, str]:
    """As much of ``hay`` as leaves room, and what comes after it: golds that are not wholly in it, and the question."""
    ends = [*stream.starts[1:], len(hay.text)]
    char = len(hay.text)
    while True:
        whole = {gold for number, gold in stream.gold.items() if ends[number] <= char}
        late = sorted(set(range(len(stream.depths))) - whole, key=stream.depths.__getitem__)
        before = sum(start < char for start in stream.starts)
        told = [DOCUMENT.format(number=before + more, text=stream.golds[gold]) for more, gold in enumerate(late, 1)]
        end = "\n\n" + "".join(told) + tail
        inside = room - count_tokens(tokenizer, end) - _JOINT_TOKENS
        wanted = min(char, _between_words(hay, stream.starts, max(inside, 1)))
        if wanted == char:
            return cut(tokenizer, hay, char), end
        char = wanted


def _between_words(hay: Encoded, starts: Sequence[int], tokens: int) -> int:
    """The last character of ``hay`` within ``tokens`` at which a word ends, and not in a document's heading."""
    char = int(hay.ends[min(tokens, len(hay)) - 1])
    while char > 0 and not hay.text[char : char + 1].isspace():
        char -= 1
    begun = max((start for start in starts if start <= char), default=0)
    if char < hay.text.find(":\n", begun) + 3:
        char = begun
    return len(hay.text[:char].rstrip())


FAMILIES: dict[str, Family] = {
    family.name: family for family in (QuestionAnswering("qa_1", "squad"), QuestionAnswering("qa_2", "hotpotqa"))
}
FAMILIES_SYNTHETIC: dict[str, Family] = {
    family.name: family for family in (SyntheticAnswering("qa_synthetic_1", 1), SyntheticAnswering("qa_synthetic_2", 2))
}
