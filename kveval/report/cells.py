"""What stands in the cells of a length x depth grid."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kveval.report import wording

if TYPE_CHECKING:
    from kveval.report.model import Cell, Grid


def cell_text(cell: Cell | None, *, baseline: bool) -> str:
    """``15/16``; a grey dot where the baseline answers too little; nothing where nothing was scored."""
    if cell is None or not cell.scored:
        return ""
    if greyed(cell, baseline=baseline):
        return wording.GREY
    return wording.tally(cell.score, cell.scored)


def greyed(cell: Cell, *, baseline: bool) -> bool:
    """Whether a candidate's cell can show no loss. Where the baseline's score is unknown nothing is claimed."""
    return not baseline and not cell.discriminative and not math.isnan(cell.baseline_score)


def loss_text(cell: Cell | None) -> str:
    """``-1``: what a candidate lost in a cell, ``+1`` where it gained, empty where neither or not known."""
    if cell is None or not cell.scored or not cell.discriminative or math.isnan(cell.loss) or cell.loss == 0:
        return ""
    return f"{-cell.loss:+g}" if cell.loss == int(cell.loss) else f"{-cell.loss:+.2f}"


def lost_share(cell: Cell, *, baseline: bool) -> float:
    """Share of the score that is missing in a cell, 0 to 1: of the baseline's score, in its own grid of full marks."""
    full = cell.scored if baseline else cell.baseline_score
    return min(1.0, max(0.0, 1 - cell.score / full)) if full > 0 else 0.0


def grid_notes(grid: Grid, *, baseline: bool) -> str:
    """How to read a grid's cells, and whether any was lost."""
    cells = [cell for row in grid.cells for cell in row if cell and cell.scored]
    lost = sum(1 for cell in cells if loss_text(cell).startswith("-"))
    note = "Score / questions in each cell."
    if not baseline:
        note += f" {wording.count(lost, 'cell') if lost else 'No cell'} lost against the baseline."
    if not baseline and any(not cell.discriminative for cell in cells):
        note += f" {wording.GREY}: the baseline answers too little here for a loss to show."
    return note
