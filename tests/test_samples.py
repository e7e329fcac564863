"""Contexts: exact token ids, needles where they were asked for, room that is used, and the same sample every time."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from kveval.errors import EvidenceError, KvevalError
from kveval.probe.tokenizer import build_tokenizer
from kveval.samples import lexicon
from kveval.samples.context import Context, build_context, needle_mask, prompt_ids, prompt_text
from kveval.samples.encoded import encode, insert
from kveval.samples.haystack import haystack, split
from kveval.samples.needles import ANSWER_TOKENS, draw, generation_budget, needle_text, question_text

DEPTHS = [tenth / 10 for tenth in range(11)]
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# The pattern of Llama 3: up to three digits a token, and punctuation takes the line breaks behind it.
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def trained(kind: str) -> Any:
    """A byte-level BPE trained on some of Python's documentation, like GPT-2's or like Llama 3's with BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|bos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.pre_tokenizer = GPT2
    if kind == "llama3":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.train_from_iterator([topics["compound"], topics["types"], topics["debugger"]], trainer)
    if kind == "llama3":
        bos = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>")


@cache
def one_byte_a_token() -> Any:
    """A tokenizer that is the same everywhere and for ever, for golden values."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = GPT2, decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "probe": cache(build_tokenizer),
    "gpt2": lambda: trained("gpt2"),
    "llama3": lambda: trained("llama3"),
}


@cache
def built(tokenizer: str, hay: str = "noise", context: int = 0) -> Context:
    return build_context(
        TOKENIZERS[tokenizer](),
        seed=0,
        context=context,
        lengths=[4096, 8192],
        depths=DEPTHS,
        needles_per_cell=2,
        haystack=haystack(hay),
    )


def small(tokenizer: Any = None, **changes: Any) -> Context:
    """A context of 1,024 tokens and three needles, but for ``changes``."""
    arguments: dict[str, Any] = {
        "seed": 0,
        "context": 0,
        "lengths": [1024],
        "depths": [0, 0.5, 1],
        "needles_per_cell": 1,
        "haystack": haystack("noise"),
    }
    return build_context(tokenizer or TOKENIZERS["probe"](), **(arguments | changes))


class Counting:
    """Passes everything on to the tokenizer and counts the tokens it makes."""

    is_fast = True

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.tokens = tokenizer, 0
        self.decode = tokenizer.decode

    def __call__(self, text: str | list[str], **options: Any) -> Any:
        batch = self.tokenizer(text, **options)
        ids = batch["input_ids"]
        self.tokens += len(ids) if isinstance(text, str) else sum(map(len, ids))
        return batch


# Words


def test_lexicon() -> None:
    words = lexicon.vocabulary()
    assert 600 <= len(words) <= 1200
    assert len(set(lexicon.KEY_ADJECTIVES)) == len(lexicon.KEY_ADJECTIVES) >= 60
    assert len(set(lexicon.KEY_NOUNS)) == len(lexicon.KEY_NOUNS) >= 80
    assert all(re.fullmatch("[A-Za-z]+", word) for word in words)
    keys = {*lexicon.KEY_ADJECTIVES, *lexicon.KEY_NOUNS}
    assert not keys & set(lexicon.haystack_words())
    others = {*lexicon.words(lexicon.NEEDLE), *lexicon.words(lexicon.QUESTION)}
    assert not keys & others


def test_vocabulary_covers_all_that_is_generated() -> None:
    context = built("probe")
    text = context.text + "".join(question.tail for question in context.questions)
    assert set(re.findall("[A-Za-z]+", text)) <= set(lexicon.vocabulary())
    assert set(re.sub(r"[A-Za-z0-9 \n]", "", text)) <= set(lexicon.PUNCTUATION)


# Haystacks


def start(name: str, context: int, pieces: int = 300, seed: int = 0) -> str:
    return "".join(islice(haystack(name).pieces(seed, context), pieces))


@pytest.mark.parametrize("name", ["noise", "pydoc"])
def test_haystack_depends_on_seed_and_context_alone(name: str) -> None:
    random.seed(1)
    first = start(name, 0)
    random.seed(2)
    assert start(name, 0) == first
    assert len({first, start(name, 1), start(name, 0, seed=1)}) == 3


def test_noise_is_the_same_for_ever() -> None:
    found = hashlib.sha256(start("noise", 0).encode()).hexdigest()
    assert found == "cf5eb79c2c673cde5f2a4acd49eb1e398a6f945bada19902144576618c4d5911"


def test_noise_varies_and_repeats_as_prose_does() -> None:
    sentences = list(islice(haystack("noise").pieces(0, 0), 2000))
    assert len(set(sentences)) > 1900
    words = Counter(re.findall("[a-z]+", "".join(sentences)))
    assert len(words) > 550
    pairs = Counter(zip(*(re.findall(r"\w+", "".join(sentences))[i:] for i in (0, 1)), strict=False))
    assert sum(count - 1 for count in pairs.values()) / sum(pairs.values()) > 0.4


def test_pydoc_is_all_of_the_documentation() -> None:
    hay = haystack("pydoc")
    assert hay.chars is not None
    text = ""
    for piece in hay.pieces(0, 0):
        text += piece
        if len(text) >= hay.chars + 2 * len(topics):
            break
    assert all(topic.strip() in text for topic in topics.values())
    assert len(hay.sha256) == 64


@given(st.text(alphabet="ab .\n!?\u3002\u00e9", max_size=400))
def test_split_loses_nothing(text: str) -> None:
    pieces = split(text.strip())
    assert "".join(pieces) == text.strip()
    assert all(len(piece.strip()) <= 160 for piece in pieces)


def test_user_files_repeat_and_say_how_often(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("A first line. " * 20, encoding="utf-8")
    (tmp_path / "b.txt").write_text("\ufeff" + "Ein zweites St\u00fcck. " * 20, encoding="utf-8")
    (tmp_path / "c.png").write_bytes(b"\xff\xfe")
    hay = haystack(str(tmp_path))
    context = small(trained("gpt2"), haystack=hay)
    assert context.haystack_passes is not None
    assert 2 < context.haystack_passes == pytest.approx(len(context.text) / (hay.chars or 0), rel=0.2)
    assert "Ein zweites St\u00fcck." in context.text
    assert "\ufeff" not in context.text
    assert context.haystack_sha256 == hay.sha256 != haystack(str(tmp_path / "a.md")).sha256


def test_a_single_document_starts_elsewhere_in_each_context_and_nowhere_else_when_moved(tmp_path: Path) -> None:
    lines = [f"Line number {number} of a file." for number in range(20)]
    for name in ("a.md", "moved.md"):
        (tmp_path / name).write_text(" ".join(lines), encoding="utf-8")
    one, moved = haystack(str(tmp_path / "a.md")), haystack(str(tmp_path / "moved.md"))
    for seed in range(5):
        starts = [next(one.pieces(seed, context)).strip() for context in range(8)]
        assert len(set(starts)) == 8
        assert set(starts) <= set(lines)
        assert starts == [next(moved.pieces(seed, context)).strip() for context in range(8)]


def test_bad_haystacks(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "image.png").write_bytes(b"x")
    (tmp_path / "folder").mkdir()
    for name, problem in [
        ("missing.txt", "does not exist"),
        ("empty.txt", "is empty"),
        ("latin.txt", "not UTF-8"),
        ("image.png", "not a text file"),
        ("folder", "holds no .txt"),
    ]:
        with pytest.raises(KvevalError, match=problem) as caught:
            haystack(str(tmp_path / name))
        assert name in str(caught.value)


# Needles


def test_needles_are_unique_and_not_in_the_haystack() -> None:
    taken = draw(0, 0, 50, "")
    text = f"the {taken[3][0]} is 5 and {taken[7][1]} is not."
    drawn = draw(0, 0, 3000, text)
    assert drawn[:3] == taken[:3]  # more needles, the same first ones
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 3000
        assert not any(word in text for word in column)
    with pytest.raises(KvevalError, match="10,455 keys"):
        draw(0, 0, 10_456, "")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_generation_budget_is_enough(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    budget = generation_budget(tokenizer)
    assert 4 <= budget <= ANSWER_TOKENS
    for value in range(1_000_000, 10_000_000, 123_457):
        assert len(tokenizer(f" {value}.", add_special_tokens=False)["input_ids"]) <= budget
    assert generation_budget(one_byte_a_token()) == ANSWER_TOKENS == len(" 1,234,567.") + 1


def test_the_probe_can_tell_needles_apart() -> None:
    """No four tokens before a token of a value stand anywhere else before another token."""
    context = built("probe")
    ids = context.ids.tolist()
    following = defaultdict(set)
    for at in range(4, len(ids)):
        following[tuple(ids[at - 4 : at])].add(ids[at])
    for needle in context.needles:
        value = len(TOKENIZERS["probe"]().tokenize(f" {needle.value}"))
        for at in range(needle.last + 1 - value, needle.last + 1):
            assert following[tuple(ids[at - 4 : at])] == {ids[at]}


# Contexts


@pytest.mark.parametrize("hay", ["noise", "pydoc"])
@pytest.mark.parametrize("name", TOKENIZERS)
class TestContext:
    """One context of 8,192 tokens for each tokenizer and haystack."""

    def test_ids_are_the_tokens_of_the_text(self, name: str, hay: str) -> None:
        context, tokenizer = built(name, hay), TOKENIZERS[name]()
        assert context.ids.tolist() == tokenizer(context.text, verbose=False)["input_ids"]
        assert context.ids.dtype == np.int32
        bos = 1 if name == "llama3" else 0
        assert len(context.encoded) == len(context.ids) - bos
        assert context.ids.tolist().count(0) == bos or name != "llama3"

    def test_between_the_needles_is_the_haystack(self, name: str, hay: str) -> None:
        context = built(name, hay)
        left = context.text
        for needle in context.needles:
            left = left.replace(needle_text(needle.key, needle.value), "", 1)
        assert not re.search("access code of", left)
        assert start(hay, 0, pieces=3000).lstrip().startswith(left)

    def test_lengths_are_used_and_kept(self, name: str, hay: str) -> None:
        context, tokenizer = built(name, hay), TOKENIZERS[name]()
        tails = [tokenizer(question.tail, add_special_tokens=False)["input_ids"] for question in context.questions]
        longest = max(map(len, tails))
        for length, cut in context.cuts.items():
            assert 0.98 * length <= cut.tokens + longest + ANSWER_TOKENS <= length
            asked = [prompt_ids(tokenizer, context, q) for q in context.questions if q.length == length]
            assert max(prefix + len(tail) for prefix, tail in asked) + ANSWER_TOKENS <= length
        assert len(context.text) == context.cuts[8192].chars
        assert len(context.ids) == context.cuts[8192].tokens <= 8192

    def test_prompts_are_the_tokens_of_their_text(self, name: str, hay: str) -> None:
        context, tokenizer = built(name, hay), TOKENIZERS[name]()
        for question in context.questions[::7]:
            prefix, tail = prompt_ids(tokenizer, context, question)
            whole = tokenizer(prompt_text(context, question), verbose=False)["input_ids"]
            assert context.ids[:prefix].tolist() + tail == whole
            assert 0 <= context.cuts[question.length].tokens - prefix <= 2
            assert len(tail) < 60

    def test_needles_can_be_read_and_lie_where_asked(self, name: str, hay: str) -> None:
        context, tokenizer = built(name, hay), TOKENIZERS[name]()
        for needle in context.needles:
            sentence = needle_text(needle.key, needle.value)[1:-1]
            assert context.text[needle.start : needle.end] == sentence
            assert sentence in tokenizer.decode(context.ids[needle.first : needle.last + 1])
            assert needle.first >= 8
        for question in context.questions:
            needle, cut = context.needles[question.needle], context.cuts[question.length]
            assert needle.last < cut.tokens
            off = abs(needle.first - question.depth * cut.tokens)
            assert off <= 0.025 * question.length

    def test_every_cell_has_its_own_questions(self, name: str, hay: str) -> None:
        context = built(name, hay)
        cells = Counter((question.length, question.depth) for question in context.questions)
        assert set(cells) == {(length, depth) for length in (4096, 8192) for depth in DEPTHS}
        assert set(cells.values()) == {2}
        for length in (4096, 8192):
            asked = [question for question in context.questions if question.length == length]
            assert [question.number for question in asked] == list(range(22))
            assert len({question.needle for question in asked}) == 22
            first = [context.needles[question.needle].first for question in asked]
            assert first == sorted(first)
        for question in context.questions:
            needle = context.needles[question.needle]
            assert (question.tail, question.expected) == (question_text(needle.key), needle.value)
        values = re.findall(r"(?<!\d)\d{7}(?!\d)", context.text)
        for needle in context.needles:
            assert values.count(needle.value) == 1
            assert context.text.count(needle.key) == 1
        assert {question.needle for question in context.questions} == set(range(len(context.needles)))

    def test_short_lengths_are_not_crowded(self, name: str, hay: str) -> None:
        context = built(name, hay)
        assert len(context.needles) < len(context.questions)  # lengths share needles
        mask = needle_mask(context)
        assert mask.sum() == sum(needle.last + 1 - needle.first for needle in context.needles)
        assert 0.05 < mask[:4096].mean() < 0.30
        outside = context.ids[~mask]
        assert not any(needle.value in TOKENIZERS[name]().decode(outside) for needle in context.needles[:5])


@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_edges_of_a_context(depth: float) -> None:
    context = small(lengths=[2048], depths=[depth])
    needle, cut = context.needles[0], context.cuts[2048]
    if depth == 0:
        assert 8 <= needle.first <= 40
    else:
        assert cut.tokens - 40 <= needle.last < cut.tokens


def test_long_contexts_are_tokenised_about_once() -> None:
    counting = Counting(trained("gpt2"))
    lengths = [2**power for power in range(12, 18)]
    context = build_context(
        counting,
        seed=0,
        context=0,
        lengths=lengths,
        depths=DEPTHS,
        needles_per_cell=4,
        haystack=haystack("noise"),
    )
    assert 0.999 * 131_072 < len(context.ids) <= 131_072
    assert counting.tokens < 1.5 * len(context.ids)
    assert len(context.questions) == 6 * 11 * 4
    for question in context.questions:
        off = context.needles[question.needle].first - question.depth * context.cuts[question.length].tokens
        assert abs(off) <= (0.02 if question.length > 4096 else 0.03) * question.length


def test_the_same_context_whatever_was_done_before() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 (the global state is what is under test)
    alone = build_context(
        build_tokenizer(),
        seed=0,
        context=1,
        lengths=[8192, 4096],
        depths=list(reversed(DEPTHS)),
        needles_per_cell=2,
        haystack=haystack("noise"),
    )
    in_turn = [built("probe", "noise", context) for context in (0, 1, 2)]
    assert alone.sha256 == in_turn[1].sha256
    assert alone.questions == in_turn[1].questions
    assert len({context.sha256 for context in in_turn}) == 3
    assert small(seed=1).sha256 != small(seed=0).sha256


def test_golden_context() -> None:
    context = small(one_byte_a_token(), lengths=[2048, 4096], needles_per_cell=1)
    assert context.sha256 == "aa4fa57a528be02d6ec850ffb715ab5149f4cf9cad170fcf1fb7560c784155f9"


@settings(max_examples=30, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["gpt2", "llama3"]))
def test_inserting_equals_tokenising_again(data: st.DataObject, kind: str) -> None:
    tokenizer = trained(kind)
    pieces = list(islice(haystack("pydoc").pieces(data.draw(st.integers(0, 99)), 0), 40))
    (text,) = encode(tokenizer, ["".join(pieces).lstrip()])
    spaces = [match.start() for match in re.finditer(r"(?<=\S)\s", text.text)]
    chars = sorted(data.draw(st.lists(st.sampled_from(spaces), min_size=1, max_size=12)))
    inserts = [(char, needle_text("amber falcon", str(1_000_000 + char))) for char in chars]
    whole = insert(tokenizer, text, inserts)
    assert whole.ids.tolist() == tokenizer(whole.text, add_special_tokens=False)["input_ids"]
    assert all(words in whole.text for _, words in inserts)
    assert len(whole.text) == len(text.text) + sum(len(words) for _, words in inserts)


# What cannot be done


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"needles_per_cell": 0}, "needles_per_cell is 0"),
        ({"depths": [0.5, 1.5]}, "depths .*1.5"),
        ({"depths": [-0.1]}, "depths"),
        ({"depths": []}, "depths"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [0]}, "lengths"),
        ({"lengths": [64]}, "length 64 is too short"),
        ({"lengths": [100], "reserve_tokens": 60}, "length 100 is too short"),
        ({"lengths": [512, 4096], "depths": DEPTHS, "needles_per_cell": 2}, "length 512 cannot hold 2 needles"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(KvevalError, match=problem):
        small(**changes)


def test_unsuitable_tokenizers_are_refused() -> None:
    with pytest.raises(KvevalError, match="ByT5Tokenizer gives no character offsets"):
        small(ByT5Tokenizer())
    words = {word: i for i, word in enumerate(["[UNK]", *lexicon.vocabulary(), *lexicon.PUNCTUATION])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(EvidenceError, match="this tokenizer loses text"):
        small(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
