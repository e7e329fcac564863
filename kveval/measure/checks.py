"""Tests of the evidence itself, from a run's own rows. A failed one makes the run INVALID; it never lowers a score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

PASSED, FAILED, UNCHECKED = "passed", "failed", "not checked"
# Below this the baseline fails more questions of a cell than it answers, and a loss there could not be told from its
# own failing.
DISCRIMINATIVE_SCORE = 0.5
SAME_BYTES = 0.001  # relative difference up to which stored bytes count as what the formula says

Row = tuple[str, str, str, str]  # check, arm, status, detail


def run_checks(experiment: dict[str, Any], tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The checks table of a run: one row for each check and the arm it is about."""
    import pandas as pd

    arms = experiment["arms"]
    rows: list[Row] = []
    for arm in arms:
        rows.extend(engaged(arm, tables["footprint"], tables["divergence"]))
        rows.extend(whole_prompts(arm["name"], tables["answers"]))
    baseline = arms[0]["name"]
    for arm in arms[1:]:
        rows.extend(paired(baseline, arm["name"], tables["answers"]))
    rows.extend(discriminative(baseline, experiment["ctx_tokens"], tables["answers"]))
    rows.append(("sane", baseline, UNCHECKED, "no independent computation of the same format was made"))
    rows.append(("noise floor", baseline, UNCHECKED, "no second baseline arm was read"))
    return pd.DataFrame(rows, columns=["check", "arm", "status", "detail"]).astype("string")


def engaged(arm: dict[str, Any], footprint: pd.DataFrame, divergence: pd.DataFrame) -> Iterator[Row]:
    """The stored bytes are what the format says, and a lossy candidate's log-probabilities are not the baseline's."""
    name = arm["name"]
    rows = footprint[footprint["arm"] == name]
    if rows.empty:
        yield "engaged", name, FAILED, "no footprint was measured"
        return
    for row in rows.itertuples():
        if abs(row.stored_bytes - row.predicted_bytes) > SAME_BYTES * row.predicted_bytes:
            told = f"context {row.context}: {row.stored_bytes:,} B are stored, but the format says {row.predicted_bytes:,} B"
            yield "engaged", name, FAILED, told
            return
    told = f"stored bytes are what the format says: {int(rows['stored_bytes'].iloc[0]):,} B a stream"
    if arm["role"] == "candidate" and arm["lossy"]:
        own = divergence[divergence["arm"] == name]
        moved = int((own["nll"] != own["nll_baseline"]).sum())
        if moved == 0:
            identical = (
                f"all {len(own):,} log-probabilities are the baseline's to the last bit: the format was not read"
            )
            yield "engaged", name, FAILED, identical
            return
        told += f"; {moved:,} of {len(own):,} log-probabilities differ from the baseline's"
    yield "engaged", name, PASSED, told


def whole_prompts(arm: str, answers: pd.DataFrame) -> Iterator[Row]:
    """The engine's own count of prompt tokens is what was sent, for every prompt."""
    own = answers[answers["arm"] == arm]
    short = own[own["read_tokens"] != own["prompt_tokens"]]
    if len(short):
        row = short.iloc[0]
        told = f"{len(short):,} of {len(own):,} prompts: the engine saw {row['read_tokens']:,} of {row['prompt_tokens']:,} tokens"
        yield "whole prompts", arm, FAILED, told
    elif own.empty:
        yield "whole prompts", arm, FAILED, "no prompt was asked"
    else:
        yield "whole prompts", arm, PASSED, f"all {len(own):,} prompts reached the model unshortened"


def paired(baseline: str, arm: str, answers: pd.DataFrame) -> Iterator[Row]:
    """Both arms answered the same prompts."""
    ours, theirs = (answers.loc[answers["arm"] == name, "prompt_sha256"] for name in (baseline, arm))
    lonely = len(set(ours) ^ set(theirs))
    if lonely or len(ours) != len(theirs):
        told = f"{len(ours):,} prompts in {baseline}, {len(theirs):,} in {arm}; {lonely:,} stand in one arm only"
        yield "paired", arm, FAILED, told
    else:
        yield "paired", arm, PASSED, f"the same {len(ours):,} prompts in both arms, joined on their hashes"


def discriminative(baseline: str, ctx_tokens: int, answers: pd.DataFrame) -> Iterator[Row]:
    """At the deployed length the baseline answers well enough in some cell for a loss to show."""
    own = answers[(answers["arm"] == baseline) & (answers["length"] == ctx_tokens) & (answers["status"] == "scored")]
    cells = own.groupby(["task", "depth"])["score"].mean()
    good = int((cells >= DISCRIMINATIVE_SCORE).sum())
    status = PASSED if good else FAILED
    yield (
        "discriminative",
        baseline,
        status,
        f"{good} of {len(cells)} cells at {ctx_tokens:,} tokens have a baseline score of {DISCRIMINATIVE_SCORE} or more",
    )
