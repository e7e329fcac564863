"""The gate: every rule fires, every outcome is reached, and the sentence says why."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from kveval.errors import EvidenceError, KvevalError
from kveval.gate import EXIT_CODES, Outcome, Rule, Verdict, decide
from kveval.policy import CHECKS, Policy, load_policy
from kveval.resources import data_path
from kveval.rules import percent
from kveval.runs.evidence import TABLES, Evidence
from kveval.runs.paired import divergence_of, paired_answers, retention_by_length

LENGTHS, DEPTHS, DEPLOYED = (4096, 8192, 131_072), (0.0, 0.25, 0.5, 0.75, 1.0), 131_072
Row = dict[str, Any]
Change = Callable[[Row], Row | None]  # a row of answers, changed; None drops it


def asked(arm: str, contexts: int = 4, needles: int = 16) -> Iterator[Row]:
    """Every question of every cell, answered right: 80 a context and length."""
    for context in range(contexts):
        for length in LENGTHS:
            for number in range(len(DEPTHS) * needles):
                value = f"{1_000_000 + 1000 * context + number}"
                yield {
                    "arm": arm,
                    "task": "kveval_needle_grid",
                    "context": context,
                    "length": length,
                    "depth": DEPTHS[number % len(DEPTHS)],
                    "question": number,
                    "prompt_sha256": f"{context}-{length}-{number}",
                    "prompt_tokens": length,
                    "read_tokens": length,
                    "needle_first": 0,
                    "needle_last": 9,
                    "expected": value,
                    "answer": value,
                    "score": 1.0,
                    "finish_reason": "stop",
                    "status": "scored",
                    "error": "",
                }


@cache
def moved(arm: str, nats: float, kl: float, agreement: float, contexts: int) -> pd.DataFrame:
    """600 positions a context, every third sampled; the first ten lie in a needle and differ wildly.

    The means over the scored positions are exactly ``nats`` and ``kl``.
    """
    rng = np.random.default_rng(0)
    n = 600 * contexts
    rows = pd.DataFrame({"arm": arm, "context": np.arange(n) // 600, "position": np.arange(n) % 600})
    rows["scored"] = rows["position"] >= 10
    sampled = rows["position"] % 3 == 0
    change, divergence = rng.normal(0, 0.05, n), rng.exponential(1, n)
    rows["nll_baseline"] = rng.exponential(2.8, n)
    rows["nll"] = rows["nll_baseline"] + nats + change - change[rows["scored"]].mean()
    rows.loc[~rows["scored"], "nll"] = 40.0
    rows["kl"] = np.where(sampled, kl * divergence / divergence[rows["scored"] & sampled].mean(), np.nan)
    rows["top1_agree"] = np.where(sampled, rng.random(n) < agreement, np.nan)
    return table("divergence", rows)


@cache
def as_asked(arm: str, contexts: int) -> pd.DataFrame:
    return table("answers", list(asked(arm, contexts)))


def changed_answers(arm: str, contexts: int, change: Change | None) -> pd.DataFrame:
    if change is None:
        return as_asked(arm, contexts)
    return table("answers", [new for row in asked(arm, contexts) if (new := change(row))])


def table(name: str, rows: Any) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(TABLES[name])).astype(TABLES[name])


def run(
    *,
    fp8: Change | None = None,
    bf16: Change | None = None,
    contexts: int = 4,
    others: dict[str, Change | None] | None = None,
    checks: dict[tuple[str, str], str] | None = None,
    nats: float = 0.002,
    kl: float = 0.003,
    agreement: float = 0.98,
) -> Evidence:
    """Evidence of a run in which fp8 is as good as bf16, but for what the arguments change."""
    arms = {"bf16": bf16, "fp8": fp8, **(others or {})}
    answers = [changed_answers(arm, contexts, change) for arm, change in arms.items()]
    states = {
        ("engaged", "bf16"): "passed",
        **{("engaged", arm): "passed" for arm in arms},
        **{("whole prompts", arm): "passed" for arm in arms},
        **{("paired", arm): "passed" for arm in arms if arm != "bf16"},
        ("discriminative", "bf16"): "passed",
        ("sane", "bf16"): "not checked",
        **(checks or {}),
    }
    rows = [
        {"check": check, "arm": arm, "status": state, "detail": f"told by {check}"}
        for (check, arm), state in states.items()
    ]
    plan_arms = [{"name": arm, "kv": arm, "role": "candidate" if arm != "bf16" else "baseline"} for arm in arms]
    return Evidence(
        path=Path("nowhere"),
        plan={"experiment": {"arms": plan_arms, "ctx_tokens": DEPLOYED}},
        manifest={},
        answers=pd.concat(answers),
        divergence=pd.concat([moved(arm, nats, kl, agreement, contexts) for arm in arms if arm != "bf16"]),
        footprint=table("footprint", []),
        throughput=table("throughput", []),
        checks=table("checks", [row for row in rows if row["status"] != "absent"]),
    )


@cache
def good() -> Evidence:
    """A run whose candidate is as good as the baseline; never changed."""
    return run()


def lose(part: float, lengths: tuple[int, ...] = LENGTHS) -> Callable[[Row], Row]:
    """Answers wrongly every 1/``part``-th question of the lengths given."""
    every = round(1 / part)

    def change(row: Row) -> Row:
        if row["length"] in lengths and row["question"] % every == 0:
            row.update(answer="7", score=0.0)
        return row

    return change


def unscored(status: str, where: Callable[[Row], bool]) -> Callable[[Row], Row]:
    def change(row: Row) -> Row:
        if where(row):
            row.update(answer="", score=math.nan, status=status)
        return row

    return change


def judged(evidence: Evidence, policy: str = "default", /, **changed: Any) -> Verdict:
    return decide(evidence, load_policy(policy).model_copy(update=changed))


def rule(verdict: Verdict, name: str, scope: str = "", arm: int = 0) -> Rule:
    found = [rule for rule in verdict.arms[arm].rules if rule.name == name and scope in (rule.scope, "")]
    assert found, f"no rule {name} ({scope}) in {[(rule.name, rule.scope) for rule in verdict.arms[arm].rules]}"
    return found[0]


# Outcomes


def test_a_format_as_good_as_the_baseline_passes() -> None:
    verdict = judged(good())
    assert verdict.outcome is Outcome.PASS
    assert verdict.policy == "default"
    assert verdict.sentence == verdict.arms[0].sentence
    assert verdict.sentence.startswith(
        "PASS: fp8 keeps 100 % [98.9, 101.2 %] of recall at 131,072 tokens, margin 99 % (at least 99.1 % "
    )
    assert "a PPL ratio of 1.002" in verdict.sentence
    assert all(rule.outcome is Outcome.PASS for rule in verdict.arms[0].rules if rule.decisive)
    assert {"check", "errors", "incomplete", "discriminative", "contexts", "retention", "catastrophe"} < {
        rule.name for rule in verdict.arms[0].rules
    }
    assert {"ppl ratio", "kl mean", "top-1 agreement"} < {rule.name for rule in verdict.arms[0].rules}


def test_a_loss_at_the_deployed_length_fails_and_names_it() -> None:
    """The shorter lengths are perfect, so the pooled retention is high: it hides nothing."""

    def window(row: Row) -> Row:
        kept = row["length"] < DEPLOYED or row["question"] % 15 == 0
        return row if kept else {**row, "score": 0.0, "answer": "no"}

    verdict = judged(run(fp8=window, contexts=1))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.sentence.startswith("FAIL: fp8 keeps 7.5 % [")
    assert "of recall at 131,072 tokens, margin 99 %" in verdict.sentence
    assert rule(verdict, "retention", "8,192 tokens").outcome is not Outcome.FAIL
    assert rule(verdict, "retention", "all lengths").value == pytest.approx((80 + 80 + 6) / 240)


def test_a_loss_at_a_shorter_length_fails_though_the_deployed_one_passes() -> None:
    verdict = judged(run(fp8=lose(0.1, (8192,))))
    assert rule(verdict, "retention", "131,072 tokens").outcome is Outcome.PASS
    assert verdict.outcome is Outcome.FAIL
    assert verdict.sentence.startswith("FAIL: fp8 keeps 90 %")
    assert "at 8,192 tokens" in verdict.sentence


def test_an_undecided_shorter_length_does_not_undo_a_pass() -> None:
    verdict = judged(run(fp8=lose(0.0125, (4096,))))  # 4 of 320
    found = rule(verdict, "retention", "4,096 tokens")
    assert (found.outcome, found.decisive) == (Outcome.INCONCLUSIVE, False)
    assert verdict.outcome is Outcome.PASS


def test_a_loss_pooled_over_lengths_fails_where_no_length_alone_can_tell() -> None:
    """4 of 320 lost at two lengths and 4 at the deployed one; only the 12 of 960 together exclude 99.6 %."""
    verdict = judged(run(fp8=lose(0.0125)), retention_margin=0.994)
    assert rule(verdict, "retention", "131,072 tokens").outcome is Outcome.INCONCLUSIVE
    assert rule(verdict, "retention", "all lengths").outcome is Outcome.FAIL
    assert verdict.outcome is Outcome.FAIL
    assert "over all lengths" in verdict.sentence


def test_too_few_questions_are_inconclusive_and_say_how_many_would_do() -> None:
    few = lambda row: row if row["question"] < 50 else None  # noqa: E731
    verdict = judged(run(fp8=few, bf16=few))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "200 questions do not decide it; at the rates seen about 299 questions (`--contexts 6`)" in verdict.sentence
    assert "would settle it as PASS" in verdict.sentence


def test_at_the_margin_no_number_of_questions_is_promised() -> None:
    few = lambda row: row if row["question"] < 50 else None  # noqa: E731
    verdict = judged(run(fp8=lambda row: few(lose(0.02)(row)), bf16=few), retention_margin=0.98)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "too close to the margin" in verdict.sentence


def test_too_few_contexts_cannot_pass() -> None:
    evidence = run(contexts=2)
    evidence = dataclasses.replace(evidence, answers=pd.concat([evidence.answers, twice_as_many(evidence.answers)]))
    verdict = judged(evidence)
    assert rule(verdict, "retention", "131,072 tokens").outcome is Outcome.PASS
    assert rule(verdict, "contexts").outcome is Outcome.INCONCLUSIVE
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "was read on 2 contexts" in verdict.sentence
    assert "add `--contexts 4`" in verdict.sentence
    assert judged(evidence, "exploratory").outcome is Outcome.PASS


def twice_as_many(answers: pd.DataFrame) -> pd.DataFrame:
    return answers.assign(prompt_sha256=answers["prompt_sha256"] + "-again", question=answers["question"] + 1000)


def test_one_context_names_both_what_is_asked_and_what_is_read() -> None:
    sentence = judged(run(contexts=1)).sentence
    assert "80 questions do not decide it; at the rates seen about 299 questions (`--contexts 4`)" in sentence
    assert "; was read on 1 context, and the spread between contexts takes 4 to know: add `--contexts 4`" in sentence


def test_too_few_contexts_can_fail() -> None:
    assert judged(run(fp8=lose(0.5), contexts=1)).outcome is Outcome.FAIL


def test_the_worst_arm_is_the_verdict() -> None:
    evidence = run(others={"int4-g32": lose(0.5), "window:4k": None})
    verdict = judged(evidence)
    assert [arm.outcome for arm in verdict.arms] == [Outcome.PASS, Outcome.FAIL, Outcome.PASS]
    assert verdict.outcome is Outcome.FAIL
    assert verdict.sentence.startswith("FAIL: int4-g32 keeps 50 %")
    assert verdict.sentence.endswith("(other arms: fp8 PASS, window:4k PASS)")
    worse = judged(run(others={"int4-g32": lose(0.5)}, checks={("engaged", "fp8"): "failed"}))
    assert [arm.outcome for arm in worse.arms] == [Outcome.INVALID, Outcome.FAIL]
    assert worse.outcome is Outcome.INVALID


def test_exit_codes_are_those_of_the_design() -> None:
    assert {str(outcome): code for outcome, code in EXIT_CODES.items()} == {
        "PASS": 0,
        "FAIL": 1,
        "INCONCLUSIVE": 3,
        "INVALID": 4,
    }
    assert f"{Outcome.FAIL}" == "FAIL"
    assert Outcome.FAIL == "FAIL"


def test_a_better_candidate_passes_and_is_not_clipped() -> None:
    verdict = judged(run(bf16=lose(0.05)))
    assert verdict.outcome is Outcome.PASS
    assert rule(verdict, "retention").value == pytest.approx(1 / 0.95)


# Checks and pairing


@pytest.mark.parametrize("check", ["engaged", "whole prompts", "sane"])
@pytest.mark.parametrize("arm", ["fp8", "bf16", ""])
def test_a_failed_check_is_invalid_whoever_failed_it(check: str, arm: str) -> None:
    verdict = judged(run(checks={(check, arm): "failed"}))
    assert verdict.outcome is Outcome.INVALID
    assert f"check '{check}' failed on {arm or 'the run'}: told by {check}" in verdict.sentence


def test_another_arms_failed_check_is_that_arms_alone() -> None:
    verdict = judged(run(others={"int4-g32": None}, checks={("engaged", "int4-g32"): "failed"}))
    assert [arm.outcome for arm in verdict.arms] == [Outcome.PASS, Outcome.INVALID]


@pytest.mark.parametrize("state", ["not checked", "absent"])
def test_a_required_check_that_was_not_made_cannot_pass(state: str) -> None:
    verdict = judged(run(checks={("discriminative", "bf16"): state}))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "no result of check 'discriminative'" in verdict.sentence
    assert judged(good(), required_checks=("engaged",)).outcome is Outcome.PASS


def test_a_check_that_is_not_required_may_be_missing() -> None:
    assert judged(run(checks={("sane", "bf16"): "not checked"})).outcome is Outcome.PASS
    strict = judged(run(checks={("sane", "bf16"): "not checked"}), "strict")
    assert rule(strict, "check", "sane").outcome is Outcome.INCONCLUSIVE


def test_unequal_questions_are_refused_with_their_counts() -> None:
    """Case 10: when the prompts differ, nothing is compared."""
    evidence = run(
        fp8=lambda row: (
            None
            if row["question"] == 3
            else {**row, "prompt_sha256": row["prompt_sha256"] + "'"}
            if row["question"] == 4
            else row
        )
    )
    told = r"960 in 'bf16', 948 in 'fp8', 936 in both, 24 only in 'bf16', 12 only in 'fp8'"
    with pytest.raises(EvidenceError, match=told):
        paired_answers(evidence, "fp8")
    verdict = judged(evidence)
    assert verdict.outcome is Outcome.INVALID
    assert "960 in 'bf16', 948 in 'fp8'" in verdict.sentence
    assert not any(rule.name == "retention" for rule in verdict.arms[0].rules)


def test_a_prompt_asked_twice_is_refused() -> None:
    evidence = run(fp8=lambda row: {**row, "prompt_sha256": "same"} if row["question"] == 5 else row)
    with pytest.raises(EvidenceError, match="more than once"):
        paired_answers(evidence, "fp8")


def test_arms_join_on_the_prompt_and_not_on_order() -> None:
    evidence = run(fp8=lose(0.25))
    shuffled = dataclasses.replace(evidence, answers=evidence.answers.sample(frac=1, random_state=1))
    pd.testing.assert_frame_equal(paired_answers(evidence, "fp8"), paired_answers(shuffled, "fp8"))
    assert judged(evidence) == judged(shuffled)
    pairs = paired_answers(evidence, "fp8")
    assert list(pairs.columns[:7]) == ["prompt_sha256", "task", "context", "length", "depth", "question", "expected"]
    assert (pairs["candidate_answer"] == "7").sum() == (pairs["candidate_score"] == 0).sum() == 240
    assert (pairs["baseline_answer"] == pairs["expected"]).all()


def test_other_expected_answers_are_refused() -> None:
    with pytest.raises(EvidenceError, match="other expected answers"):
        paired_answers(run(fp8=lambda row: {**row, "expected": "1"}), "fp8")


def test_an_unknown_arm_is_a_users_mistake() -> None:
    with pytest.raises(KvevalError, match="'int3' is no candidate arm"):
        paired_answers(good(), "int3")


# Answers without a score


def test_every_request_refused_is_invalid_and_no_score() -> None:
    """Case 12: HTTP 400 to everything."""
    verdict = judged(run(fp8=unscored("error", lambda row: True)))
    assert verdict.outcome is Outcome.INVALID
    assert "960 of 960 pairs of answers left out, because a request failed" in verdict.sentence
    assert not any(rule.name == "retention" for rule in verdict.arms[0].rules)
    assert rule(verdict, "discriminative").value == 0


def test_more_than_one_in_a_hundred_failed_requests_are_invalid() -> None:
    few = unscored("error", lambda row: row["context"] == 0 and row["question"] < 3 and row["length"] == DEPLOYED)
    many = unscored("error", lambda row: row["context"] == 0 and row["question"] < 4 and row["length"] == DEPLOYED)
    assert rule(judged(run(fp8=few)), "errors").outcome is Outcome.PASS
    found = rule(judged(run(fp8=many)), "errors")  # 4 of 960, but 4 of 320 at the deployed length
    assert (found.outcome, found.value) == (Outcome.INVALID, 4 / 320)
    assert judged(run(bf16=many)).outcome is Outcome.INVALID


def test_an_answer_cut_short_is_left_out_and_not_scored_zero() -> None:
    cut = unscored("incomplete", lambda row: row["length"] == 4096 and row["question"] < 2)
    verdict = judged(run(fp8=cut))
    assert rule(verdict, "retention", "4,096 tokens").value == 1
    assert rule(verdict, "incomplete").value == pytest.approx(8 / 960)
    assert verdict.outcome is Outcome.PASS


def test_a_pass_must_hold_when_answers_cut_short_were_wrong() -> None:
    cut = unscored("incomplete", lambda row: row["length"] == DEPLOYED and row["question"] == 0)
    verdict = judged(run(fp8=cut))  # 4 of 320; 316 are left and all right
    found = rule(verdict, "retention", "131,072 tokens")
    assert found.value == 1
    assert found.outcome is verdict.outcome is Outcome.INCONCLUSIVE
    assert "if its 4 unscored answers were wrong" in verdict.sentence
    assert (
        judged(run(bf16=cut)).outcome is Outcome.PASS
    )  # cut in the baseline: nothing that the candidate could have lost


def test_too_many_answers_cut_short_cannot_pass() -> None:
    verdict = judged(run(fp8=unscored("incomplete", lambda row: row["length"] == 4096 and row["question"] < 16)))
    found = rule(verdict, "incomplete")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.value == pytest.approx(64 / 960)
    assert verdict.outcome is Outcome.INCONCLUSIVE


# Cells


def test_cells_that_the_baseline_fails_are_left_out() -> None:
    """At depth 0 the baseline answers 1 in 4; the candidate loses that too, which is not counted."""
    at_start = lambda row: row["depth"] == 0.0  # noqa: E731
    bf16 = lambda row: {**row, "score": float(row["question"] % 4 == 0)} if at_start(row) else row  # noqa: E731
    fp8 = lambda row: {**row, "score": 0.0} if at_start(row) else row  # noqa: E731
    needs_fewer = {"retention_margin": 0.98}
    verdict = judged(run(bf16=bf16, fp8=fp8), **needs_fewer)
    found = rule(verdict, "discriminative", "131,072 tokens")
    assert found.value == pytest.approx(0.8)
    assert "is judged on 4 of 5 cells" in found.detail
    assert verdict.outcome is Outcome.PASS
    assert retention_by_length(run(bf16=bf16, fp8=fp8), "fp8")[DEPLOYED].estimate == pytest.approx(256 / 272)
    left = retention_by_length(run(bf16=bf16, fp8=fp8), "fp8", min_baseline_score=0.5)[DEPLOYED]
    assert (left.questions, left.estimate) == (256, 1)
    assert judged(run(bf16=bf16, fp8=fp8), discriminative_cells_min=0.9, **needs_fewer).outcome is Outcome.INCONCLUSIVE


def test_a_baseline_that_knows_nothing_at_the_deployed_length_is_invalid() -> None:
    both = lose(1.0, (DEPLOYED,))
    verdict = judged(run(bf16=both, fp8=both))
    assert verdict.outcome is Outcome.INVALID
    assert "0 of 5 cells at 131,072 tokens" in verdict.sentence


def test_a_shorter_length_that_the_baseline_fails_is_not_judged() -> None:
    both = lose(1.0, (4096,))
    verdict = judged(run(bf16=both, fp8=both))
    found = rule(verdict, "discriminative", "4,096 tokens")
    assert (found.outcome, found.decisive) == (Outcome.INCONCLUSIVE, False)
    assert 4096 not in retention_by_length(run(bf16=both, fp8=both), "fp8", min_baseline_score=0.5)
    assert verdict.outcome is Outcome.PASS


def test_no_answer_at_the_deployed_length_is_invalid() -> None:
    short = lambda row: row if row["length"] < DEPLOYED else None  # noqa: E731
    verdict = judged(run(bf16=short, fp8=short))
    assert verdict.outcome is Outcome.INVALID
    assert "no question at 131,072 tokens" in verdict.sentence


def test_a_blind_depth_is_a_catastrophe_though_the_mean_is_within_the_margin() -> None:
    blind = lambda row: lose(1.0, (DEPLOYED,))(row) if row["depth"] == 0.25 else row  # noqa: E731
    verdict = judged(run(fp8=blind), retention_margin=0.5)
    assert rule(verdict, "retention", "131,072 tokens").outcome is Outcome.PASS
    found = rule(verdict, "catastrophe")
    assert (found.outcome, found.value) == (Outcome.FAIL, 0)
    assert "kveval_needle_grid at 131,072 tokens, depth 0.25" in verdict.sentence
    assert judged(run(fp8=blind), retention_margin=0.5, catastrophe_ratio=None).outcome is Outcome.PASS


def test_a_few_unlucky_questions_in_a_cell_are_no_catastrophe() -> None:
    def unlucky(row: Row) -> Row:
        return lose(1.0, (DEPLOYED,))(row) if row["depth"] == 0.25 and row["question"] < 40 else row

    assert rule(judged(run(fp8=unlucky)), "catastrophe").outcome is Outcome.PASS  # 32 of 64


@pytest.mark.parametrize(("needles", "outcome"), [(8, Outcome.PASS), (9, Outcome.FAIL)])
def test_a_lost_cell_is_a_catastrophe_from_nine_questions_on(needles: int, outcome: Outcome) -> None:
    """What default.yaml says of its catastrophe_ratio. One context, so a cell has as many questions as needles."""

    def few(row: Row) -> Row | None:
        return row if row["question"] < 5 * needles else None

    def blind(row: Row) -> Row | None:
        return few({**row, "score": 0.0} if row["depth"] == 0.25 and row["length"] == DEPLOYED else row)

    assert rule(judged(run(fp8=blind, bf16=few, contexts=1)), "catastrophe").outcome is outcome


# Divergence


@pytest.mark.parametrize(
    ("name", "changed", "outcome"),
    [
        ("ppl ratio", {"nats": 0.05}, Outcome.FAIL),
        ("ppl ratio", {"nats": math.log(1.02)}, Outcome.INCONCLUSIVE),
        ("ppl ratio", {"nats": -0.05}, Outcome.PASS),
        ("kl mean", {"kl": 0.04}, Outcome.FAIL),
        ("kl mean", {"kl": 0.02}, Outcome.INCONCLUSIVE),
        ("top-1 agreement", {"agreement": 0.8}, Outcome.FAIL),
        ("top-1 agreement", {"agreement": 0.9}, Outcome.INCONCLUSIVE),
    ],
)
def test_divergence_bounds(name: str, changed: dict[str, float], outcome: Outcome) -> None:
    verdict = judged(run(**changed))  # type: ignore[arg-type]
    assert rule(verdict, name).outcome is outcome
    assert verdict.outcome is outcome
    if outcome is Outcome.FAIL:
        assert rule(verdict, name).detail in verdict.sentence
    if outcome is Outcome.INCONCLUSIVE:
        assert "positions do not decide it" in verdict.sentence


@pytest.mark.parametrize(("nats", "settled"), [(math.log(1.02) - 0.0005, "PASS"), (math.log(1.02) + 0.0005, "FAIL")])
def test_an_undecided_mean_says_which_way_more_contexts_would_settle_it(nats: float, settled: str) -> None:
    verdict = judged(run(nats=nats))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    # ((1.645 + 0.842) x 0.05 / sqrt(2,360) / 0.0005)^2 = 26 times the 4 contexts
    more = int(verdict.sentence.split("about ")[1].split(" contexts")[0])
    assert more == pytest.approx(4 * 26, rel=0.3)
    assert f"would settle it as {settled}" in verdict.sentence


def test_planted_needles_are_kept_out_of_the_means() -> None:
    found = divergence_of(good(), "fp8")
    assert found.ppl.positions == 4 * 590
    assert found.ppl.delta_nll == pytest.approx(0.002, abs=1e-6)  # the 40 nats inside needles would make it 0.6
    assert found.kl is not None
    assert found.kl.positions == 4 * 196
    assert found.top1 is not None


def test_a_bound_on_what_was_not_measured_cannot_pass() -> None:
    evidence = good()
    evidence = dataclasses.replace(evidence, divergence=evidence.divergence.assign(kl=np.float32(math.nan)))
    assert divergence_of(evidence, "fp8").kl is None
    verdict = judged(evidence)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "has no kl mean measured" in verdict.sentence
    assert judged(evidence, kl_mean_max=None).outcome is Outcome.PASS


@pytest.mark.parametrize("broken", ["nan", "none"])
def test_log_probabilities_that_are_no_numbers_are_invalid(broken: str) -> None:
    evidence = good()
    rows = evidence.divergence
    rows = rows.assign(nll=np.float32(math.nan)) if broken == "nan" else rows.iloc[:0]
    verdict = judged(dataclasses.replace(evidence, divergence=rows))
    assert verdict.outcome is Outcome.INVALID
    assert ("2,360 of 2,360 values are not finite" if broken == "nan" else "no scored position") in verdict.sentence
    unbounded = {"ppl_ratio_max": None, "kl_mean_max": None, "top1_agreement_min": None}
    assert judged(dataclasses.replace(evidence, divergence=rows), **unbounded).outcome is Outcome.PASS


# Policies


@pytest.mark.parametrize("name", ["default", "strict", "exploratory"])
def test_shipped_policies_load_and_give_a_reason_for_each_number(name: str) -> None:
    policy = load_policy(name)
    assert policy.name == name
    file = data_path("configs", "gates", f"{name}.yaml")
    assert load_policy(str(file)) == policy
    if name == "default":
        lines = file.read_text(encoding="utf-8").splitlines()
        bare = [
            line
            for before, line in itertools.pairwise(lines)
            if ":" in line and line[0] not in "# " and not before.startswith("#")
        ]
        assert bare == []


def test_strict_asks_for_more_than_default_and_default_for_more_than_exploratory() -> None:
    strict, default, exploratory = (load_policy(name) for name in ("strict", "default", "exploratory"))
    for more, less in ((strict, default), (default, exploratory)):
        assert more.retention_margin > less.retention_margin
        assert more.min_contexts > less.min_contexts
        assert (more.ppl_ratio_max or 0) < (less.ppl_ratio_max or 0)
        assert set(more.required_checks) > set(less.required_checks)
    assert strict.required_checks == CHECKS


def changed_policy(tmp_path: Path, text: str = "", **changed: Any) -> str:
    values = {**yaml.safe_load(data_path("configs", "gates", "default.yaml").read_text()), **changed}
    file = tmp_path / "mine.yaml"
    file.write_text(text or yaml.safe_dump({key: value for key, value in values.items() if value != "absent"}))
    return str(file)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"retention_margn": 0.9}, "unknown key 'retention_margn': did you mean 'retention_margin'"),
        ({"confidence": "absent"}, "the key 'confidence' is missing"),
        ({"confidence": 95}, "'confidence' is 95: Input should be less than 1"),
        ({"retention_margin": "0.99"}, "'retention_margin' is '0.99'"),
        ({"min_contexts": 2.5}, "'min_contexts' is 2.5"),
        ({"ppl_ratio_max": -1}, "'ppl_ratio_max' is -1"),
        ({"kl_mean_max": math.nan}, "'kl_mean_max' is nan"),
        ({"required_checks": ["engagd"]}, "'engagd' is no check; known checks: engaged, sane"),
    ],
)
def test_a_policy_with_a_mistake_names_the_key(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    path = changed_policy(tmp_path, **changed)
    with pytest.raises(KvevalError) as caught:
        load_policy(path)
    assert told in str(caught.value)
    assert path in str(caught.value)


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    policy = load_policy(changed_policy(tmp_path, name="mine", retention_margin=0.9, kl_mean_max=None))
    assert (policy.name, policy.retention_margin, policy.kl_mean_max) == ("mine", 0.9, None)
    assert decide(good(), policy).policy == "mine"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("defalt", "unknown policy 'defalt': did you mean 'default'"),
        ("no/such.yaml", "policy 'no/such.yaml' is no file"),
        ("other.yml", "policy 'other.yml' is no file"),
    ],
)
def test_an_unknown_policy_names_those_that_exist(name: str, told: str) -> None:
    with pytest.raises(KvevalError) as caught:
        load_policy(name)
    assert told in str(caught.value)
    assert "default, exploratory, strict" in str(caught.value)


@pytest.mark.parametrize("text", ["- 1", "just words", "a: [", "\t"])
def test_a_policy_that_holds_no_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(KvevalError, match=r"mine\.yaml"):
        load_policy(changed_policy(tmp_path, text=text))


def test_a_policy_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_policy("default").confidence = 0.5  # type: ignore[misc]
    assert Policy.model_config["extra"] == "forbid"


def test_a_run_of_the_baseline_alone_has_nothing_to_decide() -> None:
    evidence = good()
    arms = [arm for arm in evidence.plan["experiment"]["arms"] if arm["role"] == "baseline"]
    alone = dataclasses.replace(evidence, plan={"experiment": {"arms": arms, "ctx_tokens": DEPLOYED}})
    with pytest.raises(KvevalError, match="--kv fp8"):
        judged(alone)


@pytest.mark.parametrize(
    ("share", "near", "written"),
    [
        (0.068, 0.99, "6.8 %"),
        (1.0, 0.99, "100 %"),
        (0.0, 0.99, "0 %"),
        (0.9997, 0.99, "99.97 %"),
        (0.98996, 0.99, "98.996 %"),
        (0.99, 0.99, "99 %"),
        (0.0003, 0.99, "0.03 %"),
        (1.052, 0.99, "105.2 %"),
    ],
)
def test_no_number_is_rounded_onto_the_bound_it_misses(share: float, near: float, written: str) -> None:
    assert percent(share, near) == written


def test_the_gate_is_imported_without_heavy_packages() -> None:
    heavy = {"pandas", "scipy", "statsmodels", "torch", "transformers"}
    code = f"import sys, kveval.gate; print(*({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
