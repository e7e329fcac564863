"""Contexts of the shared protocol: exact prompts, passages where they were asked for, and the same context every time."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from test_samples import trained

from kveval.errors import EvidenceError, KvevalError
from kveval.probe.tokenizer import build_tokenizer
from kveval.samples.encoded import encode
from kveval.samples.haystack import haystack
from kveval.samples.ruler.registry import FAMILIES
from kveval.samples.ruler.sample import sample
from kveval.samples.shared.alone import build_alone
from kveval.samples.shared.context import Asking, Origin, SharedContext, depths, finish
from kveval.samples.shared.documents import DOCUMENT_TASKS, build_documents
from kveval.samples.shared.prose import HARD_TASKS, PROSE_TASKS, REPEAT_TASKS, build_prose
from kveval.samples.shared.stream import STREAMS, build_needles

LENGTHS = (4096, 8192)
KINDS = ("prose", "hard", "repeat", *STREAMS, "documents")
TOKENIZERS: dict[str, Callable[[], Any]] = {
    "probe": cache(build_tokenizer),
    "gpt2": lambda: trained("gpt2"),
    "llama3": lambda: trained("llama3"),
}


@cache
def built(
    kind: str, tokenizer: str, context: int = 0, lengths: tuple[int, ...] = LENGTHS, per_task: int = 2
) -> SharedContext:
    loaded = TOKENIZERS[tokenizer]()
    asked: dict[str, Any] = {"seed": 0, "context": context, "lengths": lengths, "per_task": per_task}
    if kind in STREAMS:
        return build_needles(loaded, kind, **asked)
    if kind == "documents":
        return build_documents(loaded, list(DOCUMENT_TASKS), **asked)
    tasks = {"prose": PROSE_TASKS, "hard": HARD_TASKS, "repeat": REPEAT_TASKS}[kind]
    return build_prose(loaded, tasks, haystack("repeat" if kind == "repeat" else "noise"), **asked)


GOLDEN = {
    "prose": "a757155a4069af3f",
    "hard": "c2c4fc13201840b2",
    "repeat": "f037767d8b955af3",
    "niah_multikey_2": "18249d5272e8652f",
    "niah_multikey_3": "f81d070d797fc4cf",
    "documents": "cd3c836c11ecf583",
}


def every() -> list[tuple[str, str]]:
    return [(kind, tokenizer) for kind in KINDS for tokenizer in TOKENIZERS]


@pytest.mark.parametrize(("kind", "tokenizer"), every())
def test_prompts_are_what_the_tokenizer_makes_of_them_and_use_their_length(kind: str, tokenizer: str) -> None:
    context, loaded = built(kind, tokenizer), TOKENIZERS[tokenizer]()
    for question in context.questions:
        prefix, tail = context.prompt(loaded, question)
        assert [*context.ids[:prefix].tolist(), *tail] == loaded(context.text(question))["input_ids"]
        used = prefix + len(tail) + question.budget_tokens
        # What tasks of one context need for question and answer differs; they share its cuts.
        assert 0.97 * question.length <= used <= question.length
    longest = max(len(p) + t + q.budget_tokens for q in context.questions for t, p in [context.prompt(loaded, q)])
    assert longest >= 0.98 * max(LENGTHS)


@pytest.mark.parametrize(("kind", "tokenizer"), every())
def test_what_is_expected_stands_between_first_and_last(kind: str, tokenizer: str) -> None:
    context, loaded = built(kind, tokenizer), TOKENIZERS[tokenizer]()
    for question in context.questions:
        read = loaded.decode(context.ids[question.first : question.last + 1].tolist())
        assert all(group[0] in read for group in question.expected)
        assert question.last < context.cuts[question.length]


@pytest.mark.parametrize("kind", ["prose", "hard", "repeat", "niah_multikey_2"])
def test_single_passages_lie_where_they_are_asked_for(kind: str) -> None:
    for question in built(kind, "gpt2").questions:
        if len(question.expected) == 1:
            size = context_share(question.last - question.first, question.length)
            assert question.first / question.length == pytest.approx(question.depth * (1 - size), abs=0.05), (
                question.task
            )


def context_share(tokens: int, length: int) -> float:
    return tokens / length + 0.03  # what is asked after the context takes the rest


def test_each_task_is_asked_at_each_length() -> None:
    for kind, tasks in (("prose", PROSE_TASKS), ("repeat", REPEAT_TASKS), ("documents", tuple(DOCUMENT_TASKS))):
        asked = [(q.task, q.length, q.number) for q in built(kind, "probe").questions]
        assert sorted(asked) == sorted((t, length, n) for t in tasks for length in LENGTHS for n in range(2))


def test_needles_of_prose_are_unlike_and_answers_stand_in_them_alone() -> None:
    context = built("prose", "gpt2")
    text = context.encoded.text
    told = re.findall(r" (?:The|One) access code of ([a-z ]+) is ([0-9a-f-]+)\.", text)
    values = [value for _, value in told]
    assert len(set(values)) == len(values)
    several = {key for key, _ in told if sum(key == other for other, _ in told) > 1}
    assert len(several) == 2 * len(LENGTHS)  # the keys of niah_multivalue, and no others
    for question in context.questions:
        for (value,) in question.expected:
            assert text.count(value) == 1
            key = {v: k for k, v in told}[value]
            assert key in question.tail


def test_chains_of_one_context_share_no_name_and_no_value() -> None:
    context = built("repeat", "probe", lengths=(4096, 8192, 16_384), per_task=3)
    chains = [question for question in context.questions if question.task == "vt"]
    names = [name for question in chains for (name,) in question.expected]
    assert len(set(names)) == 5 * len(chains)
    for question in chains:
        value = re.search(r"value (\d{5})", question.tail)
        assert value is not None
        known = {value[1]}
        for name, source in re.findall(r" Let ([A-Z]{5}) be (\w+)\.", context.encoded.text):
            if source in known:
                known.add(name)
        assert known - {value[1]} == {name for (name,) in question.expected}


def test_two_hops_lead_from_one_document_to_another() -> None:
    context = built("documents", "probe")
    for question in context.questions:
        if question.task == "qa_synthetic_2":
            ship = re.search(r"who built ([a-z ]+)\?", question.tail)
            assert ship is not None
            text = context.text(question).removesuffix(question.tail)
            builder = re.search(rf"The builder of {ship[1]} is ([A-Za-z ]+)\.", text)
            assert builder is not None
            assert f"The birthplace of {builder[1]} is {question.expected[0][0]}." in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_arguments_give_the_same_context(kind: str) -> None:
    first = built(kind, "probe")
    built(kind, "probe", context=1)
    built.cache_clear()
    assert built(kind, "probe").sha256 == first.sha256
    assert built(kind, "probe", context=1).sha256 != first.sha256


# With the probe's tokenizer and noise: nothing that another Python or library could change.
@pytest.mark.parametrize("kind", KINDS)
def test_golden(kind: str) -> None:
    assert built(kind, "probe").sha256[:16] == GOLDEN[kind]


def test_depths_are_even_over_questions_and_contexts() -> None:
    drawn = [depths("niah_single_2", context, number, 2)[0] for context in range(55) for number in range(2)]
    counts = np.bincount([round(10 * depth) for depth in drawn], minlength=11)
    assert counts.min() >= 8
    assert counts.max() <= 12
    several = depths("niah_multivalue", 3, 1, 2, count=4)
    assert several == sorted(several)
    assert [int(4 * depth) for depth in several] == [0, 1, 2, 3]


def test_alone_is_the_strict_sample() -> None:
    tokenizer = TOKENIZERS["probe"]()
    for task in ("cwe", "fwe"):
        context = build_alone(tokenizer, FAMILIES[task], seed=0, context=3, length=4096)
        (question,) = context.questions
        strict = sample(tokenizer, FAMILIES[task], seed=0, length=4096, index=3)
        assert context.text(question) == strict.draft.text
        assert question.expected == strict.draft.expected
        assert question.budget_tokens == strict.budget_tokens


def test_a_length_that_cannot_hold_its_passages_is_refused() -> None:
    with pytest.raises(KvevalError, match=r"length 1,024 cannot hold.*--needles 1"):
        built("prose", "gpt2", lengths=(1024,), per_task=4)
    with pytest.raises(KvevalError, match="length 256 cannot hold"):
        built("niah_multikey_3", "gpt2", lengths=(256,))


def test_a_passage_that_is_not_there_is_found_out() -> None:
    tokenizer = TOKENIZERS["gpt2"]()
    (encoded,) = encode(tokenizer, ["Some words that say nothing of it. And some more of them."])
    asking = Asking("vt", 32, 0.0, " What?", (("x",),), False, (0,))
    origin = Origin("prose", 0, 0)
    with pytest.raises(EvidenceError, match="reads"):
        finish(tokenizer, origin, encoded, {32: 40}, [(0, 10, "other words")], [asking], planted=True)
    with pytest.raises(EvidenceError, match="beyond"):
        finish(tokenizer, origin, encoded, {32: 12}, [(40, 50, "")], [asking], planted=True)
    with pytest.raises(EvidenceError, match="came out longer"):
        finish(tokenizer, origin, encoded, {32: 56}, [(0, 4, "Some")], [asking], planted=True, budgets={"vt": 30})
