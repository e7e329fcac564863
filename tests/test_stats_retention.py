"""Paired retention: known values, and coverage of its interval by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from scipy.special import betaincinv

from kveval.errors import KvevalError
from kveval.stats.retention import Retention, paired_retention, ratio_limits

Scores = NDArray[np.float64]


def counts(
    right: int, lost: int, gained: int, wrong: int = 0, contexts: int = 1
) -> tuple[Scores, Scores, NDArray[np.int64]]:
    """0/1 scores with ``right`` right in both arms and ``wrong`` wrong in both, dealt out to the contexts in turn."""
    baseline = np.repeat([1.0, 1.0, 0.0, 0.0], [right, lost, gained, wrong])
    candidate = np.repeat([1.0, 0.0, 1.0, 0.0], [right, lost, gained, wrong])
    return baseline, candidate, np.arange(baseline.size) % contexts


def test_a_count_by_hand() -> None:
    """Case 10's table: 200 questions, 190 right before, 184 after, 6 lost and none gained."""
    found = paired_retention(*counts(184, 6, 0, 10, contexts=5))
    assert found.estimate == pytest.approx(184 / 190)
    assert (found.questions, found.contexts, found.clustered) == (200, 5, True)
    assert (found.lost, found.gained) == (6, 0)
    assert (found.baseline_score, found.candidate_score) == pytest.approx((0.95, 0.92))
    assert (found.loss_rate, found.gain_rate) == pytest.approx((6 / 190, 0))
    assert found.low < found.lower_one_sided < found.estimate < found.upper_one_sided < found.high


def test_losses_of_independent_questions_have_exact_limits() -> None:
    found = paired_retention(*counts(184, 6, 0, 10))
    exact = stats.binomtest(6, 190).proportion_ci(0.95, method="exact")
    one_sided = stats.binomtest(6, 190, alternative="less").proportion_ci(0.95, method="exact").high
    assert not found.clustered
    assert np.isnan(found.design_effect)
    assert found.low == pytest.approx(1 - exact.high, abs=2e-3)  # Jeffreys at 189 of 190 may be a hair wider
    assert found.low <= 1 - exact.high + 1e-12
    assert found.lower_one_sided == pytest.approx(1 - one_sided, abs=2e-3)


@pytest.mark.parametrize("contexts", [1, 3, 4, 30])
def test_no_loss_still_bounds_the_loss(contexts: int) -> None:
    """The bootstrap's interval would be [1, 1]; the rule of three says how much n questions exclude."""
    found = paired_retention(*counts(300, 0, 0, contexts=contexts))
    assert found.estimate == 1
    assert found.lower_one_sided == pytest.approx(0.05 ** (1 / 300))
    assert found.low == pytest.approx(0.025 ** (1 / 300))
    assert found.high > 1
    assert np.isnan(found.design_effect)


def test_losses_that_come_together_count_for_less() -> None:
    """40 losses of 400, spread over all eight contexts or all in one: the same estimate, another certainty."""
    baseline, cluster = np.ones(400), np.repeat(np.arange(8), 50)
    spread, together = np.ones(400), np.ones(400)
    spread[::10] = 0
    together[:40] = 0
    evenly, lumped = (paired_retention(baseline, arm, cluster) for arm in (spread, together))
    assert evenly.estimate == lumped.estimate == pytest.approx(0.9)
    assert evenly.design_effect < 0.1
    # By hand: variance of a mean of 8 contexts, one at -0.8 and seven at 0, over that of 400 independent questions.
    by_hand = np.var([0.8, *[0.0] * 7], ddof=1) / 8 / (0.1 * 0.9 / 400)
    assert lumped.design_effect == pytest.approx(by_hand, rel=0.05)
    assert lumped.low < evenly.low - 0.1
    exact = stats.binomtest(40, 400).proportion_ci(0.95, method="exact")
    assert evenly.low == pytest.approx(1 - exact.high)  # contexts more alike than chance buy nothing


def test_independent_questions_have_a_design_effect_of_one() -> None:
    """Losses and gains by chance alone, in 400 contexts of 20: the ratio of variances is 1 within 4 of its errors."""
    rng = np.random.default_rng(6)
    baseline = rng.random(8000) < 0.8
    candidate = np.where(baseline, rng.random(8000) > 0.1, rng.random(8000) < 0.4)
    found = paired_retention(baseline.astype(float), candidate.astype(float), np.repeat(np.arange(400), 20))
    assert found.gained > 500
    assert found.design_effect == pytest.approx(1, abs=4 * np.sqrt(2 / 400))


def test_a_better_candidate_is_not_clipped() -> None:
    found = paired_retention(*counts(100, 0, 40, 60, contexts=10))
    assert found.estimate == pytest.approx(1.4)
    assert found.lower_one_sided > 1.2
    assert found.high > 1.4


def test_limits_of_gains_alone_are_those_of_their_odds() -> None:
    lower, upper = ratio_limits(0, 40, 100, 0.025)
    exact = stats.binomtest(40, 140).proportion_ci(0.95, method="exact")
    loss = 1 - 0.025 ** (1 / 100)
    assert upper == pytest.approx(1 + exact.high / (1 - exact.high))
    assert lower == pytest.approx(1.4 - np.hypot(loss, 0.4 - exact.low / (1 - exact.low)))


def test_a_baseline_without_any_score_has_no_retention() -> None:
    found = paired_retention(*counts(0, 0, 3, 7, contexts=5))
    assert np.isnan([found.estimate, found.low, found.high, found.lower_one_sided, found.upper_one_sided]).all()
    assert (found.questions, found.gained, found.baseline_score) == (10, 3, 0)
    empty = paired_retention(np.array([]), np.array([]), np.array([], dtype=np.int64))
    assert np.isnan(empty.estimate)
    assert empty.questions == empty.contexts == 0


def test_everything_lost() -> None:
    found = paired_retention(*counts(0, 50, 0, contexts=5))
    assert found.estimate == found.low == 0
    # 1 - loss is at most 1 - .05^(1/50), and gains are at most (1 - .05^(1/50)) / .05^(1/50) of what was right
    still = 0.05 ** (1 / 50)
    assert found.upper_one_sided == pytest.approx(np.hypot(1 - still, (1 - still) / still))


def test_scores_between_0_and_1() -> None:
    baseline, candidate = np.tile([1.0, 0.5, 0.75], 40), np.tile([0.9, 0.5, 0.8], 40)
    found = paired_retention(baseline, candidate, np.arange(120) % 6)
    assert found.estimate == pytest.approx(2.2 / 2.25)
    assert (found.lost, found.gained) == (40, 40)
    assert found.loss_rate == pytest.approx(0.1 / 2.25)


def test_the_order_of_rows_and_the_names_of_contexts_do_not_matter() -> None:
    baseline, candidate, cluster = counts(150, 12, 3, 10, contexts=7)
    order = np.random.default_rng(1).permutation(baseline.size)
    one = paired_retention(baseline, candidate, cluster, resamples=20_000)
    other = paired_retention(baseline[order], candidate[order], 1000 - 3 * cluster[order], resamples=20_000)
    assert one.estimate == pytest.approx(other.estimate)
    assert one.low == pytest.approx(other.low, abs=2e-3)
    assert paired_retention(baseline, candidate, cluster, seed=5) == paired_retention(
        baseline, candidate, cluster, seed=5
    )


@pytest.mark.parametrize(
    ("baseline", "candidate", "told"),
    [
        ([1.0, 1.0], [1.0], "not paired"),
        ([1.0, np.nan], [1.0, 1.0], "baseline score"),
        ([1.0, 1.0], [1.0, 1.5], "candidate score"),
        ([1.0, 1.0], [-0.5, 1.0], "candidate score"),
    ],
)
def test_what_is_no_pair_of_scores_is_refused(baseline: list[float], candidate: list[float], told: str) -> None:
    with pytest.raises(KvevalError, match=told):
        paired_retention(np.array(baseline), np.array(candidate), np.zeros(len(baseline), dtype=np.int64))


@settings(max_examples=60, deadline=None)
@given(
    right=st.integers(0, 60),
    lost=st.integers(0, 20),
    gained=st.integers(0, 20),
    wrong=st.integers(0, 20),
    contexts=st.integers(1, 9),
)
def test_intervals_are_in_order_and_never_narrower_than_exact_ones(
    right: int, lost: int, gained: int, wrong: int, contexts: int
) -> None:
    if right + lost == 0:
        return
    found = paired_retention(*counts(right, lost, gained, wrong, contexts), resamples=200)
    assert 0 <= found.low <= found.lower_one_sided <= found.estimate <= found.upper_one_sided <= found.high
    if gained == 0:
        exact = stats.binomtest(lost, right + lost).proportion_ci(0.95, method="exact")
        assert found.low <= 1 - exact.high + 1e-9


def simulate(rng: np.random.Generator, contexts: int, questions: int, loss: float, correlation: float) -> Retention:
    """A run whose questions are lost with a chance that differs between contexts (beta-binomial)."""
    size = (1 - correlation) / correlation if correlation else np.inf
    chance = rng.beta(loss * size, (1 - loss) * size, contexts) if correlation else np.full(contexts, loss)
    baseline = rng.random((contexts, questions)) < 0.9
    candidate = baseline & (rng.random((contexts, questions)) >= chance[:, None])
    cluster = np.repeat(np.arange(contexts), questions)
    return paired_retention(baseline.ravel().astype(float), candidate.ravel().astype(float), cluster, resamples=500)


def naive(found: Retention) -> tuple[float, float]:
    """The interval that takes all questions for independent."""
    right = round(found.baseline_score * found.questions)
    return 1 - betaincinv(found.lost + 1, right - found.lost, 0.975), 1 - betaincinv(
        found.lost, right - found.lost + 1, 0.025
    )


@pytest.mark.parametrize(("contexts", "correlation"), [(8, 0.0), (8, 0.3), (16, 0.1), (32, 0.5)])
def test_clustered_intervals_cover_what_they_say(contexts: int, correlation: float) -> None:
    """95 % intervals hold the truth in 92 to 99 % of 400 runs (standard error 1.1 %); naive ones only by luck."""
    rng = np.random.default_rng([7, contexts, int(100 * correlation)])
    runs = [simulate(rng, contexts, 16, 0.3, correlation) for _ in range(400)]
    covered = np.mean([run.low <= 0.7 <= run.high for run in runs])
    naively = np.mean([low <= 0.7 <= high for low, high in map(naive, runs)])
    assert 0.92 <= covered <= 0.99
    assert naively < 0.88 if correlation else naively > 0.92


def test_at_the_margin_at_most_one_run_in_twenty_passes() -> None:
    """False PASS: the truth is 99 % and the lower bound clears it. 2,000 runs of 500 independent questions."""
    lost = np.random.default_rng(3).binomial(500, 0.01, 2000)
    bound = {count: ratio_limits(int(count), 0, 500, 0.05)[0] for count in np.unique(lost)}
    passed = np.mean([bound[count] >= 0.99 for count in lost])
    assert 0.005 < passed <= 0.05
