"""Variable tracking, RULER's multi-hop task: which variables come to a value, some of them through others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from string import ascii_uppercase
from typing import Any

from kveval.samples.haystack import REPEATED
from kveval.samples.ruler.prose import depths_of, filled, source_of
from kveval.samples.ruler.sample import Draft, Family

HEADER = "Variables are set in the text below, some of them to another one. Keep track of their values.\n"
QUESTION = "\n\nQuestion: Which variables have the value {value}? Name all of them.\nAnswer:"
PREFIX = " The variables with the value {value} are"
_EXAMPLE_SENTENCES = 4  # before each statement of the example


@dataclass(frozen=True)
class VariableTracking:
    """One chain of ``hops`` + 1 variables (Hsieh et al. 2024, section 3.2), with one worked example before it."""

    name: str = "vt"
    haystack: str = "repeat"
    hops: int = 4
    budget_tokens: int = 30
    any_of: bool = False

    def build(self, tokenizer: Any, room: int, random: Callable[[str], Random], index: int) -> tuple[Draft, int]:
        """The longest draft of at most ``room`` tokens, and its tokens (see ``Family``)."""
        example, names, value = drawn_chains(random("chain"), self.hops + 1)
        depths = depths_of(self.name, index, len(names), ordered=True)
        prefix = PREFIX.format(value=value)
        text, tokens = filled(
            tokenizer,
            source_of(self.haystack, random),
            room,
            name=self.name,
            header=example + HEADER,
            make=lambda _: (statements(names, value), QUESTION.format(value=value) + prefix),
            depths=depths,
        )
        return Draft(text, prefix, tuple((name,) for name in names), tuple(depths)), tokens


def statements(names: Sequence[str], value: str) -> list[str]:
    """A chain's sentences, each with its leading space: the first variable has the value, each other the one before."""
    return [f" Let {names[0]} be {value}.", *(f" Let {name} be {before}." for before, name in pairwise(names))]


def variables(random: Random, count: int) -> list[str]:
    """``count`` names of five capital letters each, none twice."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(random.choices(ascii_uppercase, k=5))] = None
    return list(names)


def drawn_chains(random: Random, count: int) -> tuple[str, list[str], str]:
    """(a worked example, the ``count`` variables of another chain, their value of five digits)."""
    names = variables(random, 2 * count)
    shown, value = (str(number) for number in random.sample(range(10_000, 100_000), 2))
    hay = "".join(REPEATED[:_EXAMPLE_SENTENCES])
    body = "".join(hay + sentence for sentence in statements(names[count:], shown))
    told = QUESTION.format(value=shown) + PREFIX.format(value=shown) + f" {', '.join(names[count:])}.\n\n"
    return HEADER + body.lstrip() + told, names[:count], value


FAMILIES: dict[str, Family] = {"vt": VariableTracking()}
