"""A context with one question: for tasks whose texts are made for one length, as counting tasks are."""

from __future__ import annotations

from typing import Any

from kveval.samples.encoded import encode
from kveval.samples.ruler.sample import Family, sample
from kveval.samples.shared.context import Asking, Origin, SharedContext, finish


def build_alone(tokenizer: Any, family: Family, *, seed: int, context: int, length: int) -> SharedContext:
    """Sample number ``context`` of ``family`` at ``length`` (``samples.ruler.sample.sample``), with RULER's room to answer."""
    draft = sample(tokenizer, family, seed=seed, length=length, index=context).draft
    text = draft.text.removesuffix(draft.answer_prefix)
    (encoded,) = encode(tokenizer, [text])
    asking = Asking(
        family.name, length, _tenth(min(draft.depths)), draft.answer_prefix, draft.expected, family.any_of, (0,)
    )
    origin = Origin(family.name, seed, context)
    budgets = {family.name: family.budget_tokens}
    return finish(
        tokenizer, origin, encoded, {length: len(text)}, [(0, len(text), "")], [asking], planted=False, budgets=budgets
    )


def _tenth(depth: float) -> float:
    return int(10 * depth + 0.5) / 10
