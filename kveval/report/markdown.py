"""The report as Markdown for a pull request (GitHub's dialect)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kveval.report import cells, reasons, records, tables, wording
from kveval.report.wording import visible
from kveval.units import format_tokens

if TYPE_CHECKING:
    from kveval.report.model import Arm, Grid, Report
    from kveval.report.tables import Table, Value

_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_MARKS = re.compile(r"([\\`*_\[\]|~$])")  # with a backslash before it, each of these is itself and no markup
_REFERENCE = re.compile("[@#]")  # GitHub makes a mention or an issue of these, escaped or not, unless they stand apart
_BARE_LINK = re.compile(r"(?i)\b(https?|ftp|mailto):|\bwww\.")


def escape(text: str) -> str:
    """``text`` so that Markdown shows exactly that: no markup, HTML, table cell, mention or link comes of it.

    Not for the start of a line, where a dash or a number would begin a list.
    """
    shown = "".join(_HTML.get(character, character) for character in visible(text))
    shown = _REFERENCE.sub(r"<span>\g<0></span>", _MARKS.sub(r"\\\1", shown))
    return _BARE_LINK.sub(lambda match: match[0][:-1] + ("&#58;" if match[0].endswith(":") else "&#46;"), shown)


def render(report: Report) -> str:
    """The report as Markdown. Everything that came from a model, a config or a command is escaped."""
    parts = _head(report)
    for table in (*tables.main_tables(report), tables.retention_table(report)):
        parts += _table(table)
    for grid in report.grids:
        parts += _grid(grid, baseline=grid.arm == report.baseline.name)
    parts += ["## Why", *_why(report), *_folded(reasons.rules_table(report))]
    parts += _table(reasons.checks_table(report))
    parts += ["## Not measured", "\n".join(f"- {escape(line)}" for line in report.not_measured)]
    parts += _table(records.reading_table(report))
    for table in (records.memory_table(report), records.speed_table(report), records.contexts_table(report)):
        parts += _folded(table)
    facts = "\n".join(f"- {escape(label)}: {escape(value)}" for label, value in report.facts)
    parts += ["## Where it comes from", facts]
    parts += ["## To repeat it", _code(report.command)]
    for arm in report.candidates:
        parts += _lost(arm, report.baseline.name)
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: Report) -> list[str]:
    (outcome, sentence), *others = reasons.sentences(report)
    lines = [f"# {escape(report.question)}", f"Run: {escape(report.setting)}", f"**{outcome}** {escape(sentence)}"]
    lines.append("\n".join(f"- **{told}** {escape(text)}" for told, text in others))
    lines.append(f"Policy: {escape(report.verdict.policy)}")
    if report.notice:
        lines.append(f"> **Note:** {escape(report.notice)}")
    return lines


def _rows(table: Table) -> str:
    align = "---:" if table.by_arm else "---"
    body = [[escape(label), *(_value(value) for value in values)] for label, values in table.rows]
    return _lines([escape(name) for name in table.columns], align, body)


def _why(report: Report) -> list[str]:
    lines = []
    for arm, passed, counted, unmet in reasons.counted_rules(report):
        lines.append(f"- {escape(arm)}: {passed} of {wording.count(counted, 'rule')} passed")
        lines += [f"  - **{rule.outcome}** {escape(rule.detail)}" for rule in unmet]
    return ["\n".join(lines)]


def _lines(header: list[str], align: str, body: list[list[str]]) -> str:
    """A table of cells that are escaped already; the first column is on the left."""
    lines = [header, ["---", *(align for _ in header[1:])], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _value(value: Value) -> str:
    details = [f"<sub>{escape(line)}</sub>" for line in value.detail.split("\n") if line]
    return "<br>".join([escape(value.text), *details])


def _table(table: Table) -> list[str]:
    if not table.rows:
        return []
    return [f"## {escape(table.title)}", _rows(table), escape(table.note)]


def _folded(table: Table) -> list[str]:
    """A table that most readers skip."""
    if not table.rows:
        return []
    return [f"<details><summary>{escape(table.title)}</summary>", _rows(table), escape(table.note), "</details>"]


def _grid(grid: Grid, *, baseline: bool) -> list[str]:
    header = ["Length", *(wording.depth(depth) for depth in grid.depths)]
    rows = []
    for length, row in zip(grid.lengths, grid.cells, strict=True):
        texts = [cells.cell_text(cell, baseline=baseline) for cell in row]
        losses = ["" if baseline else cells.loss_text(cell) for cell in row]
        shown = [f"{text} ({loss})" if loss else text for text, loss in zip(texts, losses, strict=True)]
        rows.append([format_tokens(length), *shown])
    note = cells.grid_notes(grid, baseline=baseline)
    if not baseline and any(cells.loss_text(cell) for row in grid.cells for cell in row):
        note += " In brackets: the difference from the baseline."
    title = f"## {escape(grid.arm)}: {escape(grid.task)}, length x depth"
    return [title, _lines(header, "---:", rows), note]


def _lost(arm: Arm, baseline: str) -> list[str]:
    if not arm.lost_answers:
        return []
    rows = [
        [
            format_tokens(example.length),
            wording.depth(example.depth),
            str(example.context),
            *(escape(text) for text in (example.expected, example.baseline_answer, example.candidate_answer)),
        ]
        for example in arm.lost_examples
    ]
    header = ["Length", "Depth", "Context", "Expected", escape(baseline), escape(arm.name)]
    title = f"## {escape(arm.name)}: {wording.count(arm.lost_answers, 'lost answer')}, of which"
    return [title, _lines(header, "---", rows)]


def _code(text: str) -> str:
    """A fenced block; the fence is longer than any run of backticks in ``text``."""
    shown = visible(text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    return f"{fence}\n{shown}\n{fence}"
