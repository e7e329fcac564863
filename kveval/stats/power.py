"""How much more would settle it: questions and contexts for a retention, contexts for a mean over positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kveval.stats.proportions import effective_share
from kveval.stats.retention import Retention, ratio_limits

POWER = (
    0.8  # how often the plan settles it when the rates seen are the true ones; the usual 80 % (Cohen 1988, section 2.4)
)
MOST = 1_000_000  # an estimate that takes more questions than this is as good as at the margin


@dataclass(frozen=True)
class Needed:
    """What would settle a verdict at the rates seen so far. ``questions`` None: no number of questions would."""

    verdict: str  # which way it would be settled: "PASS" or "FAIL"; "" when it would not
    questions: int | None
    contexts: int | None  # of the size that were read; None where that size is not known


UNSETTLED = Needed("", None, None)


def questions_to_decide(
    *,
    loss_rate: float,
    margin: float,
    baseline_recall: float,
    gain_rate: float = 0.0,
    confidence: float = 0.95,
    power: float = POWER,
    design_effect: float = math.nan,
    questions_per_context: float | None = None,
) -> Needed:
    """Questions after which retention 1 - ``loss_rate`` + ``gain_rate`` is told from ``margin`` with chance ``power``.

    The smallest n of baseline-right questions at which the one-sided limit (``ratio_limits``, counts at their expected
    value), moved by z(power) standard errors towards the margin, still lies on the estimate's side of it. That is the
    sample size of a non-inferiority test (Chow, Shao & Wang 2008, Sample Size Calculations in Clinical Research, 4.1)
    with the exact limit in place of the normal one: zero losses give the rule of three, 299 for 99 % at 95 %.
    n / ``baseline_recall`` questions hold n that the baseline answers. A ``design_effect`` (NaN: questions are taken as
    independent) multiplies them, and with ``questions_per_context`` so does (t / z)^2 for the contexts they come in.
    ``power`` is met about, not exactly: losses come in whole numbers.
    An estimate at the margin, or so near that it would take more than a million questions, is not settled by asking.
    """
    estimate = 1 - loss_rate + gain_rate
    if not math.isfinite(estimate) or not baseline_recall > 0 or estimate == margin:
        return UNSETTLED
    side = 1 if estimate > margin else -1
    n = _smallest(lambda n: side * (_reached(n, loss_rate, gain_rate, side, 1 - confidence, power) - margin) > 0)
    if n is None:
        return UNSETTLED
    questions, contexts = math.ceil(n / baseline_recall - 1e-9), None
    clustered = design_effect > 0  # False for NaN
    if questions_per_context and clustered:
        contexts = _contexts(questions, questions_per_context, design_effect, 1 - confidence)
        questions = math.ceil(contexts * questions_per_context)
    elif questions_per_context:
        contexts = math.ceil(questions / questions_per_context)
    elif clustered:
        questions = math.ceil(questions * max(1.0, design_effect))
    return Needed("PASS" if side > 0 else "FAIL", questions, contexts)


def to_decide(retention: Retention, margin: float, confidence: float = 0.95, power: float = POWER) -> Needed:
    """``questions_to_decide`` from what was measured, in contexts of the size that were read."""
    if not retention.questions or not retention.baseline_score > 0:
        return UNSETTLED
    return questions_to_decide(
        loss_rate=retention.loss_rate,
        gain_rate=retention.gain_rate,
        baseline_recall=retention.baseline_score,
        margin=margin,
        confidence=confidence,
        power=power,
        design_effect=retention.design_effect,
        questions_per_context=retention.questions / retention.contexts,
    )


def positions_factor(
    estimate: float, se: float, bound: float, confidence: float = 0.95, power: float = POWER
) -> float | None:
    """How many times the positions measured would tell ``estimate`` (standard error ``se``) from ``bound``.

    ((z(confidence) + z(power)) se / (bound - estimate))^2, the sample size of a one-sided z test; the standard error
    falls with the root of the positions. None at the bound. For a PPL ratio give delta NLL and log(bound).
    """
    from scipy.special import ndtri  # quantiles of the normal distribution

    if estimate == bound or not math.isfinite(estimate) or not math.isfinite(se):
        return None
    return float(((ndtri(confidence) + ndtri(power)) * se / (bound - estimate)) ** 2)


def _reached(n: int, loss: float, gain: float, side: int, alpha: float, power: float) -> float:
    """Retention's limit on the margin's side after ``n`` baseline-right questions, moved in for ``power``."""
    from scipy.special import ndtri

    lower, upper = ratio_limits(loss * n, gain * n, n, alpha)
    spread = float(ndtri(power)) * math.sqrt((loss * (1 - loss) + gain * (1 + gain)) / n)
    return lower - spread if side > 0 else upper + spread


def _contexts(questions: int, per_context: float, design_effect: float, alpha: float) -> int:
    """Contexts whose questions are together worth ``questions`` independent ones."""

    def enough(contexts: int) -> bool:
        return contexts * per_context * effective_share(design_effect, contexts, alpha) >= questions

    return _smallest(enough) or math.ceil(questions * max(1.0, design_effect) / per_context)


def _smallest(holds: Callable[[int], bool]) -> int | None:
    """Smallest number for which ``holds`` (which, once true, stays true); None when it is over MOST."""
    high = 1
    while not holds(high):
        high *= 2
        if high > MOST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
