"""From journal to tables: every number lands in the row of its own arm, context, question and position.

The journal is filled by hand with numbers that say where they belong, so a row that got its neighbour's is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kveval.engines.base import Answer
from kveval.measure.divergence import sample_positions
from kveval.runs.journal import SIZES, Journal
from kveval.runs.plan import Plan, Request, resolve_plan
from kveval.runs.rows import build_rows
from kveval.runs.scored import lm_eval_results
from kveval.runs.texts import prompts_of

ARMS = ["bf16", "fp8", "int4-g32"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Two contexts, three arms."""
    return resolve_plan(Request(("fp8", "int4-g32"), 1024, contexts=2, needles=2, depths=(0.0, 0.5, 1.0)))


def sampled(plan: Plan, context: int) -> np.ndarray:
    task, divergence = plan.experiment["task"], plan.experiment["divergence"]
    tokens = len(plan.contexts[context].ids)
    return sample_positions(tokens, divergence["sampled_positions"], task["seed"], context)


def told(arm: str, context: int) -> float:
    return 10_000.0 * ARMS.index(arm) + 100_000.0 * context


@pytest.fixture
def journal(plan: Plan, tmp_path: Path) -> Iterator[Journal]:
    """NLL and KL are told(arm, context) + position; fp8 gives every other answer wrong, int4-g32 all of them."""
    with Journal(tmp_path / "journal.sqlite") as journal:
        for number, arm in enumerate(ARMS):
            for context in plan.contexts:
                answers = []
                for i, (prompt, question) in enumerate(zip(prompts_of(context), context.questions, strict=True)):
                    right = number == 0 or (number == 1 and i % 2 == 0)
                    text = f"{question.told}." if right else "1."
                    answers.append(Answer(prompt.sha256, prompt.tokens, prompt.tokens, text, "stop"))
                journal.put(arm, answers)
                base, positions = told(arm, context.context), sampled(plan, context.context)
                series = {
                    "nll": base + np.arange(1, len(context.ids)),
                    "kl": base + positions if number else np.empty(0),
                    "top1_agree": (positions % 2) if number else np.empty(0),
                }
                sizes = {name: int(base) + i for i, name in enumerate(SIZES)}
                journal.put_reading(arm, context.context, sizes, series, [("prefill", 1, 1, base)])
        yield journal


def readings(table: pd.DataFrame) -> Iterator[tuple[str, int, pd.DataFrame]]:
    """The rows of each (arm, context)."""
    for arm, context in table[["arm", "context"]].drop_duplicates().itertuples(index=False):
        yield arm, context, table[(table["arm"] == arm) & (table["context"] == context)]


@pytest.fixture
def tables(plan: Plan, journal: Journal) -> dict[str, pd.DataFrame]:
    return build_rows(plan, journal, {context.context: prompts_of(context) for context in plan.contexts})


def test_divergence_rows_stand_at_their_own_position(plan: Plan, tables: dict[str, pd.DataFrame]) -> None:
    for arm, number, rows in readings(tables["divergence"]):
        at = rows["position"].to_numpy()
        np.testing.assert_array_equal(at, np.arange(1, len(plan.contexts[number].ids)))
        np.testing.assert_array_equal(rows["nll_baseline"], told("bf16", number) + at)
        np.testing.assert_array_equal(rows["nll"], told(arm, number) + at)
        known = rows[rows["kl"].notna()]
        np.testing.assert_array_equal(known["position"], sampled(plan, number))
        np.testing.assert_array_equal(known["kl"], told(arm, number) + known["position"].to_numpy())
        np.testing.assert_array_equal(known["top1_agree"], known["position"].to_numpy() % 2)
        assert rows.loc[rows["kl"].isna(), "top1_agree"].isna().all()
    assert set(tables["divergence"]["arm"]) == set(ARMS[1:])


def test_positions_inside_a_needle_are_those_left_out_of_the_means(plan: Plan, tables: dict[str, pd.DataFrame]) -> None:
    for _, number, rows in readings(tables["divergence"]):
        inside = set(np.flatnonzero(plan.contexts[number].left_out))
        assert set(rows.loc[~rows["scored"], "position"]) == inside - {0}


def test_answers_are_those_of_their_own_arm_and_question(plan: Plan, tables: dict[str, pd.DataFrame]) -> None:
    answers = tables["answers"]
    assert answers.groupby("arm")["score"].mean().to_dict() == {"bf16": 1.0, "fp8": 0.5, "int4-g32": 0.0}
    for _, number, rows in readings(answers):
        questions, prompts = plan.contexts[number].questions, prompts_of(plan.contexts[number])
        assert list(rows["expected"]) == [question.told for question in questions]
        assert list(rows["depth"]) == [question.depth for question in questions]
        assert list(rows["prompt_sha256"]) == [prompt.sha256 for prompt in prompts]
        assert list(rows["needle_first"]) == [question.first for question in questions]
        assert list(rows["needle_last"]) == [question.last for question in questions]


def test_footprint_and_throughput_are_their_own_readings(tables: dict[str, pd.DataFrame]) -> None:
    for row in tables["footprint"].to_dict("records"):
        assert [row[name] for name in SIZES] == [told(row["arm"], row["context"]) + i for i in range(len(SIZES))]
    for row in tables["throughput"].to_dict("records"):
        assert row["seconds"] == told(row["arm"], row["context"])


def test_lm_evals_results_are_each_arms_own(plan: Plan, journal: Journal) -> None:
    prompts = {context.context: prompts_of(context) for context in plan.contexts}
    results = lm_eval_results(plan, journal, prompts)
    assert {arm: values["recall,none"] for arm, values in results.items()} == {"bf16": 1.0, "fp8": 0.5, "int4-g32": 0.0}


def test_a_shortened_prompt_in_the_journal_is_seen_in_the_rows(plan: Plan, journal: Journal) -> None:
    prompts = {context.context: prompts_of(context) for context in plan.contexts}
    short = prompts[0][0]
    journal._db.execute("UPDATE answers SET read_tokens = 5 WHERE arm = 'fp8' AND prompt_sha256 = ?", (short.sha256,))
    answers = build_rows(plan, journal, prompts)["answers"]
    wrong = answers[answers["read_tokens"] != answers["prompt_tokens"]]
    assert list(zip(wrong["arm"], wrong["prompt_sha256"], strict=True)) == [("fp8", short.sha256)]
