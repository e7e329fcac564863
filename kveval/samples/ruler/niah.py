"""Needle in a haystack, RULER's eight: one to many keys, one to many values, words, numbers and UUIDs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kveval.samples.lexicon import NEEDLE, QUESTION
from kveval.samples.ruler.keys import KINDS, draw
from kveval.samples.ruler.prose import depths_of, filled, source_of, spans, streamed
from kveval.samples.ruler.sample import Draft, Family

HEADER = "Access codes are hidden in the text below. Remember them: a question about them follows the text.\n"
ONE_OF_MANY = " One access code of {key} is {value}."
ALL_OF_MANY = "\n\nQuestion: What are all the access codes of {key}?\nAnswer: The access codes of {key} are"
OF_EACH = "\n\nQuestion: What are the access codes of {keys}?\nAnswer: The access codes of {keys} are"


@dataclass(frozen=True)
class Niah:
    """A needle task (Hsieh et al. 2024, section 3.1). ``haystack`` ``needles``: nothing but needles.

    ``keys`` needles' keys are planted, each with ``values`` values; ``asked`` of the keys are asked for.
    """

    name: str
    haystack: str = "auto"
    key_kind: str = "words"
    value_kind: str = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1
    budget_tokens: int = 128
    any_of: bool = False

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens, and its tokens (see ``Family``)."""
        if self.haystack == "needles":
            return self._of_needles(tokenizer, room, random, index)
        pairs: list[tuple[str, str]] = []
        depths = depths_of(self.name, index, self.keys * self.values, ordered=self.asked * self.values > 1)

        def make(text: str) -> tuple[list[str], str]:
            keys = [key for key in draw(self.key_kind, random("keys"), self.keys, text) for _ in range(self.values)]
            pairs.extend(zip(keys, draw(self.value_kind, random("values"), len(keys), text), strict=True))
            return [self.sentence(*pair) for pair in pairs], "".join(self._asked(pairs))

        source = source_of(self.haystack, random)
        text, tokens = filled(tokenizer, source, room, name=self.name, header=HEADER, make=make, depths=depths)
        told = self.asked * self.values
        expected = tuple((value,) for _, value in pairs[:told])
        planted = spans(text, [self.sentence(*pair) for pair in pairs])
        return Draft(text, self._asked(pairs)[1], expected, tuple(depths[:told]), planted), tokens

    def sentence(self, key: str, value: str) -> str:
        """What is planted, with its leading space."""
        return (ONE_OF_MANY if self.values > 1 else NEEDLE).format(key=key, value=value)

    def _asked(self, pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
        return asked(list(dict.fromkeys(key for key, _ in pairs))[: self.asked], many=self.values > 1)

    def _of_needles(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        (depth,) = depths_of(self.name, index, 1)
        drawn = needles(self.key_kind, self.value_kind, random)
        pairs: list[tuple[str, str]] = []

        def sentences() -> Iterator[str]:
            for pair in drawn:
                pairs.append(pair)
                yield self.sentence(*pair)

        chosen = 0

        def ask(number: int) -> str:
            nonlocal chosen
            chosen = number
            return "".join(asked([pairs[number][0]]))

        text, tokens = streamed(tokenizer, sentences(), room, name=self.name, header=HEADER, ask=ask, depth=depth)
        key, value = pairs[chosen]
        return Draft(text, asked([key])[1], ((value,),), (depth,)), tokens


def needles(key_kind: str, value_kind: str, random: Callable[[str], Random]) -> Iterator[tuple[str, str]]:
    """(key, value) of unlike needles, without end."""
    return zip(KINDS[key_kind](random("keys"), ""), KINDS[value_kind](random("values"), ""), strict=False)


def asked(keys: Sequence[str], *, many: bool = False) -> tuple[str, str]:
    """(question, what the answer goes on from) about the code of one key, the codes of several, or all codes of one."""
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    template = ALL_OF_MANY if many else QUESTION if len(keys) == 1 else OF_EACH
    question, _, prefix = template.format(key=listed, keys=listed).rpartition(" The ")
    return question, " The " + prefix


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Niah("niah_single_1", haystack="repeat"),
        Niah("niah_single_2"),
        Niah("niah_single_3", value_kind="uuids"),
        Niah("niah_multikey_1", keys=4),
        Niah("niah_multikey_2", haystack="needles"),
        Niah("niah_multikey_3", haystack="needles", key_kind="uuids", value_kind="uuids"),
        Niah("niah_multivalue", values=4),
        Niah("niah_multiquery", keys=4, asked=4),
    )
}
