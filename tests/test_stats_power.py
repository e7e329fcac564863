"""How many questions would settle it: textbook values, and what happens when that many are asked."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kveval.stats.power import UNSETTLED, Needed, positions_factor, questions_to_decide, to_decide
from kveval.stats.retention import paired_retention, ratio_limits


@pytest.mark.parametrize(("margin", "questions"), [(0.99, 299), (0.95, 59), (0.90, 29), (0.999, 2995)])
def test_without_a_loss_it_takes_the_success_run(margin: float, questions: int) -> None:
    """n = ln(1 - C) / ln(R): the zero-failure sample sizes of reliability handbooks (59 for 95/95, 299 for 99/95)."""
    assert questions_to_decide(loss_rate=0, margin=margin, baseline_recall=1) == Needed("PASS", questions, None)
    lower = [ratio_limits(0, 0, right, 0.05)[0] for right in (questions - 1, questions)]
    assert lower[0] < margin <= lower[1]


def test_questions_that_the_baseline_misses_do_not_count() -> None:
    needed = questions_to_decide(loss_rate=0, margin=0.99, baseline_recall=0.8, questions_per_context=100)
    assert needed == Needed("PASS", math.ceil(299 / 0.8), 4)


def test_a_common_loss_needs_about_the_textbooks_number() -> None:
    """Chow, Shao & Wang 2008, section 4.1: (z(.95) + z(.80))^2 p (1 - p) / (p - p0)^2 for one proportion."""
    textbook = (1.6449 + 0.8416) ** 2 * 0.2 * 0.8 / (0.3 - 0.2) ** 2
    found = questions_to_decide(loss_rate=0.2, margin=0.7, baseline_recall=1).questions
    assert found is not None
    assert 1.0 < found / textbook < 1.3  # the exact limit lies further out than the normal one


def test_a_rare_loss_needs_more_than_the_textbooks_number() -> None:
    """Power by the binomial distribution itself: with the normal formula's 134 questions it is a coin's."""

    def power(questions: int) -> float:
        passing = sum(ratio_limits(lost, 0, questions, 0.05)[0] >= 0.95 for lost in range(40))
        return float(stats.binom.cdf(passing - 1, questions, 0.02))

    textbook = (1.6449 + 0.8416) ** 2 * 0.02 * 0.98 / (0.05 - 0.02) ** 2
    found = questions_to_decide(loss_rate=0.02, margin=0.95, baseline_recall=1).questions
    assert found is not None
    assert power(int(textbook)) < 0.55
    assert power(found) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(
    ("loss", "gain", "margin", "verdict"),
    [(0.004, 0.0, 0.99, "PASS"), (0.02, 0.0, 0.99, "FAIL"), (0.03, 0.03, 0.95, "PASS"), (0.0, 0.0, 0.99, "PASS")],
)
def test_as_many_questions_settle_it_as_often_as_they_say(
    loss: float, gain: float, margin: float, verdict: str
) -> None:
    """2,000 runs of the number given: about 80 % are settled, the right way; half of it settles clearly fewer."""
    recall = 0.9
    needed = questions_to_decide(loss_rate=loss, gain_rate=gain, margin=margin, baseline_recall=recall)
    assert needed.verdict == verdict
    assert needed.questions is not None

    def settled(questions: int) -> float:
        rng = np.random.default_rng([questions, 1])
        chances = [recall * (1 - loss), recall * loss, recall * gain, 1 - recall - recall * gain]
        draws, times = np.unique(rng.multinomial(questions, chances, 2000)[:, :3], axis=0, return_counts=True)
        hits = 0
        for (kept, lost, gained), count in zip(draws, times, strict=True):
            lower, upper = ratio_limits(lost, gained, kept + lost, 0.05)
            hits += count * (lower >= margin if verdict == "PASS" else upper < margin)
        return hits / 2000

    assert settled(needed.questions) > (0.72 if loss else 0.45)  # no loss: how many the baseline misses is chance
    assert settled(needed.questions) < (0.90 if loss else 1.0)
    assert settled(needed.questions // 2) < settled(needed.questions) - 0.15


@pytest.mark.parametrize("loss", [0.01, 0.00999, 0.010001, math.nan])
def test_at_the_margin_no_number_settles_it(loss: float) -> None:
    assert questions_to_decide(loss_rate=loss, margin=0.99, baseline_recall=1) == UNSETTLED


def test_no_recall_no_number() -> None:
    assert questions_to_decide(loss_rate=0.0, margin=0.99, baseline_recall=0.0) == UNSETTLED
    nothing = paired_retention(np.zeros(8), np.zeros(8), np.arange(8))
    assert to_decide(nothing, 0.99) == UNSETTLED


def test_clustered_questions_take_more_of_them() -> None:
    alone = questions_to_decide(loss_rate=0.02, margin=0.95, baseline_recall=1)
    clustered = questions_to_decide(
        loss_rate=0.02, margin=0.95, baseline_recall=1, design_effect=3, questions_per_context=50
    )
    assert alone.questions is not None
    assert clustered.contexts is not None
    assert clustered.questions == clustered.contexts * 50
    assert clustered.contexts > 3 * alone.questions / 50  # and Student's quantile on top
    assert clustered.contexts < 5 * alone.questions / 50
    without_size = questions_to_decide(loss_rate=0.02, margin=0.95, baseline_recall=1, design_effect=3)
    assert without_size.questions == 3 * alone.questions


def test_from_a_measured_retention() -> None:
    baseline, candidate, context = np.ones(200), np.ones(200), np.repeat([0, 1], 100)
    retention = paired_retention(baseline, candidate, context)
    assert retention.lower_one_sided < 0.99
    assert to_decide(retention, 0.99) == Needed("PASS", 299, 3)
    candidate[::40] = 0  # 5 of 200: between 90 and 99 % at best
    worse = to_decide(paired_retention(baseline, candidate, context), 0.99)
    assert worse.verdict == "FAIL"
    assert worse.questions is not None
    assert worse.questions > 200


def test_positions_for_a_bound_on_a_mean() -> None:
    # delta NLL .0102 +- .0022 (fp8 on SmolLM2-135M) against a PPL ratio of 1.02: already settled; against 1.012 not yet
    assert positions_factor(0.0102, 0.0022, math.log(1.02)) == pytest.approx(0.325, abs=0.01)
    factor = positions_factor(0.0102, 0.0022, math.log(1.012))
    assert factor is not None
    assert factor == pytest.approx((1.6449 + 0.8416) ** 2 * (0.0022 / (math.log(1.012) - 0.0102)) ** 2, rel=1e-3)
    assert positions_factor(0.01, 0.002, 0.01) is None
    assert positions_factor(0.01, math.inf, 0.02) is None
