"""Both arms' rows side by side, joined on the prompt's hash, and an arm's statistics. Gate and report read these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.errors import EvidenceError, KvevalError
from kveval.runs.evidence import Evidence
from kveval.stats.divergence import Mean, PplRatio, block_mean, block_share, ppl_ratio
from kveval.stats.retention import Retention, paired_retention

if TYPE_CHECKING:
    import pandas as pd

CELL = ["task", "length", "depth"]


@dataclass(frozen=True)
class Divergence:
    """One candidate arm against the baseline, over the scored positions. None where nothing was sampled."""

    ppl: PplRatio
    kl: Mean | None  # nats
    top1: Mean | None  # share of positions with the same most likely token


def paired_answers(evidence: Evidence, arm: str, *, unscored: bool = False) -> pd.DataFrame:
    """One row for each question that both the baseline and ``arm`` were asked, joined on prompt_sha256.

    Columns: context, length, depth, task, question, baseline_score, candidate_score, prompt_sha256, expected,
    baseline_answer, candidate_answer, baseline_status, candidate_status; in the order context, length, question.
    Only pairs with both answers scored, unless ``unscored`` (scores are NaN where the status is not ``scored``).
    Raises EvidenceError when the arms were not asked the same prompts, or one of them was asked a prompt twice.
    """
    if arm not in (*evidence.candidates, evidence.rerun):
        raise KvevalError(f"'{arm}' is no candidate arm of this run: accepted are {', '.join(evidence.candidates)}")
    baseline, candidate = _asked(evidence, evidence.baseline), _asked(evidence, arm)
    _same_prompts(evidence.baseline, baseline, arm, candidate)
    shared = ["prompt_sha256", "task", "context", "length", "depth", "question", "expected"]
    told = {"score": "score", "answer": "answer", "status": "status"}
    left = baseline[[*shared, *told]].rename(columns={name: f"baseline_{name}" for name in told})
    right = candidate[["prompt_sha256", "expected", *told]].rename(columns={name: f"candidate_{name}" for name in told})
    pairs = left.merge(right, on="prompt_sha256", validate="one_to_one", suffixes=("", "_of_candidate"))
    if (pairs["expected"] != pairs["expected_of_candidate"]).any():
        raise EvidenceError(
            f"'{arm}' was scored against other expected answers than '{evidence.baseline}': run both again"
        )
    pairs = pairs.drop(columns="expected_of_candidate").sort_values(
        ["context", "length", "question"], ignore_index=True
    )
    if unscored:
        return pairs
    scored = (pairs["baseline_status"] == "scored") & (pairs["candidate_status"] == "scored")
    return pairs[scored].reset_index(drop=True)


def discriminative(pairs: pd.DataFrame, min_baseline_score: float) -> pd.DataFrame:
    """The rows in cells (task, length, depth) whose mean baseline score is ``min_baseline_score`` or more."""
    return pairs[pairs.groupby(CELL)["baseline_score"].transform("mean") >= min_baseline_score]


def retention_of(pairs: pd.DataFrame, confidence: float = 0.95) -> Retention:
    """Retention over the rows of ``pairs`` (``paired_answers``), interval clustered by context."""
    return paired_retention(
        pairs["baseline_score"].to_numpy(float),
        pairs["candidate_score"].to_numpy(float),
        pairs["context"].to_numpy(int),
        confidence=confidence,
    )


def retention_by_length(
    evidence: Evidence, arm: str, confidence: float = 0.95, *, min_baseline_score: float = 0.0
) -> dict[int, Retention]:
    """Retention of ``arm`` at each length, over the cells with a baseline score of ``min_baseline_score`` or more.

    A length without such a cell is left out.
    Raises EvidenceError as ``paired_answers`` does.
    """
    pairs = discriminative(paired_answers(evidence, arm), min_baseline_score)
    lengths = sorted({int(length) for length in pairs["length"]})
    return {length: retention_of(pairs[pairs["length"] == length], confidence) for length in lengths}


def divergence_of(evidence: Evidence, arm: str, confidence: float = 0.95) -> Divergence:
    """Divergence of ``arm`` over its scored positions (planted needles are left out).

    Raises EvidenceError when there are none, or a log-probability is not a finite number.
    """
    rows = evidence.divergence
    rows = rows[(rows["arm"] == arm) & rows["scored"]].sort_values(["context", "position"], kind="stable")
    if rows.empty:
        raise EvidenceError(f"no scored position of arm '{arm}' has log-probabilities: run it again")

    def sampled(column: str) -> pd.DataFrame | None:
        known = rows[rows[column].notna()]
        return None if known.empty else known

    kl, top1 = sampled("kl"), sampled("top1_agree")
    return Divergence(
        ppl=ppl_ratio(
            rows["nll_baseline"].to_numpy(float),
            rows["nll"].to_numpy(float),
            rows["context"].to_numpy(int),
            confidence=confidence,
        ),
        kl=None
        if kl is None
        else block_mean(kl["kl"].to_numpy(float), kl["context"].to_numpy(int), confidence=confidence),
        top1=None
        if top1 is None
        else block_share(top1["top1_agree"].to_numpy(float), top1["context"].to_numpy(int), confidence=confidence),
    )


def _asked(evidence: Evidence, arm: str) -> pd.DataFrame:
    rows = evidence.answers[evidence.answers["arm"] == arm]
    twice = int(rows["prompt_sha256"].duplicated().sum())
    if twice:
        raise EvidenceError(
            f"arm '{arm}' was asked {twice:,} of its {len(rows):,} prompts more than once: run it again"
        )
    return rows


def _same_prompts(baseline: str, ours: pd.DataFrame, arm: str, theirs: pd.DataFrame) -> None:
    one, other = set(ours["prompt_sha256"]), set(theirs["prompt_sha256"])
    if one != other:
        raise EvidenceError(
            f"the arms were not asked the same prompts: {len(one):,} in '{baseline}', {len(other):,} in '{arm}', "
            f"{len(one & other):,} in both, {len(one - other):,} only in '{baseline}', "
            f"{len(other - one):,} only in '{arm}'; only paired answers can be compared"
        )
