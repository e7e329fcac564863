"""The report as one HTML file: no script, no request, everything foreign escaped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kveval.report import cells, charts, reasons, records, tables, wording
from kveval.units import format_tokens

if TYPE_CHECKING:
    from kveval.report.model import Cell, Report

_STEPS = (0.0, 0.05, 0.15, 0.35, 0.65)  # lost share of a cell's score up to which a heat class reaches


def render(report: Report) -> str:
    """The report as an HTML document with its styles and drawings inside."""
    from importlib.resources import files

    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    (outcome, sentence), *others = reasons.sentences(report)
    template = environment.from_string((files("kveval.report") / "report.html.j2").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        outcome=outcome,
        sentence=sentence,
        others=others,
        summary=tables.formats_table(report),
        main=tables.main_table(report),
        retention=tables.retention_table(report),
        why=reasons.counted_rules(report),
        rules=reasons.rules_table(report),
        checks=reasons.checks_table(report),
        reading=records.reading_table(report),
        details=[records.memory_table(report), records.speed_table(report), records.contexts_table(report)],
        drawings=[chart for chart in (charts.retention_chart(report), charts.cost_chart(report)) if chart],
        geometry=charts,
        cells=cells,
        depth=wording.depth,
        count=wording.count,
        tokens=format_tokens,
        heat=_heat,
        version=report.plan["experiment"].get("versions", {}).get("kveval", ""),
    )


def _printable(value: Any) -> Any:
    """Control and direction characters of foreign text become visible; jinja2 escapes the rest."""
    from markupsafe import Markup

    return wording.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _heat(cell: Cell | None, baseline: bool) -> str:
    """CSS class of a grid cell: darker for a larger lost share."""
    if cell is None or not cell.scored:
        return "empty"
    if cells.greyed(cell, baseline=baseline):
        return "grey"
    lost = cells.lost_share(cell, baseline=baseline)
    return f"h{sum(lost > step for step in _STEPS)}"
