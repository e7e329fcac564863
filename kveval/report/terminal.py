"""The report for a terminal: compact, coloured on request, plain text otherwise."""

from __future__ import annotations

import io
import shutil
from typing import TYPE_CHECKING

from kveval.report import cells, reasons, records, tables, wording
from kveval.report.wording import visible
from kveval.units import format_tokens

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    from kveval.report.model import Cell, Grid, LostAnswer, Report
    from kveval.report.tables import Table, Value

PLAIN_WIDTH = 100  # where the output is no terminal and says nothing about its width
_NARROWEST = 40
_LOSSES = 8  # cells of a grid whose loss is told in words; the shade and the number tell all
_TONES = {
    "PASS": "bold green",
    "FAIL": "bold red",
    "INVALID": "bold magenta",
    "INCONCLUSIVE": "bold yellow",
    "passed": "green",
    "failed": "bold red",
    "not checked": "yellow",
    "muted": "dim",
}
# Background of a cell by the share of the baseline's score that was lost: lightness alone tells the order.
_HEAT = (
    (0.0, ""),
    (0.05, "black on #fee6ce"),
    (0.25, "black on #fdae6b"),
    (0.5, "black on #f16913"),
    (1.0, "bright_white on #7f2704"),
)


def render(report: Report, *, width: int | None = None, color: bool = False) -> str:
    """The report as text of at most ``width`` columns (the terminal's own when None).

    Without ``color`` there is no escape sequence in it and no cell is cut short.
    """
    from rich.console import Console

    width = max(_NARROWEST, width or shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns)
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="truecolor" if color else None,
        no_color=not color,
        markup=False,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    _Writer(console, report, color).write()
    return "\n".join(line.rstrip() for line in out.getvalue().split("\n"))


class _Writer:
    """One report on one console."""

    def __init__(self, console: Console, report: Report, color: bool) -> None:
        self.console, self.report, self.color = console, report, color

    def write(self) -> None:
        report = self.report
        self._verdict()
        for table in tables.main_tables(report):
            self._table(table)
        self._table(tables.retention_table(report))
        tasks = len({grid.task for grid in report.grids})
        for grid in report.grids if tasks == 1 else ():
            self._grid(grid)
        if tasks > 1:
            self._line("")
            self._line(f"Length x depth of each of the {tasks} tasks: kveval report ... --format html", "dim")
        self._rules()
        self._table(reasons.checks_table(report))
        self._heading("Not measured")
        for line in report.not_measured:
            self._line(f"- {line}", indent=2)
        self._table(records.reading_table(report))
        self._facts()
        for arm in report.candidates:
            self._lost(arm.name, arm.lost_answers, arm.lost_examples)

    def _verdict(self) -> None:
        from rich.text import Text

        self._line(self.report.question, "bold")
        self._line(self.report.setting, "dim")
        self._line("")
        for outcome, sentence in reasons.sentences(self.report):
            self.console.print(Text.assemble((outcome, _TONES[outcome]), ": ", visible(sentence)))
        self._line(f"Policy: {self.report.verdict.policy}", "dim")
        if self.report.notice:
            self._line("")
            self._line(self.report.notice, "yellow")

    def _heading(self, text: str) -> None:
        self._line("")
        self._line(text, "bold")

    def _line(self, text: str, style: str = "", indent: int = 0) -> None:
        """One paragraph of foreign or own text, folded at the console's width; lines after the first are indented."""
        from rich.text import Text

        lines = Text(visible(text), style=style).wrap(self.console, self.console.width - indent) if text else [Text("")]
        for number, line in enumerate(lines):
            self.console.print(Text(" " * (indent if number else 0)).append_text(line))

    def _table(self, table: Table) -> None:
        if not table.rows:
            return
        self._heading(table.title)
        for number, part in enumerate(self._parts(table)):
            if number:
                self._line("")
            self.console.print(self._rich(part))
        if table.note:
            self._line(table.note, "dim")

    def _parts(self, table: Table) -> list[Table]:
        """``table`` whole where it fits; one with a column for each arm is cut between arms, its baseline repeated."""
        if not table.by_arm:
            return [table]
        label = min(max(_widest(name) for name, _ in table.rows), max(16, self.console.width // 3))
        widths = [
            max(_widest(name), *(_widest(f"{row[column].text}\n{row[column].detail}") for _, row in table.rows))
            for column, name in enumerate(table.columns[1:])
        ]
        parts, chosen, room = [], [0], self.console.width - label - widths[0] - 5
        for column in range(1, len(widths)):
            if len(chosen) > 1 and sum(widths[i] + 3 for i in chosen[1:]) + widths[column] > room:
                parts.append(chosen)
                chosen = [0]
            chosen = [*chosen, column]
        return [_columns(table, part) for part in [*parts, chosen]]

    def _rich(self, table: Table) -> RichTable:
        from rich.table import Table as RichTable
        from rich.text import Text

        rich = RichTable(box=self._box(), pad_edge=False, show_edge=False, header_style="bold")
        for number, name in enumerate(table.columns):
            right = table.by_arm and number
            rich.add_column(Text(visible(name)), overflow="fold", justify="right" if right else "left")
        for label, values in table.rows:
            rich.add_row(Text(visible(label)), *(self._value(value) for value in values))
        return rich

    def _value(self, value: Value) -> Text:
        from rich.text import Text

        text = Text(visible(value.text), style=_TONES.get(value.tone, ""))
        for line in value.detail.split("\n") if value.detail else []:
            text.append("\n").append(visible(line), style="dim")
        return text

    def _box(self) -> Box:
        from rich.box import SIMPLE_HEAD, Box

        plain = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
        return SIMPLE_HEAD if self.color else plain

    def _grid(self, grid: Grid) -> None:
        from rich.table import Table as RichTable
        from rich.text import Text

        baseline = grid.arm == self.report.baseline.name
        self._heading(f"{grid.arm}: {grid.task}, length x depth in %")
        texts = [[cells.cell_text(cell, baseline=baseline) for cell in row] for row in grid.cells]
        cell_width = max([4, *(len(text) for row in texts for text in row)])
        label_width = max(len(format_tokens(length)) for length in grid.lengths) if grid.lengths else 6
        at_once = max(1, (self.console.width - label_width) // (cell_width + 1))
        for first in range(0, len(grid.depths), at_once):
            rich = RichTable(box=self._box(), show_edge=False, header_style="bold", padding=0)
            rich.add_column("", min_width=label_width)
            columns = range(first, min(first + at_once, len(grid.depths)))
            for column in columns:
                rich.add_column(f"{grid.depths[column] * 100:g}", justify="right", min_width=cell_width, no_wrap=True)
            for length, row, shown in zip(grid.lengths, grid.cells, texts, strict=True):
                styled = (Text(shown[column], style=self._heat(row[column], baseline)) for column in columns)
                rich.add_row(format_tokens(length), *styled)
            self.console.print(rich)
        self._line(cells.grid_notes(grid, baseline=baseline), "dim")
        if not baseline:
            self._losses(grid)

    def _heat(self, cell: Cell | None, baseline: bool) -> str:
        if not self.color or cell is None or not cell.scored:
            return ""
        if cells.greyed(cell, baseline=baseline):
            return "dim"
        lost = cells.lost_share(cell, baseline=baseline)
        return next((style for bound, style in _HEAT if lost <= bound), "")

    def _losses(self, grid: Grid) -> None:
        told = [
            f"{format_tokens(cell.length)} at {wording.depth(cell.depth)}: {cells.loss_text(cell)}"
            for row in grid.cells
            for cell in row
            if cell is not None and cells.loss_text(cell)
        ]
        more = f"; and {wording.count(len(told) - _LOSSES, 'cell')} more" if len(told) > _LOSSES else ""
        if told:
            self._line(f"Against the baseline: {'; '.join(told[:_LOSSES])}{more}.", indent=2)

    def _rules(self) -> None:
        """The rules that count and did not pass; the other renderings list all."""
        self._heading(f"Rules of policy {self.report.verdict.policy}")
        for arm, passed, counted, unmet in reasons.counted_rules(self.report):
            self._line(f"{arm}: {passed} of {wording.count(counted, 'rule')} passed")
            for rule in unmet:
                self._line(f"- {rule.outcome}: {arm} {rule.detail}", indent=2)

    def _facts(self) -> None:
        self._heading("Where it comes from")
        for label, value in self.report.facts:
            self._line(f"{label}: {value}", indent=2)
        self._heading("To repeat it")
        self.console.print(visible(self.report.command), soft_wrap=True)  # unbroken, so that it can be copied

    def _lost(self, arm: str, lost: int, examples: tuple[LostAnswer, ...]) -> None:
        if not lost:
            return
        self._heading(f"{arm}: {wording.count(lost, 'lost answer')}, of which")
        for example in examples:
            place = f"{format_tokens(example.length)} at {wording.depth(example.depth)}, context {example.context}"
            self._line(f"- {place}: expected {_quote(example.expected)}", indent=2)
            self._line(f"  {self.report.baseline.name} {_quote(example.baseline_answer)}", indent=4)
            self._line(f"  {arm} {_quote(example.candidate_answer)}", indent=4)


def _quote(text: str) -> str:
    return f'"{text}"'


def _widest(text: str) -> int:
    return max(len(visible(line)) for line in text.split("\n"))


def _columns(table: Table, chosen: list[int]) -> Table:
    """``table`` with only the value columns ``chosen``."""
    from dataclasses import replace

    rows = tuple((label, tuple(values[column] for column in chosen)) for label, values in table.rows)
    return replace(table, columns=(table.columns[0], *(table.columns[column + 1] for column in chosen)), rows=rows)
