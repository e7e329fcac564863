"""Policy + rows -> verdict. May this be served? PASS, FAIL, INCONCLUSIVE (with what would settle it) or INVALID."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kveval.errors import EvidenceError, KvevalError
from kveval.policy import Policy, load_policy
from kveval.rules import (
    ALL_LENGTHS,
    FAIL,
    INCONCLUSIVE,
    INVALID,
    PASS,
    Outcome,
    Rule,
    mean_rule,
    nats,
    percent,
    plain,
    retention_rule,
    stated,
    tokens,
)
from kveval.runs.evidence import Evidence
from kveval.runs.paired import (
    CELL,
    Divergence,
    discriminative,
    divergence_of,
    paired_answers,
    retention_by_length,
    retention_of,
)
from kveval.stats.power import positions_factor
from kveval.stats.retention import ratio_limits

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "EXIT_CODES",
    "ArmVerdict",
    "Divergence",
    "Outcome",
    "Policy",
    "Rule",
    "Verdict",
    "decide",
    "divergence_of",
    "load_policy",
    "paired_answers",
    "retention_by_length",
]

EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3, INVALID: 4}
_WORST_FIRST = (INVALID, FAIL, INCONCLUSIVE, PASS)
# Which rules a sentence tells first, and how many it tells in full.
_TELLING: dict[Outcome, tuple[tuple[str, ...], int]] = {
    PASS: (("retention", "ppl ratio"), 2),
    FAIL: (("retention", "catastrophe", "ppl ratio"), 1),
    INCONCLUSIVE: (("retention", "contexts", "ppl ratio"), 2),
    INVALID: ((), 1),
}


@dataclass(frozen=True)
class ArmVerdict:
    """What the rules come to for one candidate arm. ``sentence`` begins with the outcome and the arm's name."""

    arm: str
    outcome: Outcome
    sentence: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Verdict:
    """The worst of the arms' verdicts, and all of them."""

    outcome: Outcome
    policy: str
    sentence: str
    arms: tuple[ArmVerdict, ...]


def decide(evidence: Evidence, policy: Policy) -> Verdict:
    """The verdict of ``policy`` on ``evidence``. Evidence that cannot bear one makes an arm INVALID; it raises nothing.

    Raises KvevalError only when the run has no candidate arm: then there is nothing to decide.
    """
    if not evidence.candidates:
        raise KvevalError("the run has a baseline arm only: name a candidate format with --kv, for instance --kv fp8")
    arms = tuple(_judge(evidence, arm, policy) for arm in evidence.candidates)
    worst = min(arms, key=lambda arm: _WORST_FIRST.index(arm.outcome))
    sentence = worst.sentence
    if len(arms) > 1:
        sentence += f" (other arms: {', '.join(f'{arm.arm} {arm.outcome}' for arm in arms if arm is not worst)})"
    return Verdict(worst.outcome, policy.name, sentence, arms)


def _judge(evidence: Evidence, arm: str, policy: Policy) -> ArmVerdict:
    rules = list(_checks(evidence, arm, policy))
    try:
        rules += _answers(evidence, paired_answers(evidence, arm, unscored=True), policy)
    except EvidenceError as error:
        rules.append(stated("paired", ALL_LENGTHS, INVALID, f"cannot be judged: {error}"))
    try:
        rules += _divergence(evidence, arm, policy)
    except EvidenceError as error:
        rules.append(stated("divergence", "all positions", INVALID, f"cannot be judged: {error}"))
    counted = [rule for rule in rules if rule.decisive or rule.outcome is FAIL]
    outcome = next(worst for worst in _WORST_FIRST if any(rule.outcome is worst for rule in counted))
    return ArmVerdict(arm, outcome, _sentence(arm, outcome, counted), tuple(rules))


def _sentence(arm: str, outcome: Outcome, rules: list[Rule]) -> str:
    """The most telling rules that came to ``outcome`` in full, the others by name."""
    order, count = _TELLING[outcome]
    found = [rule for rule in rules if rule.outcome is outcome]
    found.sort(key=lambda rule: order.index(rule.name) if rule.name in order else len(order))  # stable: else as applied
    sentence = f"{outcome}: {arm} " + "; ".join(rule.detail for rule in found[:count])
    rest = [f"{rule.name} ({rule.scope})" for rule in found[count:]]
    return f"{sentence}; also {', '.join(rest)}" if rest and outcome is not PASS else sentence


def _checks(evidence: Evidence, arm: str, policy: Policy) -> Iterator[Rule]:
    """A failed check of the arm, the baseline or the whole run is INVALID; without a required one there is no PASS."""
    others = set(evidence.candidates) - {arm}
    rows = [row for row in evidence.checks.to_dict("records") if row["arm"] not in others]
    for row in rows:
        if row["status"] == "failed":
            told = f"is not judged: check '{row['check']}' failed on {row['arm'] or 'the run'}: {row['detail']}"
            yield stated("check", str(row["check"]), INVALID, told)
    for name in policy.required_checks:
        states = {row["status"] for row in rows if row["check"] == name}
        if states == {"passed"}:
            yield stated("check", name, PASS, f"passed check '{name}'")
        elif "failed" not in states:
            told = f"has no result of check '{name}', which policy '{policy.name}' requires"
            yield stated("check", name, INCONCLUSIVE, told)


def _answers(evidence: Evidence, asked: pd.DataFrame, policy: Policy) -> Iterator[Rule]:
    """The rules on answers. ``asked``: every paired question, scored or not."""
    deployed = int(evidence.plan["experiment"]["ctx_tokens"])
    yield _left_out("errors", "error", "because a request failed", asked, deployed, policy.errors_max, INVALID)
    yield _left_out(
        "incomplete", "incomplete", "because one was cut short", asked, deployed, policy.incomplete_max, INCONCLUSIVE
    )
    scored = asked[(asked["baseline_status"] == "scored") & (asked["candidate_status"] == "scored")]
    kept = discriminative(scored, policy.min_baseline_score)
    here, kept_here = scored[scored["length"] == deployed], kept[kept["length"] == deployed]
    yield _discriminative(here, kept_here, deployed, policy)
    if kept_here.empty:
        return
    yield _contexts(int(kept_here["context"].nunique()), policy)
    yield _deployed(kept_here, asked[asked["length"] == deployed], deployed, policy)
    yield from _others(scored, kept, deployed, policy)
    if policy.catastrophe_ratio is not None:
        yield _catastrophe(kept, policy.catastrophe_ratio, policy.confidence)


def _left_out(
    name: str, status: str, told: str, asked: pd.DataFrame, deployed: int, most: float, outcome: Outcome
) -> Rule:
    """Answers without a score are no zeros: they are left out, with their partner. Too many leave a selection.

    The share is that over all lengths or that at the deployed one, whichever is larger.
    """
    missing = (asked["baseline_status"] == status) | (asked["candidate_status"] == status)
    at_deployed = missing[asked["length"] == deployed]
    share = max((float(part.mean()) for part in (missing, at_deployed) if len(part)), default=0.0)
    detail = f"has {int(missing.sum()):,} of {len(asked):,} pairs of answers left out, {told}"
    if share > most:
        detail += f" ({percent(share)} where most are missing; at most {percent(most)} may be)"
    return stated(name, ALL_LENGTHS, outcome if share > most else PASS, detail, value=share, bound=most)


def _discriminative(here: pd.DataFrame, kept: pd.DataFrame, deployed: int, policy: Policy) -> Rule:
    """Where the baseline itself fails no loss can show: such cells are left out, and too many leave no verdict."""
    cells, left = (int(rows.groupby(CELL).ngroups) for rows in (here, kept))
    share = left / cells if cells else 0.0
    outcome = INVALID if left == 0 else PASS if share >= policy.discriminative_cells_min else INCONCLUSIVE
    told = f"is judged on {left} of {cells} cells at {tokens(deployed)}"
    if left < cells:
        told += f"; in the others the baseline scores under {policy.min_baseline_score:g}, so a loss could not show"
    if not cells:
        told = f"has no question at {tokens(deployed)} that both arms have a score for"
    return stated("discriminative", tokens(deployed), outcome, told, value=share, bound=policy.discriminative_cells_min)


def _contexts(read: int, policy: Policy) -> Rule:
    wanted = policy.min_contexts
    detail = f"was read on {read} context{'s' if read > 1 else ''}"
    if read < wanted:
        detail += f", and the spread between contexts takes {wanted} to know: add `--contexts {wanted}`"
    return stated("contexts", "the run", PASS if read >= wanted else INCONCLUSIVE, detail, value=read, bound=wanted)


def _deployed(kept: pd.DataFrame, asked: pd.DataFrame, deployed: int, policy: Policy) -> Rule:
    """Retention at the deployed length. A PASS must hold with the candidate's unscored answers counted as lost, too."""
    import pandas as pd

    rule = retention_rule(retention_of(kept, policy.confidence), tokens(deployed), policy, decisive=True)
    missing = asked[(asked["baseline_status"] == "scored") & (asked["candidate_status"] != "scored")]
    missing = missing.merge(kept[CELL].drop_duplicates(), on=CELL)
    if rule.outcome is not PASS or missing.empty:
        return rule
    worst = retention_of(pd.concat([kept, missing.assign(candidate_score=0.0)]), policy.confidence).lower_one_sided
    if worst >= policy.retention_margin:
        return rule
    if_wrong = f"{percent(worst, policy.retention_margin)} if its {len(missing):,} unscored answers were wrong"
    told = f"{rule.detail}, but only {if_wrong}"
    return replace(rule, outcome=INCONCLUSIVE, detail=told)


def _others(scored: pd.DataFrame, kept: pd.DataFrame, deployed: int, policy: Policy) -> Iterator[Rule]:
    """The other lengths from the longest down, and all together: their FAIL counts, their PASS decides nothing."""
    lengths = sorted({int(length) for length in scored["length"]} - {deployed}, reverse=True)
    for length in lengths:
        rows = kept[kept["length"] == length]
        if len(rows):
            yield retention_rule(retention_of(rows, policy.confidence), tokens(length), policy, decisive=False)
        else:
            told = f"is not judged at {tokens(length)}: no cell has a baseline score of {policy.min_baseline_score:g}"
            yield replace(stated("discriminative", tokens(length), INCONCLUSIVE, told), decisive=False)
    if lengths:
        yield retention_rule(retention_of(kept, policy.confidence), ALL_LENGTHS, policy, decisive=False)


def _catastrophe(kept: pd.DataFrame, ratio: float, confidence: float) -> Rule:
    """No cell's upper bound may be under ``ratio`` of the baseline's score: one unlucky question is no catastrophe."""
    change = kept["candidate_score"] - kept["baseline_score"]
    cells = kept.assign(lost=-change.clip(upper=0), gained=change.clip(lower=0)).groupby(CELL, as_index=False)
    worst = (math.inf, math.inf, "")
    for cell in cells[["lost", "gained", "baseline_score"]].sum().to_dict("records"):
        lost, gained, right = cell["lost"], cell["gained"], cell["baseline_score"]
        upper = ratio_limits(lost, gained, right, 1 - confidence)[1]
        where = f"{cell['task']} at {tokens(cell['length'])}, depth {cell['depth']:g}"
        worst = min(worst, (upper, 1 + (gained - lost) / right, where))
    upper, value, where = worst
    kept_most = f"keeps {percent(value)} (at most {percent(upper, ratio)})"
    detail = f"{kept_most} in its worst cell, {where}; under {percent(ratio)} fails"
    return Rule("catastrophe", where, value, ratio, None, None, FAIL if upper < ratio else PASS, detail)


def _divergence(evidence: Evidence, arm: str, policy: Policy) -> Iterator[Rule]:
    bounds = (policy.ppl_ratio_max, policy.kl_mean_max, policy.top1_agreement_min)
    if all(bound is None for bound in bounds):
        return
    found = divergence_of(evidence, arm, policy.confidence)
    contexts = int(evidence.divergence.loc[evidence.divergence["arm"] == arm, "context"].nunique())
    if policy.ppl_ratio_max is not None:
        factor = positions_factor(found.ppl.delta_nll, found.ppl.se, math.log(policy.ppl_ratio_max), policy.confidence)
        yield mean_rule(
            "ppl ratio",
            "a PPL ratio",
            found.ppl,
            policy.ppl_ratio_max,
            at_least=False,
            write=plain,
            contexts=contexts,
            factor=factor,
        )
    for name, told, mean, bound, write in (
        ("kl mean", "a mean KL", found.kl, policy.kl_mean_max, nats),
        ("top-1 agreement", "a top-1 agreement", found.top1, policy.top1_agreement_min, percent),
    ):
        if bound is None:
            continue
        if mean is None:
            missing = f"has no {name} measured, and policy '{policy.name}' bounds it"
            yield stated(name, "sampled positions", INCONCLUSIVE, missing, bound=bound)
            continue
        factor = positions_factor(mean.estimate, mean.se, bound, policy.confidence)
        yield mean_rule(
            name, told, mean, bound, at_least=name == "top-1 agreement", write=write, contexts=contexts, factor=factor
        )
