"""Limits and tests for counts, against published values."""

from __future__ import annotations

import pytest
from scipy import stats

from kveval.errors import KvevalError
from kveval.stats.proportions import effective_share, mcnemar_exact, share_limits, wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (499, 500, 0.9888, 0.9996),  # case 11 of the public cases
        (487, 500, 0.9560, 0.9847),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n, 0.95) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (81, 263, 0.2527, 0.3676),  # Newcombe 1998, table I, method 5 (Clopper-Pearson)
        (15, 148, 0.0578, 0.1617),
        (0, 20, 0.0000, 0.1684),
        (1, 29, 0.0009, 0.1776),
    ],
)
def test_limits_of_independent_trials_are_clopper_and_pearsons(successes: int, n: int, low: float, high: float) -> None:
    assert share_limits(successes, n, 0.025) == pytest.approx((low, high), abs=5e-5)


def test_nothing_seen_still_bounds_the_share_by_the_rule_of_three() -> None:
    lower, upper = share_limits(0, 300, 0.05)
    assert lower == 0
    assert upper == pytest.approx(1 - 0.05 ** (1 / 300))  # 3/n, Hanley & Lippman-Hand 1983, JAMA 249:1743
    assert upper == pytest.approx(3 / 300, rel=0.01)


@pytest.mark.parametrize("successes", [0, 1, 7, 50, 99, 100])
@pytest.mark.parametrize("effective", [1.0, 0.99, 0.5, 0.05])
def test_limits_are_never_narrower_than_those_of_independent_trials(successes: int, effective: float) -> None:
    exact = stats.binomtest(successes, 100).proportion_ci(0.95, method="exact")
    lower, upper = share_limits(successes, 100, 0.025, effective)
    assert lower <= exact.low + 1e-12
    assert upper >= exact.high - 1e-12
    if effective <= 0.5 and 0 < successes < 100:
        assert upper - lower > (exact.high - exact.low) * 1.2


def test_effective_share_falls_with_the_design_effect_and_with_few_units() -> None:
    assert effective_share(2.0, 10_000, 0.025) == pytest.approx(0.5, rel=1e-3)
    # t(.975, 7) = 2.3646 and z(.975) = 1.9600, tables of any textbook
    assert effective_share(2.0, 8, 0.025) == pytest.approx((1.9600 / 2.3646) ** 2 / 2, rel=1e-4)
    assert effective_share(0.1, 8, 0.025) == 1.0
    assert effective_share(float("nan"), 8, 0.025) == 1.0


def test_exact_mcnemar() -> None:
    assert mcnemar_exact(6, 0) == 0.03125  # case 10
    assert mcnemar_exact(0, 6) == 0.03125
    assert mcnemar_exact(0, 0) == 1.0
    # Agresti 1990's approval ratings as statsmodels' and R's documentation use them: 150 and 86 discordant
    assert mcnemar_exact(150, 86) == pytest.approx(3.716e-05, rel=1e-3)
    assert mcnemar_exact(9, 3) == pytest.approx(stats.binomtest(3, 12).pvalue)


@pytest.mark.parametrize(("successes", "n"), [(5, 4), (-1, 4), (0, 0)])
def test_a_share_that_is_none_is_refused(successes: int, n: int) -> None:
    with pytest.raises(KvevalError, match=f"{successes} of {n}"):
        wilson(successes, n)
