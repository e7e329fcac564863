"""What an arm reads and is asked, whichever task it comes from: a text's token ids, and its questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kveval import lmtasks
from kveval.samples.context import Context, needle_mask, prompt_ids
from kveval.samples.shared.context import SharedContext

if TYPE_CHECKING:
    from kveval.engines.base import Prompt

PROSE = ("prose", "hard", "documents")  # kinds of context whose text is worth a perplexity


@dataclass(frozen=True)
class Asked:
    """A question. ``place``: its task's own numbers for it, by which lm-eval's document names it."""

    task: str
    length: int
    depth: float
    number: int  # within (task, text, length)
    place: tuple[Any, ...]
    prefix: int  # tokens of the text before ``tail``
    tail: tuple[int, ...]
    until: tuple[str, ...]
    budget_tokens: int
    expected: tuple[tuple[str, ...], ...]
    any_of: bool
    first: int  # first and last token of what it is about
    last: int

    @property
    def told(self) -> str:
        """What is expected, for people to read; aliases after the first are left out."""
        return ", ".join(group[0] for group in self.expected)


@dataclass(frozen=True, eq=False)
class Text:
    """One context of a run, number ``context`` of it."""

    context: int
    kind: str
    ids: np.ndarray[Any, np.dtype[np.int32]]  # [tokens]
    left_out: np.ndarray[Any, np.dtype[np.bool_]]  # [tokens]: kept out of divergence means
    questions: tuple[Asked, ...]
    haystack: tuple[str, str] | None  # name, SHA-256
    sha256: str


def prompts_of(text: Text) -> list[Prompt]:
    """The prompt of each question of ``text``, in its order."""
    from kveval.engines.base import Prompt

    return [Prompt(text.ids, asked.prefix, asked.tail, asked.until, asked.budget_tokens) for asked in text.questions]


def of_grid(tokenizer: Any, contexts: Sequence[Context]) -> tuple[Text, ...]:
    """The texts of the needle grid's contexts."""
    budget = lmtasks.generation_budget(tokenizer)
    texts = []
    for context in contexts:
        asked = []
        for question in context.questions:
            prefix, tail = prompt_ids(tokenizer, context, question)
            needle = context.needles[question.needle]
            place = (question.context, question.length, question.number)
            asked.append(
                Asked(
                    lmtasks.TASK,
                    question.length,
                    question.depth,
                    question.number,
                    place,
                    prefix,
                    tuple(tail),
                    lmtasks.UNTIL,
                    budget,
                    ((question.expected,),),
                    False,
                    needle.first,
                    needle.last,
                )
            )
        haystack = (context.haystack, context.haystack_sha256)
        texts.append(
            Text(context.context, "grid", context.ids, needle_mask(context), tuple(asked), haystack, context.sha256)
        )
    return tuple(texts)


def of_shared(tokenizer: Any, contexts: Sequence[SharedContext]) -> tuple[Text, ...]:
    """The texts of contexts of the shared protocol, numbered as they come.

    Lists of words, UUIDs and repeated sentences are left out of divergence where there is any other text.
    """
    prose = any(context.origin.kind in PROSE for context in contexts)
    texts = []
    for number, context in enumerate(contexts):
        asked = []
        for question in context.questions:
            prefix, tail = context.prompt(tokenizer, question)
            asked.append(
                Asked(
                    question.task,
                    question.length,
                    question.depth,
                    question.number,
                    (question.task, question.context, question.length, question.number),
                    prefix,
                    tuple(tail),
                    question.until,
                    question.budget_tokens,
                    question.expected,
                    question.any_of,
                    question.first,
                    question.last,
                )
            )
        left_out = np.full(len(context.ids), prose and context.origin.kind not in PROSE)
        for first, last in context.planted:
            left_out[first : last + 1] = True
        texts.append(
            Text(
                number,
                context.origin.kind,
                context.ids,
                left_out,
                tuple(asked),
                context.origin.haystack,
                context.sha256,
            )
        )
    return tuple(texts)
