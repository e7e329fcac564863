"""One rule: a value, its interval, the bound it is held to, and what that comes to. Numbers in, outcome and words out.

A PASS needs every decisive rule to pass, each at the policy's confidence: a false PASS is then no likelier than the
error of one rule (intersection-union test; Berger 1982, Technometrics 24:295). Asking for much costs no confidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kveval.policy import Policy
from kveval.stats.divergence import Mean, PplRatio
from kveval.stats.power import Needed, to_decide
from kveval.stats.retention import Retention


class Outcome(str, Enum):
    """What a rule, an arm or a run comes to. Prints as its name."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"

    def __str__(self) -> str:
        return self.value


PASS, FAIL, INCONCLUSIVE, INVALID = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.INVALID
ALL_LENGTHS = "all lengths"


@dataclass(frozen=True)
class Rule:
    """One rule applied to one arm. ``detail`` reads on from the arm's name: "keeps 6.8 % [5.1, 9 %] of recall at"."""

    name: str  # retention | ppl ratio | kl mean | top-1 agreement | catastrophe | contexts | discriminative | check ...
    scope: str  # "131,072 tokens", "all lengths", "sampled positions", the name of a check
    value: float | None
    bound: float | None
    low: float | None  # two-sided interval at the policy's confidence; the outcome goes by the one-sided bounds
    high: float | None
    outcome: Outcome
    detail: str
    decisive: bool = True  # False: only its FAIL counts (a shorter length, all lengths pooled)


def stated(
    name: str, scope: str, outcome: Outcome, detail: str, *, value: float | None = None, bound: float | None = None
) -> Rule:
    """A rule on something that was counted, not estimated: it has no interval."""
    return Rule(name, scope, value, bound, None, None, outcome, detail)


def tokens(length: int) -> str:
    """``131072`` as ``131,072 tokens``."""
    return f"{length:,} tokens"


def retention_rule(retention: Retention, scope: str, policy: Policy, *, decisive: bool) -> Rule:
    """PASS when the lower one-sided bound is at the margin or above, FAIL when the upper one is below it."""
    margin = policy.retention_margin
    lower, upper = retention.lower_one_sided, retention.upper_one_sided
    outcome = PASS if lower >= margin else FAIL if upper < margin else INCONCLUSIVE
    where = "over all lengths" if scope == ALL_LENGTHS else f"at {scope}"
    value = _with_span(retention.estimate, retention.low, retention.high, margin, percent)
    detail = f"keeps {value} of recall {where}, margin {percent(margin)}"
    if outcome is PASS:
        detail += f" (at least {percent(lower, margin)} at {percent(policy.confidence)} confidence)"
    if outcome is INCONCLUSIVE:
        needed = to_decide(retention, margin, policy.confidence)
        detail += f": {retention.questions:,} questions do not decide it; {_more(needed, policy.min_contexts)}"
    return Rule(
        "retention", scope, retention.estimate, margin, retention.low, retention.high, outcome, detail, decisive
    )


def mean_rule(
    name: str,
    told: str,
    mean: Mean | PplRatio,
    bound: float,
    *,
    at_least: bool,
    write: Callable[[float, float], str],
    contexts: int,
    factor: float | None,
) -> Rule:
    """``mean`` held to ``bound`` by its one-sided bounds. ``factor``: how many times the positions would settle it."""
    lower, upper = mean.lower_one_sided, mean.upper_one_sided
    if at_least:
        outcome = PASS if lower >= bound else FAIL if upper < bound else INCONCLUSIVE
    else:
        outcome = PASS if upper <= bound else FAIL if lower > bound else INCONCLUSIVE
    side = "at least" if at_least else "at most"
    value = _with_span(mean.estimate, mean.low, mean.high, bound, write)
    detail = f"has {told} of {value}, {side} {write(bound, bound)} is asked for"
    if outcome is INCONCLUSIVE:
        more = max(contexts + 1, round(contexts * factor)) if factor is not None and factor < 1e4 else None
        settled = "PASS" if (mean.estimate >= bound) == at_least else "FAIL"
        hint = (
            f"about {more:,} contexts of the size read would settle it as {settled}"
            if more
            else "more contexts may not settle it"
        )
        detail += f": {mean.positions:,} positions do not decide it; {hint}"
    return Rule(name, f"{mean.positions:,} positions", mean.estimate, bound, mean.low, mean.high, outcome, detail)


def percent(share: float, near: float = 1.0) -> str:
    """``0.068`` as ``6.8 %``, with as many digits as keep it from looking like 0, 1 or ``near`` when it is not that."""
    shown = _told_apart(
        100 * share, (0.0, 100.0, 100 * near), [f"{100 * share:.{digits}f}" for digits in (1, 2, 3, 4, 6)]
    )
    return f"{shown.rstrip('0').rstrip('.')} %"


def plain(value: float, near: float) -> str:
    """A ratio, with as many digits as tell it from ``near``."""
    return _told_apart(value, (near,), [f"{value:.{digits}g}" for digits in (5, 7, 9)])


def nats(value: float, near: float) -> str:
    """A divergence with its unit, and as many digits as tell it from ``near``."""
    return f"{_told_apart(value, (near,), [f'{value:.{digits}g}' for digits in (3, 5, 7)])} nats"


def _told_apart(value: float, others: tuple[float, ...], written: list[str]) -> str:
    """The shortest form of ``value`` that does not read as one of ``others`` unless it is that one."""
    apart = (text for text in written if all(float(text) != round(other, 9) or value == other for other in others))
    return next(apart, written[-1])


def _with_span(value: float, low: float, high: float, near: float, write: Callable[[float, float], str]) -> str:
    """``99.4 % [98.1, 100.2 %]``."""
    shown, first, last = (write(number, near) for number in (value, low, high))
    return f"{shown} [{first.split(' ')[0]}, {last}]"


def _more(needed: Needed, min_contexts: int) -> str:
    if needed.questions is None:
        return "the estimate is too close to the margin for any affordable number of questions"
    contexts = f" (`--contexts {max(needed.contexts, min_contexts)}`)" if needed.contexts else ""
    return f"at the rates seen about {needed.questions:,} questions{contexts} would settle it as {needed.verdict}"
