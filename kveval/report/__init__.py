"""A finished run as a report: ``data.build`` computes it from the rows, ``render`` writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kveval.errors import KvevalError

if TYPE_CHECKING:
    from kveval.report.model import Report

FORMATS = ("terminal", "md", "html", "json")


def render(report: Report, format: str) -> str:
    """``report`` as ``terminal`` (plain text), ``md``, ``html`` or ``json``.

    Raises KvevalError for any other format.
    """
    from kveval.report import html, jsonout, markdown, terminal

    renderers = {"terminal": terminal.render, "md": markdown.render, "html": html.render, "json": jsonout.render}
    if format not in renderers:
        raise KvevalError(f"'{format}' is not a report format: use one of {', '.join(FORMATS)}")
    return renderers[format](report)
