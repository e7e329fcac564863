"""A context of the shared protocol and its questions, whatever is in it; how it is finished once its text stands."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from kveval.errors import EvidenceError, KvevalError
from kveval.samples.encoded import Encoded, Ints, encode, extend, special_prefix
from kveval.samples.laying import JOINT_TOKENS
from kveval.samples.ruler.sample import spread

UNTIL = ("\n",)  # an answer ends here
PART_SHARE = 0.002  # of a length may be left unused where a sentence could be cut between words instead
_ROOM = 1.3  # an answer may take so many times the tokens of what is expected
_SPARE_TOKENS = 4


@dataclass(frozen=True)
class Asking:
    """A question before its context is cut: ``tail`` is asked after the text; ``passages`` are numbers of passages."""

    task: str
    length: int
    depth: float  # of the first passage, 0..1
    tail: str
    expected: tuple[tuple[str, ...], ...]
    any_of: bool
    passages: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A question of ``task`` asked at the cut of ``length``. Groups of ``expected`` are aliases of one another.

    Tokens ``first``..``last`` of the context, both included, hold the passages that it is about.
    """

    task: str
    context: int
    length: int
    depth: float
    number: int  # within (task, context, length)
    tail: str
    expected: tuple[tuple[str, ...], ...]
    any_of: bool
    first: int
    last: int
    until: tuple[str, ...]
    budget_tokens: int


@dataclass(frozen=True)
class Origin:
    """What a context is: its kind of text, and which one of that kind. ``haystack``: name and SHA-256, where it has one."""

    kind: str  # prose | repeat | words | uuids | documents
    seed: int
    context: int
    haystack: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class SharedContext:
    """A context of at most max(lengths) tokens that serves all nested lengths."""

    origin: Origin
    ids: Ints  # [tokens], with a BOS token where the tokenizer has one
    cuts: dict[int, int]  # length -> its tokens of ``ids``
    questions: tuple[Question, ...]  # by length, then task
    planted: tuple[tuple[int, int], ...]  # first and last token of each passage that was planted in prose
    sha256: str  # of ids and questions
    encoded: Encoded = field(repr=False)  # of the text, without BOS

    def prompt(self, tokenizer: Any, question: Question) -> tuple[int, list[int]]:
        """(n, tail): ``ids[:n]`` and then ``tail`` are the tokens of the question's whole prompt, BOS included."""
        before = len(self.ids) - len(self.encoded)
        part = self.encoded.part(0, self._chars(question.length))
        keep, tail = extend(tokenizer, part, question.tail)
        return before + keep, tail

    def text(self, question: Question) -> str:
        """The question's whole prompt as text, without BOS."""
        return self.encoded.text[: self._chars(question.length)] + question.tail

    def _chars(self, length: int) -> int:
        last = self.cuts[length] - (len(self.ids) - len(self.encoded))
        return int(self.encoded.ends[last - 1])


def depths(task: str, context: int, number: int, per_context: int, count: int = 1) -> list[float]:
    """Depths (0..1) of the ``count`` passages of a question. One: a tenth, even over questions and contexts; several: rising."""
    turn = spread(context * per_context + number, zlib.crc32(task.encode()) / 2**32)
    if count == 1:
        return [math.floor(turn * 11) / 10]
    return [(passage + turn) / count for passage in range(count)]


def tail_tokens(tokenizer: Any, asked: Sequence[Asking]) -> int:
    """Tokens that the longest question and its answer take after the context."""
    tails = encode(tokenizer, [asking.tail for asking in asked])
    budgets = answer_budgets(tokenizer, asked)
    return max(len(tail) + budgets[asking.task] for tail, asking in zip(tails, asked, strict=True)) + JOINT_TOKENS


def answer_budgets(tokenizer: Any, asked: Sequence[Asking]) -> dict[str, int]:
    """Task -> tokens to generate: what its longest expected answer takes, and nearly a third more."""
    budgets: dict[str, int] = {}
    texts = [f" {', '.join(max(group, key=len) for group in asking.expected)}." for asking in asked]
    for asking, answer in zip(asked, encode(tokenizer, texts), strict=True):
        needed = math.ceil(_ROOM * len(answer)) + _SPARE_TOKENS
        budgets[asking.task] = max(needed, budgets.get(asking.task, 0))
    return budgets


def finish(
    tokenizer: Any,
    origin: Origin,
    encoded: Encoded,
    cuts: dict[int, int],
    passages: Sequence[tuple[int, int, str]],
    asked: Sequence[Asking],
    *,
    planted: bool,
    budgets: dict[str, int] | None = None,
    until: tuple[str, ...] = UNTIL,
) -> SharedContext:
    """The context of a text whose lengths are cut at characters ``cuts``.

    ``passages``: first character, end character, and what must be read there; ``planted``: they were put into a haystack;
    ``budgets``: task -> tokens to generate, where they are not those that its answers need; ``until``: where answers end.
    Raises EvidenceError when a passage is not found again in the token ids, or lies beyond the length that asks about it.
    """
    prefix = special_prefix(tokenizer)
    ids = np.concatenate([np.asarray(prefix, dtype=np.int32), encoded.ids])
    spans = {number: _span(tokenizer, encoded, *passages[number]) for asking in asked for number in asking.passages}
    budgets = budgets or answer_budgets(tokenizer, asked)
    numbers: dict[tuple[str, int], int] = {}
    questions = []
    for asking in asked:
        first = min(spans[number][0] for number in asking.passages) + len(prefix)
        last = max(spans[number][1] for number in asking.passages) + len(prefix)
        if last >= encoded.tokens_until(cuts[asking.length]) + len(prefix):
            raise EvidenceError(f"{asking.task}: a passage lies beyond the {asking.length:,} tokens that ask about it")
        number = numbers[asking.task, asking.length] = numbers.get((asking.task, asking.length), -1) + 1
        questions.append(
            Question(
                asking.task,
                origin.context,
                asking.length,
                asking.depth,
                number,
                asking.tail,
                asking.expected,
                asking.any_of,
                first,
                last,
                until,
                budgets[asking.task],
            )
        )
    made = SharedContext(
        origin=origin,
        ids=ids,
        cuts={length: encoded.tokens_until(chars) + len(prefix) for length, chars in cuts.items()},
        questions=tuple(questions),
        planted=_planted(encoded, passages, len(prefix)) if planted else (),
        sha256=_sha256(ids, questions),
        encoded=encoded,
    )
    for question in questions:
        keep, tail = made.prompt(tokenizer, question)
        if keep + len(tail) + question.budget_tokens > question.length:
            raise EvidenceError(
                f"{question.task}: a prompt of {question.length:,} tokens came out longer: report this tokenizer"
            )
    return made


def crowded(length: int) -> KvevalError:
    """The error for a length that cannot hold its passages."""
    return KvevalError(
        f"length {length:,} cannot hold the passages of its questions (at most 30 % of its tokens): ask fewer questions "
        "(--needles 1), or a longer length"
    )


def _planted(encoded: Encoded, passages: Sequence[tuple[int, int, str]], before: int) -> tuple[tuple[int, int], ...]:
    spans = [_tokens(encoded, start, end) for start, end, _ in passages if end <= len(encoded.text)]
    return tuple((first + before, last + before) for first, last in spans)


def _tokens(encoded: Encoded, start: int, end: int) -> tuple[int, int]:
    """First and last token of characters start..end."""
    return encoded.tokens_until(start), int(np.searchsorted(encoded.starts, end, side="left")) - 1


def _span(tokenizer: Any, encoded: Encoded, start: int, end: int, words: str) -> tuple[int, int]:
    first, last = _tokens(encoded, start, end)
    read = tokenizer.decode(encoded.ids[first : last + 1].tolist(), clean_up_tokenization_spaces=False)
    if words not in read:
        raise EvidenceError(f"passage '{words}' reads '{read}' in the token ids: this tokenizer loses text")
    return first, last


def _sha256(ids: Ints, questions: Sequence[Question]) -> str:
    digest = hashlib.sha256(ids.astype("<i4").tobytes())
    digest.update(json.dumps([astuple(question) for question in questions]).encode())
    return digest.hexdigest()
