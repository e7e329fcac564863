"""A context with one question: the strict protocol, and tasks whose texts are made for one length, as counting tasks are."""

from __future__ import annotations

from typing import Any

from kveval.samples.encoded import encode
from kveval.samples.ruler.sample import Draft, Family, sample
from kveval.samples.shared.context import UNTIL, Asking, Origin, SharedContext, finish


def build_alone(
    tokenizer: Any,
    family: Family,
    *,
    seed: int,
    context: int,
    length: int,
    until: tuple[str, ...] = UNTIL,
    kind: str | None = None,
    haystack: tuple[str, str] | None = None,
) -> SharedContext:
    """Sample number ``context`` of ``family`` at ``length`` (``samples.ruler.sample.sample``), with RULER's room to answer.

    ``kind`` and ``haystack``: its Origin's, the family's name by default.
    """
    draft = sample(tokenizer, family, seed=seed, length=length, index=context).draft
    text = draft.text.removesuffix(draft.answer_prefix)
    (encoded,) = encode(tokenizer, [text])
    passages = _passages(draft) or [(0, len(text), "")]
    asked = tuple(range(min(len(draft.depths), len(passages))))
    asking = Asking(
        family.name, length, _tenth(min(draft.depths)), draft.answer_prefix, draft.expected, family.any_of, asked
    )
    return finish(
        tokenizer,
        Origin(kind or family.name, seed, context, haystack),
        encoded,
        {length: len(text)},
        passages,
        [asking],
        planted=bool(draft.planted),
        budgets={family.name: family.budget_tokens},
        until=until,
    )


def _passages(draft: Draft) -> list[tuple[int, int, str]]:
    """First and end character of what was planted, and what must be read there: the answer, in those asked about."""
    told = [group[0] for group in draft.expected]
    told += [""] * (len(draft.planted) - len(told))
    return [(start, end, words) for (start, end), words in zip(draft.planted, told, strict=False)]


def _tenth(depth: float) -> float:
    return int(10 * depth + 0.5) / 10
