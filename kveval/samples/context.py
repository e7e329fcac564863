"""One long token sequence with needles planted in it, and the questions of every length and depth about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kveval.errors import EvidenceError, KvevalError
from kveval.samples.encoded import Encoded, Ints, extend, special_prefix
from kveval.samples.haystack import Haystack
from kveval.samples.layout import Grid
from kveval.samples.needles import Needle, question_text
from kveval.samples.planting import Planted, plant


@dataclass(frozen=True)
class Cut:
    """Where a length ends: its ``tokens`` tokens (a BOS token counted) lie within the first ``chars`` characters."""

    tokens: int
    chars: int


@dataclass(frozen=True)
class Question:
    """A question about ``needles[needle]``, asked at the cut of ``length``."""

    context: int
    length: int
    depth: float
    number: int  # within (context, length)
    needle: int
    tail: str  # text after the context
    expected: str


@dataclass(frozen=True, eq=False)
class Context:
    """A context of at most max(lengths) tokens that serves all nested lengths."""

    seed: int
    context: int
    ids: Ints  # [tokens], with a BOS token where the tokenizer has one
    text: str
    cuts: dict[int, Cut]  # by length
    needles: tuple[Needle, ...]  # from left to right
    questions: tuple[Question, ...]  # by length, then depth
    haystack: str
    haystack_sha256: str
    haystack_passes: float | None  # how often the haystack's text was gone through; None for generated text
    sha256: str  # of ids and questions
    encoded: Encoded = field(repr=False)  # of text, without BOS


def build_context(
    tokenizer: Any,
    *,
    seed: int,
    context: int,
    lengths: Sequence[int],
    depths: Sequence[float],
    needles_per_cell: int,
    haystack: Haystack,
    reserve_tokens: int = 0,
) -> Context:
    """Context number ``context`` of ``seed``: the same arguments give the same context in any process and order.

    Every length has room for its longest question, ANSWER_TOKENS to answer it and ``reserve_tokens`` (a chat template).
    Tokenises about 1.2 times its own length. Raises KvevalError when the needles do not fit or the tokenizer is not a
    fast one, EvidenceError when a needle cannot be found again in the token ids.
    """
    grid = Grid.of(lengths, depths, needles_per_cell)
    prefix = special_prefix(tokenizer)
    planted = plant(
        tokenizer,
        grid,
        haystack,
        seed=seed,
        context=context,
        prefix_tokens=len(prefix),
        reserve_tokens=reserve_tokens,
    )
    encoded = planted.encoded
    cuts = {length: Cut(encoded.tokens_until(chars) + len(prefix), chars) for length, chars in planted.cuts.items()}
    _refuse_equal(cuts)
    needles = tuple(_needles(tokenizer, planted, len(prefix)))
    questions = tuple(_questions(grid, cuts, needles, context))
    ids = np.concatenate([np.asarray(prefix, dtype=np.int32), encoded.ids])
    return Context(
        seed=seed,
        context=context,
        ids=ids,
        text=encoded.text,
        cuts=cuts,
        needles=needles,
        questions=questions,
        haystack=haystack.name,
        haystack_sha256=haystack.sha256,
        haystack_passes=planted.haystack_chars / haystack.chars if haystack.chars else None,
        sha256=_sha256(ids, questions),
        encoded=encoded,
    )


def prompt_ids(tokenizer: Any, context: Context, question: Question) -> tuple[int, list[int]]:
    """(n, tail): ``context.ids[:n]`` and then ``tail`` are the tokens of the question's whole prompt, BOS included.

    n is the length's cut, or a token or two less where the last token of the context joins the question's first.
    """
    before = len(context.ids) - len(context.encoded)
    keep, tail = extend(tokenizer, context.encoded.part(0, context.cuts[question.length].chars), question.tail)
    return before + keep, tail


def prompt_text(context: Context, question: Question) -> str:
    """The question's whole prompt as text (without BOS)."""
    return context.text[: context.cuts[question.length].chars] + question.tail


def needle_mask(context: Context) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """True for tokens inside planted needles, [tokens]: they are kept out of divergence means."""
    mask = np.zeros(len(context.ids), dtype=np.bool_)
    for needle in context.needles:
        mask[needle.first : needle.last + 1] = True
    return mask


def _refuse_equal(cuts: dict[int, Cut]) -> None:
    """Two lengths that end with the same sentence would ask the same questions twice."""
    for one, other in pairwise(sorted(cuts)):
        if cuts[one].tokens == cuts[other].tokens:
            raise KvevalError(
                f"lengths {one:,} and {other:,} end with the same sentence and would ask the same questions: give "
                "lengths further apart"
            )


def _needles(tokenizer: Any, planted: Planted, before: int) -> Iterator[Needle]:
    """The needles with their tokens, each of them read back out of the token ids."""
    encoded = planted.encoded
    for (key, value), (start, end) in zip(planted.pairs, planted.spans, strict=True):
        first = encoded.tokens_until(start)
        last = int(np.searchsorted(encoded.starts, end, side="left")) - 1
        read = tokenizer.decode(encoded.ids[first : last + 1].tolist(), clean_up_tokenization_spaces=False)
        if value not in read or key not in read:
            raise EvidenceError(f"needle '{key}' = {value} reads '{read}' in the token ids: this tokenizer loses text")
        yield Needle(key, value, first + before, last + before, start, end)


def _questions(grid: Grid, cuts: dict[int, Cut], needles: Sequence[Needle], context: int) -> Iterator[Question]:
    """For each length and depth the nearest needles that no other depth of this length asks about."""
    size = float(np.mean([needle.last + 1 - needle.first for needle in needles]))
    for length in grid.lengths:
        free = {number: needle for number, needle in enumerate(needles) if needle.last < cuts[length].tokens}
        number = 0
        for depth in grid.depths:
            distances = {i: abs(needle.first - depth * (cuts[length].tokens - size)) for i, needle in free.items()}
            nearest = sorted(distances, key=distances.__getitem__)[: grid.needles_per_cell]
            if len(nearest) < grid.needles_per_cell or distances[nearest[-1]] > grid.tolerance(length, size):
                raise grid.crowded(length)
            for i in sorted(nearest):
                needle = free.pop(i)
                yield Question(context, length, depth, number, i, question_text(needle.key), needle.value)
                number += 1


def _sha256(ids: Ints, questions: Sequence[Question]) -> str:
    digest = hashlib.sha256(ids.astype("<i4").tobytes())
    digest.update(json.dumps([astuple(question) for question in questions]).encode())
    return digest.hexdigest()
