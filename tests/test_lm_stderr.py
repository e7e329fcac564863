"""The standard error over contexts: textbook values, and that lm-eval prints and pools it in place of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from kveval.lm_stderr import clustered_stderr, lm_eval_stderr

# Four contexts of two questions, and one of one: mean 5/9.
ITEMS = [(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0), (2, 1.0), (2, 0.0), (3, 1.0), (3, 1.0), (4, 0.0)]


def plain(scores: list[float]) -> float:
    """s / sqrt(n), lm-eval's error of a mean."""
    return float(np.std(scores, ddof=1) / math.sqrt(len(scores)))


def test_by_hand() -> None:
    """Residual sums 8/9, -10/9, -1/9, 8/9, -5/9: squares (64 + 100 + 1 + 64 + 25) / 81; times 5/4; root; over 9."""
    assert clustered_stderr(ITEMS) == pytest.approx(math.sqrt(5 / 4 * 254 / 81) / 9, rel=1e-12)
    assert clustered_stderr(ITEMS) > plain([score for _, score in ITEMS])


def test_order_and_numbers_of_contexts_do_not_matter() -> None:
    renamed = [(1000 - 7 * context, score) for context, score in reversed(ITEMS)]
    assert clustered_stderr(renamed) == pytest.approx(clustered_stderr(ITEMS), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_is_that_of_a_regression_on_a_constant_with_clustered_errors(seed: int) -> None:
    api = pytest.importorskip("statsmodels.api")
    random = np.random.default_rng(seed)
    contexts = random.integers(0, 5 + seed, 60)
    scores = random.normal(size=60) + random.normal(size=10)[contexts]
    fit = api.OLS(scores, np.ones(60)).fit(cov_type="cluster", cov_kwds={"groups": contexts})
    assert clustered_stderr(list(zip(contexts.tolist(), scores.tolist(), strict=True))) == pytest.approx(fit.bse[0])


def test_one_question_a_context_is_the_usual_error() -> None:
    scores = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert clustered_stderr(list(enumerate(scores))) == pytest.approx(plain(scores), rel=1e-12)


def test_with_fewer_than_four_contexts_questions_are_independent() -> None:
    three = [(number % 3, score) for number, (_, score) in enumerate(ITEMS)]
    assert clustered_stderr(three) == pytest.approx(plain([score for _, score in three]), rel=1e-12)
    assert clustered_stderr([(0, 1.0), (0, 0.0)]) == pytest.approx(0.5)


def test_too_few_items_have_no_error_and_equal_ones_none_to_speak_of() -> None:
    assert math.isnan(clustered_stderr([(0, 1.0)]))
    assert math.isnan(clustered_stderr([]))
    assert lm_eval_stderr([(0, 1.0)]) == "N/A"
    assert lm_eval_stderr(ITEMS) == clustered_stderr(ITEMS)
    assert clustered_stderr([(context, 1.0) for context in range(5)]) == 0


# In lm-eval


def dataset(shift: int = 0, **_: Any) -> dict[str, Any]:
    from datasets import Dataset  # type: ignore[import-untyped]

    return {"test": Dataset.from_list([{"context": c + shift, "value": value} for c, value in ITEMS])}


def name_first(doc: dict[str, Any], _: list[str]) -> dict[str, Any]:
    return {"recall": doc["value"], "recall_stderr": (doc["context"], doc["value"])}


def error_first(doc: dict[str, Any], _: list[str]) -> dict[str, Any]:
    return dict(reversed(name_first(doc, _).items()))


TASK = """\
task: {task}
custom_dataset: !function test_lm_stderr.dataset
output_type: generate_until
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{value}}}}"
process_results: !function test_lm_stderr.{results}
generation_kwargs: {{until: ["."], do_sample: false}}
metric_list:
  - {{metric: recall, aggregation: mean, higher_is_better: true}}
  - {{metric: recall_stderr, aggregation: !function kveval.lm_stderr.{error}, higher_is_better: false}}
metadata: {{version: 1.0}}
"""


class Silent(LM):
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return ["" for _ in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def evaluated(
    folder: Path, results: str = "name_first", by_size: bool = False, error: str = "lm_eval_stderr", **options: Any
) -> dict[str, Any]:
    """What lm-eval makes of the group ``both`` of two tasks with ITEMS as documents."""
    for task in ("one", "two"):
        (folder / f"{task}.yaml").write_text(TASK.format(task=task, results=results, error=error))
    weights = f"{{metric: recall, weight_by_size: {str(by_size).lower()}}}"
    (folder / "both.yaml").write_text(f"group: both\ntask: [one, two]\naggregate_metric_list:\n  - {weights}\n")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    got: dict[str, Any] = simple_evaluate(model=Silent(), tasks=["both"], task_manager=manager, **options)
    return got


def test_lm_eval_prints_it_and_pools_it_in_groups(tmp_path: Path) -> None:
    got = evaluated(tmp_path)
    error = clustered_stderr(ITEMS)
    for task in ("one", "two"):
        row = got["results"][task]
        assert (row["recall,none"], row["recall_stderr,none"]) == (pytest.approx(5 / 9), error)
        assert row["recall_stderr_stderr,none"] == "N/A"  # of the error itself; no table shows it
    assert got["groups"]["both"]["recall_stderr,none"] == pytest.approx(error / math.sqrt(2))
    table = make_table(got)
    assert f"|0.5556|±  |{error:.4f}|" in table
    assert f"|{error / math.sqrt(2):.4f}|" in make_table(got, "groups")
    assert "stderr" not in table.replace("Stderr", "")  # one line a task


def test_it_is_there_without_bootstrap_too(tmp_path: Path) -> None:
    assert evaluated(tmp_path, bootstrap_iters=0)["results"]["one"]["recall_stderr,none"] == clustered_stderr(ITEMS)


def test_the_metric_itself_must_come_first(tmp_path: Path) -> None:
    """Else lm-eval's error is written later, over this one: what process_results of a task must not do."""
    row = evaluated(tmp_path, "error_first")["results"]["one"]
    assert row["recall_stderr,none"] == pytest.approx(plain([score for _, score in ITEMS]))


@pytest.mark.parametrize("by_size", [False, True])
def test_one_document_alone_has_no_error(tmp_path: Path, by_size: bool) -> None:
    got = evaluated(tmp_path, by_size=by_size, limit=1)
    assert got["results"]["one"]["recall_stderr,none"] == got["groups"]["both"]["recall_stderr,none"] == "N/A"
    assert "N/A" in make_table(got)


def test_a_nan_would_end_the_run(tmp_path: Path) -> None:
    """Why tasks name ``lm_eval_stderr``."""
    with pytest.raises(ZeroDivisionError):
        evaluated(tmp_path, by_size=True, limit=1, error="clustered_stderr")


@pytest.mark.parametrize("by_size", [False, True])
def test_groups_of_one_size_pool_it_alike(tmp_path: Path, by_size: bool) -> None:
    error = evaluated(tmp_path, by_size=by_size)["groups"]["both"]["recall_stderr,none"]
    assert error == pytest.approx(clustered_stderr(ITEMS) / math.sqrt(2))
