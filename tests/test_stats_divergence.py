"""Block means: known values, block lengths, coverage under autocorrelation, speed."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import signal, stats

from kveval.errors import EvidenceError
from kveval.stats.divergence import MAX_BLOCKS, _autocovariance, block_length, block_mean, block_share, ppl_ratio

Values = NDArray[np.float64]


def noise(rng: np.random.Generator, n: int, phi: float) -> Values:
    """An AR(1) series, each value ``phi`` times the one before plus standard normal noise."""
    return signal.lfilter([1.0], [1.0, -phi], rng.standard_normal(n + 500))[500:]


def one_context(n: int) -> NDArray[np.int64]:
    return np.zeros(n, dtype=np.int64)


def test_a_ratio_by_hand() -> None:
    before, after = np.array([1.0, 2.0, 3.0, 2.0]), np.array([1.1, 2.0, 3.3, 2.0])
    found = ppl_ratio(before, after, np.array([0, 0, 1, 1]))
    assert found.delta_nll == pytest.approx(0.1)
    assert found.estimate == pytest.approx(math.exp(0.1))
    assert (found.ppl_baseline, found.ppl_candidate) == pytest.approx((math.exp(2.0), math.exp(2.1)))
    assert found.estimate == pytest.approx(found.ppl_candidate / found.ppl_baseline)
    assert found.positions == 4
    assert found.low <= found.lower_one_sided < found.estimate < found.upper_one_sided <= found.high


def test_equal_arms_have_the_ratio_one() -> None:
    before = np.random.default_rng(0).exponential(2.8, 4096)
    found = ppl_ratio(before, before, one_context(4096))
    assert (found.low, found.estimate, found.high, found.se) == (1, 1, 1, 0)


def test_independent_values_have_students_interval() -> None:
    values = np.random.default_rng(5).normal(0.01, 0.3, 40)
    found = block_mean(values, one_context(40), resamples=40_000)
    assert found.block_tokens <= 2
    student = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(student, abs=0.02)
    assert found.se == pytest.approx(stats.sem(values), rel=0.15)


@pytest.mark.parametrize(
    ("n", "phi", "seed", "published"),
    # The last column is arch 8.0.0's optimal_block_length(x)["stationary"], another implementation of the same paper;
    # it starts the search for quiet lags one lag later, so the bandwidth may differ by two.
    [(1000, 0.5, 1, 11.44), (4096, 0.9, 2, 59.76), (20_000, 0.2, 3, 15.71), (512, 0.0, 4, 1.74)],
)
def test_block_length_agrees_with_another_implementation(n: int, phi: float, seed: int, published: float) -> None:
    shocks = np.random.default_rng(seed).standard_normal(n)
    values = signal.lfilter([1.0], [1.0, -phi], shocks)
    assert block_length(values, np.array([0])) == pytest.approx(math.ceil(published), abs=max(1, 0.05 * published))


def test_block_length_is_what_theory_gives_for_an_autoregression() -> None:
    """Patton, Politis & White 2009: (g^2 / s^2 n)^(1/3), and for an AR(1) g / s = 2 phi / (1 - phi^2)."""
    n, phi = 200_000, 0.8
    found = block_length(noise(np.random.default_rng(11), n, phi), np.array([0]))
    assert found == pytest.approx((4 * phi**2 / (1 - phi**2) ** 2 * n) ** (1 / 3), rel=0.1)


def test_autocorrelation_is_not_measured_across_contexts() -> None:
    """The same alternation in every context; joined end to end it would look longer than it is."""
    rng = np.random.default_rng(2)
    parts = [noise(rng, 2000, 0.9) for _ in range(4)]
    joined = np.concatenate(parts)
    starts = np.array([0, 2000, 4000, 6000])
    lagged = sum(float(part[:-1] @ part[1:]) for part in (part - joined.mean() for part in parts))
    assert _autocovariance(joined, starts, 3)[1] == pytest.approx(lagged / 8000)


def test_contexts_that_differ_as_wholes_lengthen_the_blocks() -> None:
    rng = np.random.default_rng(4)
    values = rng.standard_normal(8 * 1000)
    shifted = values + np.repeat(rng.normal(0, 2, 8), 1000)
    context = np.repeat(np.arange(8), 1000)
    assert block_mean(values, context).block_tokens < 20
    assert block_mean(shifted, context).block_tokens > 200
    assert block_mean(shifted, context).se > 5 * block_mean(values, context).se


def test_intervals_cover_what_they_say_when_neighbours_depend() -> None:
    """95 % intervals of 300 series (standard error 1.3 %): blocks hold the truth, single positions do not."""
    rng, covered, naively = np.random.default_rng(9), 0, 0
    for _ in range(300):
        values, context = noise(rng, 4000, 0.7), np.repeat([0, 1], 2000)
        found = block_mean(values, context, resamples=500)
        covered += found.low <= 0 <= found.high
        naively += abs(values.mean()) <= 1.96 * stats.sem(values)
    assert 0.91 <= covered / 300 <= 0.985
    assert naively / 300 < 0.75


def test_a_share_of_one_is_still_bounded() -> None:
    found = block_share(np.ones(512), one_context(512))
    assert found.estimate == found.high == 1
    assert found.lower_one_sided == pytest.approx(0.05 ** (1 / 512))
    assert found.se == 0


def test_agreement_in_runs_is_less_certain_than_agreement_at_random() -> None:
    rng = np.random.default_rng(8)
    alone = (rng.random(4096) > 0.1).astype(float)
    runs = np.repeat(rng.random(128) > 0.1, 32).astype(float)
    one, other = (block_share(values, one_context(4096)) for values in (alone, runs))
    assert other.high - other.low > 3 * (one.high - one.low)
    exact = stats.binomtest(int(alone.sum()), 4096).proportion_ci(0.95)
    assert one.low <= exact.low + 1e-9


def test_one_block_bounds_nothing() -> None:
    found = ppl_ratio(np.array([2.0]), np.array([2.5]), one_context(1))
    assert (found.low, found.high) == (0, math.inf)
    assert found.estimate == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("values", "context", "told"),
    [
        ([1.0, math.nan, 2.0], [0, 0, 0], "1 of 3 values are not finite"),
        ([1.0, math.inf, math.inf], [0, 0, 0], "2 of 3 values"),
        ([], [], "nothing to average"),
        ([1.0, 2.0], [0], "nothing to average"),
        ([1.0, 2.0, 3.0], [0, 1, 0], "not sorted by context"),
    ],
)
def test_rows_that_cannot_be_averaged_are_refused(values: list[float], context: list[int], told: str) -> None:
    with pytest.raises(EvidenceError, match=told):
        block_mean(np.array(values), np.array(context))
    with pytest.raises(EvidenceError, match="not paired"):
        ppl_ratio(np.zeros(3), np.zeros(4), one_context(3))


def test_a_full_run_takes_less_than_two_seconds() -> None:
    """131,072 positions of 8 contexts, counted in this process's own time: the machine may be busy with others."""
    rng = np.random.default_rng(0)
    n = 8 * 131_072
    before = rng.exponential(2.8, n)
    after = before + rng.normal(0.01, 0.3, n)
    context = np.repeat(np.arange(8), 131_072)
    start = time.process_time()
    found = ppl_ratio(before, after, context)
    assert time.process_time() - start < 2
    assert found.estimate == pytest.approx(math.exp(0.01), abs=4 * found.se)
    assert found.se == pytest.approx(0.3 / math.sqrt(n), rel=0.15)
    assert found.block_tokens == n // MAX_BLOCKS
