"""From the rows of a run to a ``Report``: every number comes from the tables, through kveval.stats and kveval.gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kveval.errors import EvidenceError
from kveval.policy import CHECKS
from kveval.report.grids import grids_of
from kveval.report.model import Arm, CheckRow, Coverage, Footprint, LengthRetention, LostAnswer, Rate, Report, Speed
from kveval.report.notes import facts, instrument_notice, not_measured, question, setting

if TYPE_CHECKING:
    from typing import Any

    import pandas as pd

    from kveval.gate import Verdict
    from kveval.policy import Policy
    from kveval.runs.evidence import Evidence

EXAMPLES = 5  # lost answers shown of each arm


def build(evidence: Evidence, policy: Policy | None = None) -> Report:
    """The report on ``evidence``, judged by ``policy`` (the default policy when None).

    Evidence that cannot bear a verdict is reported as INVALID, with the reason; it raises nothing.
    """
    from kveval.gate import decide, load_policy

    policy = policy or load_policy("default")
    verdict = decide(evidence, policy)
    experiment = evidence.plan["experiment"]
    pairs = {arm: _paired(evidence, arm) for arm in evidence.candidates}
    ordered = sorted(experiment["arms"], key=lambda entry: entry["role"] != "baseline")
    arms = tuple(_arm(evidence, entry, pairs.get(entry["name"], (None, None)), policy, verdict) for entry in ordered)
    grids = grids_of(evidence, {name: pair for name, (pair, _) in pairs.items()}, policy.min_baseline_score)
    checks = _checks(evidence)
    return Report(
        question=question(experiment),
        setting=setting(evidence.plan),
        verdict=verdict,
        notice=instrument_notice(experiment),
        deployed_tokens=int(experiment["ctx_tokens"]),
        confidence=policy.confidence,
        margin=policy.retention_margin,
        arms=arms,
        grids=grids,
        checks=checks,
        not_measured=not_measured(experiment, arms, grids, checks),
        facts=facts(evidence.plan, policy),
        command=str(evidence.plan.get("command", "")),
        plan=evidence.plan,
        manifest=evidence.manifest,
        policy=policy.model_dump(mode="json"),
    )


def _paired(evidence: Evidence, arm: str) -> tuple[pd.DataFrame | None, str | None]:
    """The arm's answers beside the baseline's, or why they cannot be joined."""
    from kveval.gate import paired_answers

    try:
        return paired_answers(evidence, arm), None
    except EvidenceError as error:
        return None, str(error)


def _arm(
    evidence: Evidence,
    entry: dict[str, Any],
    paired: tuple[pd.DataFrame | None, str | None],
    policy: Policy,
    verdict: Verdict,
) -> Arm:
    from kveval.gate import retention_by_length

    name, candidate = entry["name"], entry["role"] == "candidate"
    pair, pairing_error = paired
    by_length = (
        retention_by_length(evidence, name, policy.confidence, min_baseline_score=policy.min_baseline_score)
        if pair is not None and len(pair)
        else {}
    )
    answers = evidence.answers[evidence.answers["arm"] == name]
    scored = answers[answers["status"] == "scored"]
    deployed = int(evidence.plan["experiment"]["ctx_tokens"])
    at_deployed = scored[scored["length"] == deployed]
    speeds = _speeds(evidence, name)
    read_tokens = sum(row.tokens for row in speeds if row.phase == "prefill")
    context_tokens = sum(int(context["tokens"]) for context in evidence.plan["experiment"]["contexts"])
    lost = pair[pair["candidate_score"] < pair["baseline_score"]] if pair is not None else None
    return Arm(
        name=name,
        kv=entry["kv"],
        role=entry["role"],
        lossy=bool(entry["lossy"]),
        bytes_per_token=float(entry["bytes_per_token"]),
        asked=len(answers),
        scored=len(scored),
        deployed_asked=int((answers["length"] == deployed).sum()),
        deployed_scored=len(at_deployed),
        deployed_score=float(at_deployed["score"].sum()),
        verdict=next((arm for arm in verdict.arms if arm.arm == name), None),
        by_length=tuple(LengthRetention(int(length), value) for length, value in sorted(by_length.items())),
        **_divergence(evidence, name, policy.confidence),
        footprints=_footprints(evidence, name),
        speeds=speeds,
        prefill=_rate([row for row in speeds if row.phase == "prefill"]),
        decode=_decode(speeds),
        read_tokens=read_tokens,
        question_tokens=sum(row.tokens for row in speeds if row.phase == "ask"),
        read_ratio=read_tokens / context_tokens if read_tokens and context_tokens else float("nan"),
        lost_answers=len(lost) if lost is not None else 0,
        lost_examples=_examples(name, lost) if lost is not None else (),
        pairing_error=pairing_error if candidate else None,
    )


def _divergence(evidence: Evidence, arm: str, confidence: float) -> dict[str, Any]:
    """The arm's fields on divergence: the statistics, how many positions they rest on, or why there are none."""
    from kveval.gate import divergence_of

    rows = evidence.divergence[evidence.divergence["arm"] == arm]
    scored = rows[rows["scored"]]
    found: dict[str, Any] = {"divergence": None, "coverage": None, "divergence_error": None}
    if not len(rows):
        return found
    found["coverage"] = Coverage(positions=len(rows), scored=len(scored), sampled=int(scored["kl"].notna().sum()))
    try:
        found["divergence"] = divergence_of(evidence, arm, confidence)
    except EvidenceError as error:
        found["divergence_error"] = str(error)
    return found


def _footprints(evidence: Evidence, arm: str) -> tuple[Footprint, ...]:
    rows = evidence.footprint[evidence.footprint["arm"] == arm].sort_values("context").drop(columns="arm")
    return tuple(Footprint(**{str(key): int(value) for key, value in row.items()}) for row in rows.to_dict("records"))


def _speeds(evidence: Evidence, arm: str) -> tuple[Speed, ...]:
    rows = evidence.throughput[evidence.throughput["arm"] == arm]
    grouped = rows.groupby(["phase", "length"], as_index=False)[["tokens", "seconds"]].sum()
    return tuple(
        Speed(str(row["phase"]), int(row["length"]), int(row["tokens"]), float(row["seconds"]))
        for row in grouped.to_dict("records")
    )


def _rate(speeds: list[Speed], length: int | None = None) -> Rate | None:
    if not speeds:
        return None
    return Rate(sum(row.tokens for row in speeds), sum(row.seconds for row in speeds), length)


def _decode(speeds: tuple[Speed, ...]) -> Rate | None:
    """Decode speed at the longest length measured: it falls with every token in the cache, so lengths do not mix."""
    decoded = [row for row in speeds if row.phase == "decode"]
    longest = max((row.length for row in decoded), default=0)
    return _rate([row for row in decoded if row.length == longest], longest)


def _examples(arm: str, lost: pd.DataFrame) -> tuple[LostAnswer, ...]:
    """A few lost answers, the longest contexts first and one of each cell before a second one of any."""
    rows = lost.sort_values(["length", "depth", "prompt_sha256"], ascending=[False, True, True])
    rank = rows.groupby(["task", "length", "depth"]).cumcount()
    rows = rows.assign(rank=rank).sort_values("rank", kind="stable").head(EXAMPLES)
    return tuple(
        LostAnswer(
            arm=arm,
            task=str(row["task"]),
            context=int(row["context"]),
            length=int(row["length"]),
            depth=float(row["depth"]),
            expected=str(row["expected"]),
            baseline_answer=str(row["baseline_answer"]),
            candidate_answer=str(row["candidate_answer"]),
            prompt_sha256=str(row["prompt_sha256"]),
        )
        for row in rows.to_dict("records")
    )


def _checks(evidence: Evidence) -> tuple[CheckRow, ...]:
    """All rows of the checks table; a check of the design that has none is "not checked"."""
    columns = ["check", "arm", "status", "detail"]
    rows = [CheckRow(*(str(row[column]) for column in columns)) for row in evidence.checks.to_dict("records")]
    names = [*CHECKS, *sorted({row.check for row in rows} - set(CHECKS))]
    ordered: list[CheckRow] = []
    for name in names:
        found = [row for row in rows if row.check == name]
        ordered += found or [CheckRow(name, "", "not checked", "this run did not measure it")]
    return tuple(ordered)
