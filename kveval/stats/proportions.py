"""Limits and tests for counts. statsmodels and scipy do the arithmetic; this file says which of theirs and why."""

from __future__ import annotations

from kveval.errors import KvevalError


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided Wilson score interval of a share (Wilson 1927, JASA 22:209): 499 of 500 at 95 % is [98.88, 99.96] %.

    Raises KvevalError when ``successes`` is not between 0 and ``n`` or ``n`` is 0.
    """
    from statsmodels.stats.proportion import proportion_confint

    if not 0 <= successes <= n or n < 1:
        raise KvevalError(f"{successes} of {n} is no share: successes go from 0 to n, and n is at least 1")
    low, high = proportion_confint(successes, n, alpha=1 - confidence, method="wilson")
    return float(low), float(high)


def mcnemar_exact(lost: int, gained: int) -> float:
    """Two-sided exact p-value that losses and gains are equally likely (McNemar 1947): 6 lost, 0 gained is 0.03125.

    Only discordant questions speak, so the counts of concordant ones are not asked for.
    """
    from statsmodels.stats.contingency_tables import mcnemar

    return float(mcnemar([[0, lost], [gained, 0]], exact=True).pvalue) if lost + gained else 1.0


def share_limits(successes: float, n: float, alpha: float, effective: float = 1.0) -> tuple[float, float]:
    """Lower and upper limit of a share, each missing the truth with probability at most about ``alpha``.

    Exact for ``n`` independent trials (Clopper & Pearson 1934, Biometrika 26:404; 0 of n gives the rule of three, 3/n).
    ``effective`` <= 1 is the part of ``n`` that trials which are not independent are worth (1 / design effect).
    Jeffreys' limits at the effective count (Franco, Little, Louis & Slud 2019, J. Survey Statistics and Methodology
    7:334) then stand wherever they are the wider ones: limits are never narrower than exact ones of independent trials.
    Counts need not be whole: scores between 0 and 1 vary less than 0/1 scores of the same mean.
    """
    from scipy.special import betaincinv  # quantiles of the beta distribution

    lower = float(betaincinv(successes, n - successes + 1, alpha)) if successes > 0 else 0.0
    upper = float(betaincinv(successes + 1, n - successes, 1 - alpha)) if successes < n else 1.0
    if effective < 1:
        hits, misses = successes * effective + 0.5, (n - successes) * effective + 0.5
        lower = min(lower, float(betaincinv(hits, misses, alpha)))
        upper = max(upper, float(betaincinv(hits, misses, 1 - alpha)))
    return lower, upper


def effective_share(design_effect: float, units: int, alpha: float) -> float:
    """What part of the questions they are worth together when ``units`` independent units (contexts, blocks) hold them.

    1 / (design effect x (t / z)^2), at most 1: the variance was itself estimated from few units, so Student's quantile
    with units - 1 degrees of freedom takes the normal one's place (Korn & Graubard 1998, Survey Methodology 24:193).
    """
    from scipy.special import ndtri, stdtrit  # quantiles of the normal and of Student's distribution

    if units < 2 or not design_effect > 0:
        return 1.0
    return min(1.0, float((ndtri(alpha) / stdtrit(units - 1, alpha)) ** 2 / design_effect))
