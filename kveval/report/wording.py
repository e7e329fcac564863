"""How numbers and foreign strings are written. The one place that rounds, so that all renderings agree."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable

from kveval import rules

NOT_MEASURED = "not measured"
UNDEFINED = "-"  # NaN: these rows cannot tell
GREY = "·"  # a cell where the baseline answers too little for a loss to show


def visible(text: str) -> str:
    """``text`` on one line, with control, format and other unprintable characters written as escapes.

    Answers come from a model: they may hold terminal escapes, line breaks or characters that turn the text around.
    """
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if unicodedata.category(character)[0] == "C" or character in "\u2028\u2029":
        return character.encode("unicode_escape").decode("ascii")
    return character


def number(value: float | None, near: float | None = None) -> str:
    """A quantity with five digits that mean something; more where it would read as ``near`` (a bound) but is not."""
    if value is None:
        return NOT_MEASURED
    return rules.plain(value, _bound(near)) if math.isfinite(value) else _not_finite(value)


def nats(value: float, near: float | None = None) -> str:
    """A KL divergence, without its unit."""
    return rules.nats(value, _bound(near)).removesuffix(" nats") if math.isfinite(value) else _not_finite(value)


def percent(share: float | None, near: float | None = None) -> str:
    """``0.9922`` as ``99.2 %``; never written like 0, 1 or ``near`` (a bound) when it is not exactly that."""
    if share is None:
        return NOT_MEASURED
    return rules.percent(share, 1.0 if near is None else near) if math.isfinite(share) else _not_finite(share)


def _bound(near: float | None) -> float:
    return math.nan if near is None else near  # no number reads as NaN


def _not_finite(value: float) -> str:
    return UNDEFINED if math.isnan(value) else "infinite" if value > 0 else "-infinite"


def span(low: float, high: float, write: Callable[[float], str] = number) -> str:
    """An interval: ``98.1 to 100 %``; empty when neither end is known."""
    if math.isnan(low) and math.isnan(high):
        return ""
    first, last = write(low), write(high)
    return f"{first.removesuffix(' %') if last.endswith(' %') else first} to {last}"


def rate(tokens_per_s: float) -> str:
    """Tokens a second, with three digits that mean something."""
    if not math.isfinite(tokens_per_s):
        return UNDEFINED
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def tally(score: float, scored: int) -> str:
    """``15/16``: the sum of the scores over the number of scored questions."""
    return f"{score:g}/{scored}" if score == int(score) else f"{score:.2f}/{scored}"


def count(amount: int, noun: str) -> str:
    """``1 question``, ``1,200 questions``."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def listing(items: list[str] | tuple[str, ...], joiner: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} {joiner} {items[-1]}"


def depth(share: float) -> str:
    """``0.5`` as ``50 %``: how far into the context a needle lies."""
    return f"{share * 100:g} %"
