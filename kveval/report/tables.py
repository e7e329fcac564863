"""The report's tables as text, once for all renderers: a header, and rows of values with what stands under them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kveval.report import wording
from kveval.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kveval.report.model import Arm, Footprint, Grid, Rate, Report
    from kveval.stats.divergence import Mean
    from kveval.stats.retention import Retention

SIDE_BY_SIDE = 3  # candidates; with more, a table with a row for each comes first


@dataclass(frozen=True)
class Value:
    """What stands in a table cell: the number, and in smaller type what it rests on. ``tone`` colours it."""

    text: str
    detail: str = ""
    tone: str = ""  # an outcome or a check's status; "muted": nothing to see


@dataclass(frozen=True)
class Table:
    """``columns[0]`` heads the row labels; every row has a label and one value for each other column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Value, ...]], ...]
    note: str = ""
    by_arm: bool = False  # the columns are arms, the baseline first


def by_arm(report: Report, title: str, rows: list[tuple[str, Callable[[Arm], Value]]]) -> Table:
    """A table with a column for each arm; each row is a label and what computes an arm's value."""
    columns = ("", *(arm.name for arm in report.arms))
    filled = tuple((label, tuple(value(arm) for arm in report.arms)) for label, value in rows)
    return Table(title, columns, filled, by_arm=True)


def main_tables(report: Report) -> tuple[Table, ...]:
    """What a reader wants first: all formats in one table where they are many, and each arm in full."""
    found = (formats_table(report), main_table(report), task_table(report))
    return tuple(table for table in found if table is not None)


def task_table(report: Report) -> Table | None:
    """A row for each task at the deployed length, where a run asked several; what a loss could not show in is named so."""
    tasks = list(dict.fromkeys(grid.task for grid in report.grids))
    if len(tasks) < 2:
        return None
    grids = {(grid.arm, grid.task): grid for grid in report.grids}
    rows = [
        (task, tuple(_task_value(report, grids.get((arm.name, task)), arm) for arm in report.arms)) for task in tasks
    ]
    note = (
        "The baseline's column is its score over the questions; a candidate's is the share of it that is kept, in cells where "
        "a loss can show. Few questions each: the interval is that of all tasks together, above."
    )
    title = f"By task, at {report.deployed_tokens:,} tokens"
    return Table(title, ("Task", *(arm.name for arm in report.arms)), tuple(rows), note, by_arm=True)


def _task_value(report: Report, grid: Grid | None, arm: Arm) -> Value:
    cells = (
        [cell for row in grid.cells for cell in row if cell and cell.length == report.deployed_tokens] if grid else []
    )
    scored = sum(cell.scored for cell in cells)
    if not scored:
        return Value("not asked", tone="muted")
    telling = [cell for cell in cells if cell.discriminative and cell.scored]
    if arm.role == "baseline":
        return Value(wording.tally(sum(cell.score for cell in cells), scored), "" if telling else "not discriminative")
    if not telling:
        return Value("·", "not discriminative", tone="muted")
    score, base = sum(cell.score for cell in telling), sum(cell.baseline_score for cell in telling)
    questions = sum(cell.scored for cell in telling)
    return Value(wording.percent(score / base, near=report.margin), wording.tally(score, questions))


def main_table(report: Report) -> Table:
    """A column for each arm, the baseline first: what it takes, what it keeps, how fast it is."""
    length = report.deployed_tokens
    base = report.baseline.footprint
    table = by_arm(report, f"At {length:,} tokens", [
        ("Verdict", _verdict),
        ("KV bytes per token", _bytes_per_token),
        ("KV cache, predicted", _bytes(lambda row: row.predicted_bytes)),
        ("KV cache, stored", _bytes(lambda row: row.stored_bytes)),
        ("KV cache, reserved", _bytes(lambda row: row.reserved_bytes)),
        ("Stored / baseline's", lambda arm: _relative(arm, base.stored_bytes if base else None)),
        ("Score", _score),
        ("Recall retention", lambda arm: _retention(arm, arm.retention_at(length), report.margin)),
        ("PPL ratio", lambda arm: _ppl_ratio(arm, report.policy.get("ppl_ratio_max"))),
        ("PPL", lambda arm: _ppl(arm, report)),
        ("Mean KL, nats", lambda arm: _kl(arm, report.policy.get("kl_mean_max"))),
        ("Top-1 agreement", lambda arm: _top1(arm, report.policy.get("top1_agreement_min"))),
        ("Prefill, tokens/s", lambda arm: _rate(arm.prefill)),
        ("Decode, tokens/s", lambda arm: _rate(arm.decode)),
        ("Peak memory", _peak),
    ])  # fmt: skip
    return replace(table, note=_main_note(report))


def formats_table(report: Report) -> Table | None:
    """A row for each format, the largest first, where there are too many to stand side by side; else None."""
    if len(report.candidates) <= SIDE_BY_SIDE:
        return None
    length, base = report.deployed_tokens, report.baseline.footprint
    columns: list[tuple[str, Callable[[Arm], Value]]] = [
        ("B/token", _bytes_per_token),
        ("Stored", lambda arm: _relative(arm, base.stored_bytes if base else None)),
        ("Retention", lambda arm: _retention(arm, arm.retention_at(length), report.margin, False)),
        ("PPL ratio", lambda arm: _ppl_ratio(arm, report.policy.get("ppl_ratio_max"))),
        ("Mean KL, nats", lambda arm: _kl_only(arm, report.policy.get("kl_mean_max"))),
        ("Verdict", _verdict),
    ]
    arms = sorted(report.arms, key=lambda arm: (-arm.bytes_per_token, arm.role != "baseline"))
    rows = tuple((arm.name, tuple(value(arm) for _, value in columns)) for arm in arms)
    note = f"In order of bytes per token. Under an estimate: its {report.confidence * 100:g} % interval."
    return Table(f"Formats at {length:,} tokens", ("Format", *(name for name, _ in columns)), rows, note)


def _kl_only(arm: Arm, bound: float | None) -> Value:
    return replace(_kl(arm, bound), detail="")


def _main_note(report: Report) -> str:
    """What the rows' short names leave out."""
    known = [arm.retention_at(report.deployed_tokens) for arm in report.candidates]
    tokens = sorted({row.tokens for arm in report.arms for row in [arm.footprint] if row})
    cached = sorted({arm.decode.length for arm in report.arms if arm.decode and arm.decode.length})
    notes = [f"Under an estimate: its {report.confidence * 100:g} % interval."]
    if any(kept and kept.clustered for kept in known):
        notes.append("Retention over contexts: clustered by context.")
    if any(kept and not kept.clustered for kept in known):
        notes.append(
            "Retention over questions: too few contexts to know how they differ, so only these are spoken for."
        )
    if tokens:
        notes.append(
            f"KV cache: one stream of {wording.listing([f'{count:,}' for count in tokens])} tokens, all layers."
        )
    if cached:
        notes.append(
            f"Decode: one stream with {wording.listing([f'{count:,}' for count in cached])} tokens in the cache."
        )
    return " ".join(notes)


def _verdict(arm: Arm) -> Value:
    outcome = str(arm.verdict.outcome) if arm.verdict else ""
    return Value(outcome, tone=outcome) if outcome else Value(arm.role, tone="muted")


def _bytes_per_token(arm: Arm) -> Value:
    size, footprint = arm.bytes_per_token, arm.footprint
    evicts = footprint is not None and footprint.predicted_bytes < 0.999 * footprint.tokens * size
    return Value(f"{size:,.2f} B" if size % 1 else f"{size:,.0f} B", "per kept token" if evicts else "")


def _bytes(of: Callable[[Footprint], int]) -> Callable[[Arm], Value]:
    return lambda arm: Value(format_bytes(of(arm.footprint))) if arm.footprint else _missing()


def _missing() -> Value:
    return Value(wording.NOT_MEASURED, tone="muted")


def _none() -> Value:
    return Value("", tone="muted")


def _relative(arm: Arm, baseline_bytes: int | None) -> Value:
    if arm.footprint is None or not baseline_bytes:
        return _missing()
    return Value(f"{arm.footprint.stored_bytes / baseline_bytes:.4g}x")


def _score(arm: Arm) -> Value:
    if not arm.deployed_scored:
        return _missing()
    unscored = arm.deployed_asked - arm.deployed_scored
    text = wording.tally(arm.deployed_score, arm.deployed_scored)
    return Value(text, f"{unscored:,} not scored" if unscored else "")


def _retention(arm: Arm, retention: Retention | None, margin: float | None, with_basis: bool = True) -> Value:
    if arm.role == "baseline":
        return _none()
    if retention is None:
        return _missing()
    write = partial(wording.percent, near=margin)
    span = wording.span(retention.low, retention.high, write)
    return Value(write(retention.estimate), _lines(span, interval_basis(retention) if with_basis else ""))


def interval_basis(retention: Retention) -> str:
    """What a retention interval was taken over, on one or two lines."""
    contexts = wording.count(retention.contexts, "context")
    if retention.clustered:
        return f"over {contexts}"
    return f"over {wording.count(retention.questions, 'question')}\nin {contexts}"


def _lines(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _ppl_ratio(arm: Arm, bound: float | None) -> Value:
    if arm.role == "baseline":
        return _none()
    if arm.divergence is None:
        return _missing()
    ppl = arm.divergence.ppl
    write = partial(wording.number, near=bound)
    return Value(write(ppl.estimate), wording.span(ppl.low, ppl.high, write))


def _ppl(arm: Arm, report: Report) -> Value:
    known = [candidate.divergence.ppl for candidate in report.candidates if candidate.divergence]
    alike = len({ppl.positions for ppl in known}) == 1
    if arm.role == "baseline":
        if known and not alike:  # a pruned arm is compared at the end of each context only
            return Value("", "beside each arm's", tone="muted")
        return Value(wording.number(known[0].ppl_baseline)) if known else _missing()
    if arm.divergence is None:
        return _missing()
    ppl = arm.divergence.ppl
    against = "" if alike else f"baseline's {wording.number(ppl.ppl_baseline)}"
    return Value(wording.number(ppl.ppl_candidate), _lines(against, wording.count(ppl.positions, "position")))


def _mean(arm: Arm, mean: Mean | None, write: Callable[[float], str]) -> Value:
    if arm.role == "baseline":
        return _none()
    if mean is None:
        return _missing()
    span = wording.span(mean.low, mean.high, write)
    return Value(write(mean.estimate), _lines(span, wording.count(mean.positions, "position")))


def _kl(arm: Arm, bound: float | None) -> Value:
    return _mean(arm, arm.divergence.kl if arm.divergence else None, partial(wording.nats, near=bound))


def _top1(arm: Arm, bound: float | None) -> Value:
    return _mean(arm, arm.divergence.top1 if arm.divergence else None, partial(wording.percent, near=bound))


def _rate(rate: Rate | None) -> Value:
    return Value(wording.rate(rate.tokens_per_s)) if rate else _missing()


def _peak(arm: Arm) -> Value:
    if arm.peak_bytes is None or arm.footprint is None:
        return _missing()
    return Value(format_bytes(arm.peak_bytes), f"weights {format_bytes(arm.footprint.weights_bytes)}")


def retention_table(report: Report) -> Table:
    """Retention over length, a column for each candidate; the baseline's own score stands first."""
    kept = [row for arm in report.candidates for row in arm.by_length]
    bases = {(row.retention.clustered, row.retention.contexts) for row in kept}
    lengths = sorted({row.length for row in kept})
    rows = [(_length_label(report, length), _retention_row(report, length, len(bases) > 1)) for length in lengths]
    columns = ("Length", *(arm.name for arm in report.arms))
    note = f"The baseline's column is its score. Under an estimate: its {report.confidence * 100:g} % interval"
    for clustered, contexts in bases if len(bases) == 1 else ():
        note += f", over {'' if clustered else 'the questions in '}{wording.count(contexts, 'context')}"
    return Table("Recall retention by length", columns, tuple(rows), f"{note}.", by_arm=True)


def _length_label(report: Report, length: int) -> str:
    return format_tokens(length) + (" (deployed)" if length == report.deployed_tokens else "")


def _retention_row(report: Report, length: int, with_basis: bool) -> tuple[Value, ...]:
    known = [kept for arm in report.candidates if (kept := arm.retention_at(length))]
    first = known[0]
    baseline = Value(wording.tally(first.baseline_score * first.questions, first.questions))
    values = [_retention(arm, arm.retention_at(length), report.margin, with_basis) for arm in report.candidates]
    return (baseline, *values)
