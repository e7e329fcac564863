"""Variable tracking: the chain, followed by a reader of its own, leads to the expected variables; the example to others."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from ruler_prompts import FAMILIES, TOKENIZERS, built, context_and_question

from kveval.samples.ruler import vt
from kveval.samples.ruler.sample import sample

_STATEMENT = re.compile(r"\bLet ([A-Z]+) be ([A-Z]+|\d+)\.")
_ASKED = re.compile(r"Which variables have the value (\d+)\?")


def split_prompt(text: str) -> tuple[str, str, str]:
    """(the worked example, the context, the question)."""
    context, question = context_and_question(text)
    begin = context.rindex(vt.HEADER)
    return context[:begin], context[begin:], question


def assigned(text: str) -> list[tuple[str, str]]:
    """(variable, what it was set to) in the order of the text."""
    return _STATEMENT.findall(text)


def with_value(text: str, value: str) -> list[str]:
    """The variables that come to the value when the text is run as a program: a variable must be set before it is used."""
    values: dict[str, str] = {}
    for name, source in assigned(text):
        assert name not in values
        values[name] = source if source.isdigit() else values[source]
    return [name for name in values if values[name] == value]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_chain_leads_to_the_expected_variables(name: str) -> None:
    for index in range(6):
        made = built("vt", name, 2048, index)
        _, context, question = split_prompt(made.draft.text)
        (value,) = _ASKED.findall(question)
        assert tuple((variable,) for variable in with_value(context, value)) == made.draft.expected
        assert made.draft.answer_prefix == f" The variables with the value {value} are"
        assert made.draft.text.endswith(made.draft.answer_prefix)


def test_one_chain_of_four_hops() -> None:
    """RULER's num_chains 1, num_hops 4, names of five letters, values of five digits, 30 tokens for the answer."""
    for index in range(6):
        _, context, _ = split_prompt(built("vt", "probe", 4096, index).draft.text)
        statements = assigned(context)
        assert len(statements) == 5 == len({name for name, _ in statements})
        assert [source.isdigit() for _, source in statements] == [True, False, False, False, False]
        assert [source for _, source in statements[1:]] == [name for name, _ in statements[:-1]]
        assert all(len(part) == 5 for statement in statements for part in statement)
        assert context.count(statements[0][1]) == 1
        for name, _ in statements:
            assert context.count(name) == (1 if name == statements[-1][0] else 2)
    assert FAMILIES["vt"].budget_tokens == 30
    assert not FAMILIES["vt"].any_of


def test_the_example_is_worked_and_shares_nothing_with_what_is_asked() -> None:
    for index in range(10):
        example, context, question = split_prompt(built("vt", "probe", 2048, index).draft.text)
        told, shown = context_and_question(example)
        (value,) = _ASKED.findall(shown)
        chain = with_value(told, value)
        assert len(chain) == 5
        assert shown.strip().endswith(f"are {', '.join(chain)}.")
        assert value not in context + question
        assert not set(chain) & {part for statement in assigned(context) for part in statement}


def test_the_chain_is_spread_in_order() -> None:
    """One statement in each fifth of the text, so that every hop crosses some of it."""
    for index in range(10):
        made = built("vt", "probe", 4096, index)
        assert [int(5 * depth) for depth in made.draft.depths] == [0, 1, 2, 3, 4]
        _, context, _ = split_prompt(made.draft.text)
        at = [context.index(f" Let {name} be ") / len(context) for (name,) in made.draft.expected]
        assert at == sorted(at)
        assert all(later - earlier > 0.15 for earlier, later in pairwise(at))


def test_between_the_statements_is_the_repeated_noise() -> None:
    example, context, _ = split_prompt(built("vt", "gpt2", 4096, 3).draft.text)
    noise = " The river is cold. The garden is warm. The road is long. Then the day was over."
    body = re.sub(r" Let \w+ be \w+\.", "", context.removeprefix(vt.HEADER))
    assert (noise * 400).startswith(body)
    assert len(body) > 5000
    assert example.startswith(vt.HEADER)


def test_other_hops() -> None:
    made = sample(TOKENIZERS["gpt2"](), replace(vt.VariableTracking(), hops=7), seed=0, length=4096, index=0)
    _, context, question = split_prompt(made.draft.text)
    (value,) = _ASKED.findall(question)
    assert len(with_value(context, value)) == 8 == len(made.draft.expected)
