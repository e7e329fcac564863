"""RULER's needle tasks: their parameters; and, for tracking and hard needles too, lengths, depths and sameness."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from ruler_prompts import (
    FAMILIES,
    TOKENIZERS,
    VALUE,
    built,
    context_and_question,
    first_token,
    in_noise,
    needles,
)
from test_samples import one_byte_a_token

from kveval.errors import KvevalError
from kveval.samples.ruler import hard, keys, niah, vt
from kveval.samples.ruler.sample import Sample, sample

# NVIDIA/RULER, scripts/synthetic.yaml: haystack, kind of key, kind of value, keys, values of each, keys asked for. There a
# haystack of needles has no count of keys, and asking for four keys plants four.
RULER = {
    "niah_single_1": ("repeat", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("auto", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("auto", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("auto", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needles", "words", "numbers", None, 1, 1),
    "niah_multikey_3": ("needles", "uuids", "uuids", None, 1, 1),
    "niah_multivalue": ("auto", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("auto", "words", "numbers", 4, 1, 4),
}
KINDS = {"words": r"[a-z]+ [a-z]+", "numbers": r"\d{7}", "uuids": VALUE.partition("|")[2]}
STREAMED = ("niah_multikey_2", "niah_multikey_3")
INDICES = range(40)
FITS = [
    (task, tokenizer, length)
    for task, tokenizer, length in product(FAMILIES, TOKENIZERS, (2048, 4096, 8192))
    if (task, tokenizer, length) != ("needle_hard", "bytes", 2048)  # 32 needles of 48 tokens
]


class Counting:
    """Passes everything on to the tokenizer and counts the tokens it makes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        batch = self.tokenizer(text, **options)
        ids = batch["input_ids"]
        self.tokens += len(ids) if isinstance(text, str) else sum(map(len, ids))
        return batch


def check_length(made: Sample, tokenizer: Any) -> list[int]:
    """The ids of the whole prompt, which are as many as was said, and fill the length with the answer's budget."""
    ids: list[int] = tokenizer(made.draft.text, verbose=False)["input_ids"]
    assert made.tokens == len(ids)
    assert 0.98 * made.length <= made.tokens + made.budget_tokens <= made.length
    return ids


def passages(made: Sample) -> list[str]:
    """What stands in the text for each string that is expected."""
    context, _ = context_and_question(made.draft.text)
    if made.task == "vt":
        return [found[0] for (name,) in made.draft.expected for found in re.finditer(rf"Let {name} be \w+", context)]
    start = "One" if made.task == "niah_multivalue" else "The"
    keys_of = {value: key for key, value in needles(context)}
    return [f"{start} access code of {keys_of[value]} is {value}" for (value,) in made.draft.expected]


def check_depths(made: Sample, tokenizer: Any, ids: list[int]) -> None:
    """Each passage begins within 2 % of the length, or two sentences, of its depth between header and question."""
    context, question = context_and_question(made.draft.text)
    header = vt.HEADER if made.task == "vt" else niah.HEADER
    begin = context.rindex(header) + len(header)
    special = len(ids) - len(tokenizer(made.draft.text, add_special_tokens=False, verbose=False)["input_ids"])
    before, after = (
        len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (context[:begin], question)
    )
    before, end = before + special, len(ids) - after
    found = passages(made)
    assert len(found) == len(made.draft.depths)
    for passage, depth in zip(found, made.draft.depths, strict=True):
        size = len(tokenizer(passage, add_special_tokens=False)["input_ids"])
        wanted = before + depth * (end - size - before)
        off = first_token(tokenizer, ids, passage) - wanted
        assert abs(off) <= max(0.02 * made.length, 2 * max(size, 32)), (passage, depth, off)


# Parameters


@pytest.mark.parametrize("task", RULER)
def test_parameters_are_rulers(task: str) -> None:
    """What is planted, read from the text; RULER gives 128 tokens to answer in and counts the share that is found."""
    hay, key_kind, value_kind, count, values, asked = RULER[task]
    for index in (0, 1, 17):
        made = built(task, "probe", 4096, index)
        context, question = context_and_question(made.draft.text)
        found = needles(context)
        assert all(
            re.fullmatch(KINDS[key_kind], key) and re.fullmatch(KINDS[value_kind], value) for key, value in found
        )
        by_key = Counter(key for key, _ in found)
        assert set(by_key.values()) == {values}
        assert len({value for _, value in found}) == len(found)
        if count is None:
            assert len(by_key) > 30
            body = context.removeprefix(niah.HEADER).removesuffix(context[context.rindex(".") + 1 :])
            assert body == "".join(f" The access code of {key} is {value}." for key, value in found)
        else:
            assert len(by_key) == count
            assert ("The river is cold." in context) == (hay == "repeat")
        expected = {value for (value,) in made.draft.expected}
        asked_keys = {key for key, value in found if value in expected}
        assert len(made.draft.expected) == len(expected) == asked * values
        assert len(asked_keys) == asked
        assert {key for key in by_key if key in question} == asked_keys
        assert made.draft.text.endswith(made.draft.answer_prefix)
        assert question.count("\nAnswer:") == 1
    assert FAMILIES[task].budget_tokens == 128
    assert not FAMILIES[task].any_of


@pytest.mark.parametrize("task", RULER)
def test_the_answer_stands_in_its_needles_alone(task: str) -> None:
    for index in range(0, 40, 3):
        made = built(task, "probe", 2048, index)
        context, question = context_and_question(made.draft.text)
        for (value,) in made.draft.expected:
            assert made.draft.text.count(value) == 1
            assert value not in question
        told = {value: key for key, value in needles(context)}
        for key in {told[value] for (value,) in made.draft.expected}:
            assert context.count(key) == RULER[task][4]
        # No other needle, whole or cut, gives the asked key something else.
        values = re.findall(r"access codes? of ([^.]*?) (?:is|are)\b ?([^ .]*)", context)
        asked = {told[value] for (value,) in made.draft.expected}
        answers = {value for key, value in values if key in asked}
        assert answers == {value for (value,) in made.draft.expected}


@pytest.mark.parametrize("task", STREAMED)
def test_a_needle_cut_at_the_end_is_not_the_asked_one(task: str) -> None:
    """What is left over after the last whole needle is the beginning of one more, of another key."""
    cut = 0
    for index, name in product(range(12), ("probe", "gpt2")):
        made = built(task, name, 2048, index)
        context, _ = context_and_question(made.draft.text)
        *_, last = re.finditer(rf"({VALUE})\.", context)
        rest = context[last.end() :]
        cut += bool(rest)
        assert len(rest) < len(" The access code of  is .") + 2 * 36
        asked = {value: key for key, value in needles(context)}[made.draft.expected[0][0]]
        assert asked not in rest
    assert cut or task == "niah_multikey_2"  # its sentences are shorter than what may be left over


def test_no_key_is_a_part_of_another() -> None:
    """131,072 tokens hold more needles than there are keys of two words."""
    drawn = keys.draw("words", random.Random(0), 14_000)
    assert len(set(drawn)) == 14_000
    two, more = ({key for key in drawn if (key.count(" ") == 1) == two_words} for two_words in (True, False))
    assert len(two) == 10_455
    assert not two & {part for key in more for part in (key.rpartition(" ")[0], key.partition(" ")[2])}


def test_keys_and_values_are_not_in_the_text() -> None:
    for kind in keys.KINDS:
        drawn = keys.draw(kind, random.Random(5), 300)
        left = keys.draw(kind, random.Random(5), 200, "In the text: " + ", ".join(drawn[:100]) + ".")
        assert left == drawn[100:]


# Length and depth


@pytest.mark.parametrize(("task", "name", "length"), FITS)
def test_length_is_exact_and_needles_lie_where_they_are_asked_for(task: str, name: str, length: int) -> None:
    made, tokenizer = built(task, name, length, length // 2048), TOKENIZERS[name]()
    ids = check_length(made, tokenizer)
    check_depths(made, tokenizer, ids)
    assert ids.count(0) == 1 or name != "llama3"
    assert ids[0] == 0 or name != "llama3"  # its BOS token


@pytest.mark.parametrize("task", FAMILIES)
def test_every_index_fits_and_depths_are_even(task: str) -> None:
    """Of 40 samples each tenth of the context holds a tenth of the passages, give or take one for each of them."""
    tokenizer = TOKENIZERS["gpt2"]()
    deciles: Counter[int] = Counter()
    for index in INDICES:
        made = built(task, "gpt2", 2048, index)
        ids = check_length(made, tokenizer)
        if index % 4 == 1:
            check_depths(made, tokenizer, ids)
        assert all(0 <= depth < 1 for depth in made.draft.depths)
        assert list(made.draft.depths) == sorted(made.draft.depths)
        deciles.update(int(10 * depth) for depth in made.draft.depths)
    group = len(built(task).draft.depths)
    assert group == len(built(task).draft.expected)
    assert all(abs(deciles[decile] - len(INDICES) * group / 10) <= group for decile in range(10)), deciles


@pytest.mark.parametrize("task", FAMILIES)
def test_tasks_differ_in_where_they_begin(task: str) -> None:
    others = {built(other).draft.depths for other in FAMILIES if other != task}
    assert built(task).draft.depths not in others


@pytest.mark.parametrize("task", FAMILIES)
def test_the_longest_is_exact_and_tokenised_about_once(task: str) -> None:
    counting = Counting(TOKENIZERS["probe"]())
    made = sample(counting, in_noise(task), seed=0, length=131_072, index=2)
    assert counting.tokens < 1.5 * 131_072
    ids = check_length(made, counting.tokenizer)
    if not isinstance(FAMILIES[task], vt.VariableTracking):
        context, _ = context_and_question(made.draft.text)
        found = needles(context)
        assert len({key for key, _ in found}) == len(found) / (4 if task == "niah_multivalue" else 1)
        if task in STREAMED:
            assert len(found) > 1000
    first = replace(made.draft, expected=made.draft.expected[:1], depths=made.draft.depths[:1])
    check_depths(replace(made, draft=first), counting.tokenizer, ids)  # one alone: looking for it takes a while


def test_room_that_is_reserved_is_left() -> None:
    tokenizer = TOKENIZERS["gpt2"]()
    made = sample(tokenizer, FAMILIES["niah_single_2"], seed=0, length=4096, index=0, reserve_tokens=50)
    tokens = len(tokenizer(made.draft.text, verbose=False)["input_ids"])
    assert made.tokens == tokens + 50
    assert 0.98 * 4096 <= made.tokens + made.budget_tokens <= 4096


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_shortest_is_filled_with_needles_of_long_words(name: str) -> None:
    """A UUID takes more tokens than may be left over of 1,024: the last needle is cut inside one where it must be."""
    for index in range(6):
        made = built("niah_multikey_3", name, 1024, index)
        check_length(made, TOKENIZERS[name]())


def test_characters_of_several_tokens_and_long_words_fill_the_room(tmp_path: Path) -> None:
    """A text without a place to cut at, of characters that take three or four tokens each."""
    tokenizer = one_byte_a_token()
    for name, text in [
        ("cjk.txt", "\u6c34\u706b" * 3000),
        ("table.txt", "=" * 9000),
        ("emoji.txt", "\U0001f600 " * 2000),
    ]:
        (tmp_path / name).write_text(text, encoding="utf-8")
        for index in range(4):
            family = niah.Niah("niah_single_2", haystack=str(tmp_path / name))
            made = sample(tokenizer, family, seed=0, length=2048, index=index)
            check_length(made, tokenizer)
            assert len(needles(made.draft.text)) == 1
            assert "\ufffd" not in made.draft.text


# The same sample


def test_same_in_any_order_and_the_global_state_is_left_alone() -> None:
    random.seed(11)
    state = random.getstate()
    tokenizer, order = TOKENIZERS["probe"](), [(task, index) for task in FAMILIES for index in (2, 0)]
    again = {(t, i): sample(tokenizer, in_noise(t), seed=0, length=2048, index=i) for t, i in reversed(order)}
    assert random.getstate() == state
    for task, index in order:
        assert again[task, index] == built(task, "probe", 2048, index)


def test_same_in_another_process() -> None:
    code = (
        "import json; from ruler_prompts import FAMILIES, built;"
        "print(json.dumps([built(task, 'probe', 2048, 1).sha256 for task in reversed(FAMILIES)]))"
    )
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONHASHSEED": "4321", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [built(task, "probe", 2048, 1).sha256 for task in reversed(FAMILIES)]


@pytest.mark.parametrize("task", FAMILIES)
def test_another_seed_index_or_length_is_another_sample(task: str) -> None:
    tokenizer = TOKENIZERS["probe"]()
    made = [built(task), built(task, index=1), built(task, length=4096)]
    made.append(sample(tokenizer, in_noise(task), seed=1, length=2048, index=0))
    assert len({one.sha256 for one in made}) == 4
    assert len({one.draft.expected for one in made}) == 4


def test_tasks_share_no_answer() -> None:
    answers = [value for task in FAMILIES for (value,) in built(task).draft.expected]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize(
    ("task", "first", "second"),
    [
        ("niah_single_1", "07531130cdd622b7", "258937e6833d92ee"),
        ("niah_single_2", "082d523aaf2ed20d", "63f289d9b70799ae"),
        ("niah_single_3", "5c6e7686cf8e8bf6", "9e490196e043bd00"),
        ("niah_multikey_1", "e0fd9caf8b218eb9", "787277755de22754"),
        ("niah_multikey_2", "64280854d19fcdd3", "b192fe8ccb4b21e8"),
        ("niah_multikey_3", "5ce58ad786860e7a", "da9088c0ea601e22"),
        ("niah_multivalue", "5fd01d159626c247", "1fea81c88070d0dc"),
        ("niah_multiquery", "19f2207e514514b6", "76a086a1eb390e93"),
        ("vt", "9ac6502b6bcb2068", "8dfe850f8d00642e"),
        ("needle_hard", "36d30a8c577c1d14", "63b187705f72a8de"),
    ],
)
def test_golden(task: str, first: str, second: str) -> None:
    """With one byte a token and generated prose, which are the same everywhere."""
    made = [sample(one_byte_a_token(), in_noise(task), seed=0, length=4096, index=index) for index in (0, 1)]
    assert [one.sha256[:16] for one in made] == [first, second]


# What cannot be done


@pytest.mark.parametrize(
    ("task", "length", "problem"),
    [
        ("niah_single_1", 64, "length 64 has no room for niah_single_1: ask for"),
        ("niah_multikey_1", 256, r"niah_multikey_1 has no room for 4 needles .*128 tokens.*longer length"),
        ("niah_multikey_3", 256, r"niah_multikey_3 has no room for a needle .*128 tokens.*longer length"),
        ("vt", 256, r"vt has no room for 5 needles .*226 tokens.*longer length"),
        ("needle_hard", 1024, r"needle_hard has no room for 32 needles .*896 tokens.*longer length"),
    ],
)
def test_a_length_that_is_too_short_is_refused(task: str, length: int, problem: str) -> None:
    with pytest.raises(KvevalError, match=problem):
        built(task, "gpt2", length)


def test_an_unknown_haystack_is_refused() -> None:
    family = hard.HardNeedle(haystack="no/such/book")
    with pytest.raises(KvevalError, match=r"'no/such/book' does not exist: give noise, repeat, pydoc"):
        sample(TOKENIZERS["probe"](), family, seed=0, length=4096, index=0)
