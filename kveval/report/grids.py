"""Length x depth: which cells were asked, how many were right, how many were lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from kveval.report.model import Cell, Grid

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    import pandas as pd

    from kveval.runs.evidence import Evidence

_Number = TypeVar("_Number", int, float)
_DEPTH_DIGITS = 6  # two depths closer than this are the same column


def grids_of(evidence: Evidence, pairs: dict[str, pd.DataFrame | None], min_baseline_score: float) -> tuple[Grid, ...]:
    """One grid for each arm and task, the baseline's first.

    ``pairs`` holds each candidate's paired answers (``kveval.gate.paired_answers``), None where they cannot be joined.
    A cell whose baseline mean is below ``min_baseline_score`` is not discriminative.
    """
    task_plan = evidence.plan["experiment"]["task"]
    answers = evidence.answers.assign(depth=evidence.answers["depth"].round(_DEPTH_DIGITS))
    grids = []
    for arm in (evidence.baseline, *evidence.candidates):
        for task in sorted(answers["task"].unique()) or [task_plan["name"]]:
            rows = answers[answers["task"] == task]
            planned = task_plan if task == task_plan["name"] else {}
            lengths = _axis(int(length) for length in [*rows["length"], *planned.get("lengths", ())])
            depths = _axis(round(float(depth), _DEPTH_DIGITS) for depth in [*rows["depth"], *planned.get("depths", ())])
            cells = _cells(rows[rows["arm"] == arm], _scores(arm, task, rows, pairs), min_baseline_score)
            table = tuple(tuple(cells.get((length, depth)) for depth in depths) for length in lengths)
            grids.append(Grid(arm=arm, task=str(task), lengths=lengths, depths=depths, cells=table))
    return tuple(grids)


def _axis(values: Iterable[_Number]) -> tuple[_Number, ...]:
    return tuple(sorted(set(values)))


def _scores(arm: str, task: str, rows: pd.DataFrame, pairs: dict[str, pd.DataFrame | None]) -> pd.DataFrame:
    """Columns length, depth, score, baseline_score of the scored questions."""
    pair = pairs.get(arm)
    if pair is not None:
        pair = pair[pair["task"] == task]
        scores = pair.assign(score=pair["candidate_score"], depth=pair["depth"].round(_DEPTH_DIGITS))
    else:
        own = rows[(rows["arm"] == arm) & (rows["status"] == "scored")]
        scores = own.assign(baseline_score=own["score"] if arm not in pairs else float("nan"))
    return scores[["length", "depth", "score", "baseline_score"]]


def _cells(asked: pd.DataFrame, scores: pd.DataFrame, min_baseline_score: float) -> dict[tuple[int, float], Cell]:
    scored = {(int(row["length"]), float(row["depth"])): row for row in _sums(scores)}
    counts = asked.groupby(["length", "depth"], as_index=False).size()
    cells = {}
    for row in counts.to_dict("records"):
        place = int(row["length"]), float(row["depth"])
        sums = scored.get(place, {"scored": 0, "score": 0.0, "baseline_score": 0.0})
        number, baseline = int(sums["scored"]), float(sums["baseline_score"])
        cells[place] = Cell(
            length=place[0],
            depth=place[1],
            asked=int(row["size"]),
            scored=number,
            score=float(sums["score"]),
            baseline_score=baseline,
            discriminative=number > 0 and baseline / number >= min_baseline_score,
        )
    return cells


def _sums(scores: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """Number of scored questions and both sums of every cell; the baseline's is NaN where its score is not known."""
    cells = scores.groupby(["length", "depth"], as_index=False).agg(
        scored=("score", "size"),
        score=("score", "sum"),
        baseline_score=("baseline_score", lambda column: column.sum(skipna=False)),
    )
    return cells.to_dict("records")
