"""Why the verdict is what it is: its sentences, the rules of the policy, the checks of the evidence."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kveval.report import wording
from kveval.report.tables import Table, Value

if TYPE_CHECKING:
    from kveval.gate import Rule
    from kveval.report.model import Report


def sentences(report: Report) -> list[tuple[str, str]]:
    """Outcome and sentence: the run's, which is its worst arm's, then those of the other arms."""
    verdict = report.verdict
    told = [(str(verdict.outcome), verdict.sentence)]
    told += [(str(arm.outcome), arm.sentence) for arm in verdict.arms if not verdict.sentence.startswith(arm.sentence)]
    return [(outcome, sentence.removeprefix(f"{outcome}: ")) for outcome, sentence in told]


def counted_rules(report: Report) -> list[tuple[str, int, int, list[Rule]]]:
    """Of each candidate: its name, how many rules passed, how many count, and those that count and did not pass."""
    told = []
    for arm in report.verdict.arms:
        counted = [rule for rule in arm.rules if rule.decisive or str(rule.outcome) == "FAIL"]
        unmet = [rule for rule in counted if str(rule.outcome) != "PASS"]
        told.append((arm.arm, len(counted) - len(unmet), len(counted), unmet))
    return told


def rules_table(report: Report) -> Table:
    """Why: every rule of the policy that was applied, with its value and its bound."""
    rows = [
        (arm.arm, (Value(rule.name), Value(rule.scope), *_measured(rule), _outcome(rule), Value(rule.detail)))
        for arm in report.verdict.arms
        for rule in arm.rules
    ]
    columns = ("Arm", "Rule", "Where", "Measured", "Asked for", "Outcome", "Detail")
    note = "The outcome goes by one-sided bounds. In brackets: only a FAIL counts."
    return Table(f"All rules of policy {report.verdict.policy}", columns, tuple(rows), note)


# Rules whose values are shares of one.
_SHARES = ("retention", "top-1 agreement", "discriminative", "catastrophe", "errors", "incomplete")


def _outcome(rule: Rule) -> Value:
    outcome = str(rule.outcome)
    return Value(outcome, tone=outcome) if rule.decisive else Value(f"({outcome})", tone="muted")


def _measured(rule: Rule) -> tuple[Value, Value]:
    form = wording.percent if rule.name in _SHARES else wording.nats if rule.name == "kl mean" else wording.number
    write = partial(form, near=rule.bound)
    value = "" if rule.value is None else write(rule.value)
    span = "" if rule.low is None or rule.high is None else wording.span(rule.low, rule.high, write)
    return Value(value, span), Value("" if rule.bound is None else write(rule.bound))


def checks_table(report: Report) -> Table:
    """Every check of the evidence, also those that were not made."""
    rows = [
        (row.check, (Value(row.arm or "the run"), Value(row.status, tone=row.status), Value(row.detail)))
        for row in report.checks
    ]
    return Table("Checks of the evidence", ("Check", "Arm", "Status", "Detail"), tuple(rows))
