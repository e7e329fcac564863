"""The standard error that lm-eval prints for tasks that ask several questions about one context.

lm-eval's own error of a mean takes all documents for independent. Questions about one context are not: they share its
text, its needles and what a lossy cache did to both, so that error is too small. lm-eval has no place for another one, but
it stores a task's metrics in the order of ``process_results``, each as ``NAME,filter`` with ``NAME_stderr,filter`` behind it.
A second metric that is called ``NAME_stderr`` therefore takes the place of the error: in the results, in the table, and
where groups pool errors. In process_results, NAME first::

    return {"recall": value, "recall_stderr": (doc["context"], value)}

and in the task's YAML::

    metric_list:
      - {metric: recall, aggregation: mean, higher_is_better: true}
      - {metric: recall_stderr, aggregation: !function kveval.lm_stderr.lm_eval_stderr, higher_is_better: false}
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

NONE = "N/A"  # what lm-eval writes where there is no error
MIN_CONTEXTS = 4  # with fewer, the spread between contexts says next to nothing


def clustered_stderr(items: Sequence[tuple[int, float]]) -> float:
    """Standard error of the mean score of ``items``, each (number of its context, score).

    Cluster-robust: residuals are summed within each of the G contexts, their squares added up, times G / (G - 1): Liang &
    Zeger 1986, Biometrika 73:13; Cameron & Miller 2015, Journal of Human Resources 50:317, equations 11 and 12 with a
    constant as the only regressor. With one question in each context it is the usual s / sqrt(n). With fewer than 4 contexts
    the questions are taken as independent. NaN for fewer than two items, which have no error.

    >>> round(clustered_stderr([(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0), (2, 1.0), (2, 1.0), (3, 0.0), (3, 0.0)]), 4)
    0.2887
    """
    count = len(items)
    if count < 2:
        return math.nan
    mean = math.fsum(score for _, score in items) / count
    sums: dict[int, float] = defaultdict(float)
    for context, score in items:
        sums[context] += score - mean
    groups = len(sums)
    if groups < MIN_CONTEXTS:
        squares, groups = math.fsum((score - mean) ** 2 for _, score in items), count
    else:
        squares = math.fsum(total**2 for total in sums.values())
    return math.sqrt(groups / (groups - 1) * squares) / count


def lm_eval_stderr(items: Sequence[tuple[int, float]]) -> float | str:
    """``clustered_stderr``, and lm-eval's own "N/A" in place of NaN.

    lm-eval leaves a group's error out where a task's is "N/A". A NaN it would pool: a group that weighs tasks by their size
    then divides by zero when each has one document (``--limit 1``), after all answers have been given.
    """
    error = clustered_stderr(items)
    return NONE if math.isnan(error) else error
