"""A made-up world in short articles: people, ships and villages that name one another, and questions about them.

Every title is of two words of the lexicon and no other article's. A fact asked in one step stands in a sentence that ends
'of TITLE is VALUE.', with another verb for each kind of fact, and the begun answer ends with the same words: the last
four tokens before the value then belong to one sentence alone, so that a model that copies by short suffixes can answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, permutations, product
from random import Random

from kveval.errors import KvevalError
from kveval.samples.haystack import haystack
from kveval.samples.lexicon import KEY_ADJECTIVES, KEY_NOUNS, SLOTS

# Kind of title -> (what is told, verb, kind of value, question), each as '{what} of TITLE {verb} VALUE.'
_FACTS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "person": (
        ("The birthplace", "is", "village", "Where was {title} born?"),
        ("The teacher", "was", "person", "Who was the teacher of {title}?"),
        ("The next guide", "will be", "person", "Who will be the next guide of {title}?"),
        ("The first partner", "had been", "person", "Who had been the first partner of {title}?"),
    ),
    "ship": (
        ("The builder", "is", "person", "Who built {title}?"),
        ("The price", "was", "number", "What was the price of {title}?"),
        ("The next captain", "will be", "person", "Who will be the next captain of {title}?"),
        ("The first owner", "had been", "person", "Who had been the first owner of {title}?"),
    ),
    "village": (
        ("The mayor", "is", "person", "Who is the mayor of {title}?"),
        ("The old name", "was", "village", "What was the old name of {title}?"),
        ("The next judge", "will be", "person", "Who will be the next judge of {title}?"),
        ("The first teacher", "had been", "person", "Who had been the first teacher of {title}?"),
    ),
}
_OPENINGS = {
    "person": "This article is about {title}, a person known in many villages.",
    "ship": "This article is about {title}, a ship known in many harbours.",
    "village": "This article is about {title}, a village known in many books.",
}
_TWO_HOPS = ("Where was the person born who built {title}?", " The birthplace of the builder of {title} is")
_KINDS = ("person", "ship", "village")


@dataclass(frozen=True)
class Fact:
    """A question with one answer. ``documents``: the numbers, from 0, of those that tell it; two for a fact of two hops,
    first the one that leads to the other."""

    question: str
    answer_prefix: str  # with its leading space; the answer goes on from it
    expected: tuple[str, ...]  # aliases: one is enough
    sentence: str  # that tells it; of two hops, the one in the second document
    documents: tuple[int, ...]


@dataclass(frozen=True)
class Document:
    """An article: ``text`` starts with the line of its ``title``. ``facts``: those of one hop, then one of two if any."""

    title: str
    text: str
    facts: tuple[Fact, ...]


@dataclass
class _Names:
    """Names by kind, without end or use of one name twice among titles."""

    random: Random
    _titles: dict[str, Iterator[str]] = field(default_factory=dict)

    def title(self, kind: str) -> str:
        """One more title of ``kind``, unlike all others."""
        if kind not in self._titles:
            names = [" ".join(pair) for pair in _pairs(kind)]
            self.random.shuffle(names)
            self._titles[kind] = iter([*names, *self._longer(names)])
        if (title := next(self._titles[kind], None)) is None:
            raise KvevalError(f"there are not enough names of a {kind} for so many documents: ask for a shorter length")
        return title

    def value(self, kind: str, but: str) -> str:
        """Any name or number of a kind except ``but``; it may be another article's title."""
        while (drawn := self._drawn(kind)) == but:
            pass
        return drawn

    def _drawn(self, kind: str) -> str:
        if kind == "number":
            return str(self.random.randrange(100, 1000))
        if kind == "person":
            return " ".join(self.random.sample(SLOTS["person"], 2))
        return f"{self.random.choice(KEY_ADJECTIVES)} {self.random.choice(SLOTS['place'])}"

    def _longer(self, names: list[str]) -> list[str]:
        """Names for worlds with more articles than there are names of two words: two of them, with a word between."""
        between = {"person": "Peter", "ship": "river", "village": "market"}
        return [f"{one} {word} {two}" for word in between.values() for one, two in pairwise(names)]


def world(random: Random, count: int, blocks: Sequence[int] = ()) -> tuple[Document, ...]:
    """``count`` articles in random order, of about 80 words each; every ship's builder has an article too.

    ``blocks``: so many articles at a time (multiples of three) are in random order among themselves alone, so that a ship
    and its builder stand in the same block.

    Raises KvevalError for more articles than there are names (about 29,000).
    """
    names = _Names(random)
    kinds = [_KINDS[number % len(_KINDS)] for number in range(count)]  # a person before each ship
    titles = [names.title(kind) for kind in kinds]
    edges = [0, *accumulate(blocks), count]
    places = [place for one, end in pairwise(edges) for place in random.sample(range(one, end), end - one)]
    filler = haystack("noise").pieces(random.getrandbits(32), 0)
    births: dict[int, Fact] = {}
    documents: dict[int, Document] = {}
    for number, (kind, title, place) in enumerate(zip(kinds, titles, places, strict=True)):
        builder = titles[number - 1] if kind == "ship" else None
        facts = [_fact(names, title, told, place, builder) for told in _FACTS[kind]]
        text = _article(random, filler, kind, title, [fact.sentence for fact in facts])
        if kind == "person":
            births[number] = facts[0]
        if kind == "ship":
            facts.append(_two_hops(title, place, births[number - 1]))
        documents[place] = Document(title, text, tuple(facts))
    return tuple(documents[place] for place in range(count))


def facts(documents: tuple[Document, ...], hops: int) -> list[Fact]:
    """All facts of ``hops`` 1 or 2, in the order of their documents. No two have the same question."""
    return [fact for document in documents for fact in document.facts if len(fact.documents) == hops]


def _fact(names: _Names, title: str, told: tuple[str, str, str, str], place: int, builder: str | None) -> Fact:
    what, verb, kind, question = told
    value = builder if builder and what == "The builder" else names.value(kind, but=title)
    told_before = f"{what} of {title} {verb}"
    return Fact(
        question.format(title=title), f" {told_before}", _aliases(kind, value), f"{told_before} {value}.", (place,)
    )


def _two_hops(title: str, place: int, birth: Fact) -> Fact:
    question, prefix = (text.format(title=title) for text in _TWO_HOPS)
    return Fact(question, prefix, birth.expected, birth.sentence, (place, *birth.documents))


def _aliases(kind: str, value: str) -> tuple[str, ...]:
    """As it is told, and a person's name as lists have it."""
    return (value, ", ".join(reversed(value.split()))) if kind == "person" else (value,)


def _article(random: Random, filler: Iterator[str], kind: str, title: str, told: list[str]) -> str:
    """The title's line, and then its sentences in random order with one or two others before each."""
    sentences = [_OPENINGS[kind].format(title=title)]
    for sentence in random.sample(told, len(told)):
        sentences += [next(filler).strip() for _ in range(random.randint(1, 2))]
        sentences.append(sentence)
    return f"{title}\n{' '.join(sentences)}"


def _pairs(kind: str) -> list[tuple[str, str]]:
    if kind == "person":
        return list(permutations(SLOTS["person"], 2))
    return list(product(KEY_ADJECTIVES, KEY_NOUNS if kind == "ship" else SLOTS["place"]))
