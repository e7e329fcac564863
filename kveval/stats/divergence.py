"""How far the next-token distributions moved: means over positions, whose neighbours are not independent.

Blocks of consecutive positions within a context are resampled (Carlstein 1986, Annals of Statistics 14:1171). They are
summed first, so a resample costs as many additions as there are blocks, not positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kveval.errors import EvidenceError
from kveval.stats.proportions import effective_share, share_limits

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BLOCKS = 512  # more would hardly make the interval better: its own relative error is already 1 / sqrt(2 x 512)
INF = math.inf


@dataclass(frozen=True)
class Mean:
    """Mean over positions, with its interval over blocks of consecutive positions."""

    estimate: float
    low: float  # two-sided interval at the confidence asked for
    high: float
    lower_one_sided: float
    upper_one_sided: float
    se: float
    block_tokens: int  # consecutive positions in a block; where positions were sampled, consecutive samples
    positions: int


@dataclass(frozen=True)
class PplRatio:
    """exp(mean over positions of NLL_candidate - NLL_baseline), with its interval."""

    estimate: float
    low: float
    high: float
    lower_one_sided: float
    upper_one_sided: float
    delta_nll: float  # nats a token
    se: float  # of delta_nll, nats
    block_tokens: int
    positions: int
    ppl_baseline: float
    ppl_candidate: float


def ppl_ratio(
    nll_baseline: NDArray[np.float64],
    nll_candidate: NDArray[np.float64],
    context: NDArray[np.int64],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> PplRatio:
    """PPL ratio of two arms over the same positions: NLL in nats, float [n]; rows sorted by (context, position).

    Raises EvidenceError as ``block_mean`` does.
    """
    before, after = np.asarray(nll_baseline, dtype=np.float64), np.asarray(nll_candidate, dtype=np.float64)
    if before.shape != after.shape:
        raise EvidenceError(
            f"log-probabilities are not paired: {before.size:,} of the baseline, {after.size:,} of the candidate"
        )
    mean = block_mean(after - before, context, confidence=confidence, resamples=resamples, seed=seed)
    return PplRatio(
        estimate=_exp(mean.estimate),
        low=_exp(mean.low),
        high=_exp(mean.high),
        lower_one_sided=_exp(mean.lower_one_sided),
        upper_one_sided=_exp(mean.upper_one_sided),
        delta_nll=mean.estimate,
        se=mean.se,
        block_tokens=mean.block_tokens,
        positions=mean.positions,
        ppl_baseline=_exp(float(before.mean())),
        ppl_candidate=_exp(float(after.mean())),
    )


def block_mean(
    values: NDArray[np.float64],
    context: NDArray[np.int64],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Mean:
    """Mean of ``values``, float [n], in rows sorted by (context, position), with its block bootstrap interval.

    The interval is the expanded percentile one: levels moved out so that it is no shorter than Student's for as many
    units as there are blocks (Hesterberg 2015, The American Statistician 69:371). One block bounds nothing: +-inf.
    Raises EvidenceError when there is no value, or one that is not finite.
    """
    values, context = np.asarray(values, dtype=np.float64), np.asarray(context)
    starts = _context_starts(values, context)
    length = max(block_length(values, starts), math.ceil(values.size / MAX_BLOCKS))
    sums, counts = _block_sums(values, starts, length)
    blocks, mean = sums.size, float(values.mean())
    if blocks < 2:
        return Mean(mean, -INF, INF, -INF, INF, INF, length, values.size)
    draws = np.random.default_rng(seed).integers(0, blocks, size=(resamples, blocks))  # (resamples, blocks)
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    one, two = 1 - confidence, (1 - confidence) / 2
    low, lower, upper, high = np.quantile(
        means, [_expanded(two, blocks), _expanded(one, blocks), 1 - _expanded(one, blocks), 1 - _expanded(two, blocks)]
    ).tolist()
    se = float(means.std()) * math.sqrt(blocks / (blocks - 1))
    return Mean(mean, low, high, lower, upper, se, length, values.size)


def block_share(
    agrees: NDArray[np.float64],
    context: NDArray[np.int64],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Mean:
    """Share of positions that agree (1.0 / 0.0, float [n]), sorted as for ``block_mean``, with limits for counts.

    The blocks give the design effect; the limits are ``share_limits``, which still bound the share when every position
    agreed and a resampled interval would have no length.
    Raises EvidenceError as ``block_mean`` does.
    """
    mean = block_mean(agrees, context, confidence=confidence, resamples=resamples, seed=seed)
    share, n = mean.estimate, mean.positions
    independent = share * (1 - share) / n
    design_effect = mean.se**2 / independent if independent > 0 else math.nan
    blocks = max(1, round(n / mean.block_tokens))
    one, two = 1 - confidence, (1 - confidence) / 2
    low, high = share_limits(share * n, n, two, effective_share(design_effect, blocks, two))
    lower, upper = share_limits(share * n, n, one, effective_share(design_effect, blocks, one))
    return Mean(share, low, high, lower, upper, mean.se, mean.block_tokens, n)


def block_length(values: NDArray[np.float64], starts: NDArray[np.int64]) -> int:
    """Positions in a block, chosen from the autocorrelation of ``values`` within contexts (which begin at ``starts``).

    The rule of Politis & White (2004, Econometric Reviews 23:53) as corrected by Patton, Politis & White (2009, ibid.
    28:372). Of its two constants the one for the stationary bootstrap is used: blocks that do not overlap have the same
    variance (Nordman 2009, Annals of Statistics 37:359). Deviations are from the mean over all contexts, so contexts
    that differ as wholes lengthen the blocks too.
    """
    n = values.size
    if n < 8:
        return 1
    run = max(5, int(math.log10(n)))  # this many insignificant lags in a row end the search
    largest = math.ceil(math.sqrt(n)) + run
    gamma = _autocovariance(values, starts, min(largest, n - 1))
    if gamma[0] <= 0:
        return 1
    significant = np.abs(gamma[1:] / gamma[0]) >= 2 * math.sqrt(math.log10(n) / n)
    window = np.lib.stride_tricks.sliding_window_view(significant, min(run, significant.size))
    quiet = np.flatnonzero(~window.any(axis=1))  # index m: lags m + 1 .. m + run are all insignificant
    last = int(quiet[0]) if quiet.size else int(np.flatnonzero(significant)[-1]) + 1
    bandwidth = min(2 * max(last, 1), gamma.size - 1)
    lags = np.arange(1, bandwidth + 1)
    taper = np.clip(2 * (1 - lags / bandwidth), 0, 1)  # flat-top: 1 up to half the bandwidth, then down to 0
    long_run = gamma[0] + 2 * float(taper @ gamma[lags])
    slope = 2 * float(taper @ (lags * gamma[lags]))
    longest = math.ceil(min(3 * math.sqrt(n), n / 3))
    if long_run <= 0:
        return longest
    return max(1, min(longest, math.ceil(((slope / long_run) ** 2 * n) ** (1 / 3))))


def _context_starts(values: NDArray[np.float64], context: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row at which each context begins."""
    if values.ndim != 1 or values.shape != context.shape or not values.size:
        raise EvidenceError(f"{values.size:,} values in {context.size:,} rows: there is nothing to average")
    bad = int((~np.isfinite(values)).sum())
    if bad:
        raise EvidenceError(
            f"{bad:,} of {values.size:,} values are not finite numbers: the engine returned NaN or infinite logits"
        )
    starts = np.flatnonzero(np.concatenate([[True], context[1:] != context[:-1]]))
    if np.unique(context).size != starts.size:
        raise EvidenceError(
            "rows are not sorted by context: the rows of one context must stand together, in order of position"
        )
    return starts


def _autocovariance(values: NDArray[np.float64], starts: NDArray[np.int64], lags: int) -> NDArray[np.float64]:
    """Autocovariance at lags 0 .. ``lags``, [lags + 1]; products never cross from one context into the next."""
    total = np.zeros(lags + 1)
    for part in np.split(values - values.mean(), starts[1:]):
        size = 1 << (part.size + min(lags, part.size)).bit_length()
        power = np.abs(np.fft.rfft(part, size)) ** 2
        own = np.fft.irfft(power, size)[: min(lags + 1, part.size)]
        total[: own.size] += own
    return total / values.size


def _block_sums(
    values: NDArray[np.float64], starts: NDArray[np.int64], length: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and size of each block, [blocks]: every context is cut into equal blocks of about ``length`` positions."""
    ends = np.append(starts[1:], values.size)
    edges = np.concatenate(
        [
            np.linspace(start, end, max(1, round((end - start) / length)), endpoint=False).astype(np.int64)
            for start, end in zip(starts, ends, strict=True)
        ]
    )
    return np.add.reduceat(values, edges), np.diff(np.append(edges, values.size)).astype(np.float64)


def _expanded(alpha: float, units: int) -> float:
    """Percentile level at which a bootstrap of ``units`` units has Student's tail probability ``alpha``."""
    from scipy.special import ndtr, stdtrit  # the normal distribution, quantiles of Student's

    return float(ndtr(stdtrit(units - 1, alpha) * math.sqrt(units / (units - 1))))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else INF
