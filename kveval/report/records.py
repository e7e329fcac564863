"""What was computed to get the numbers: tokens read, documents, the memory and speed of every stretch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kveval.report import wording
from kveval.report.tables import Table, Value, by_arm

if TYPE_CHECKING:
    from kveval.report.model import Footprint, Report, Speed


def reading_table(report: Report) -> Table:
    """What was computed to get the numbers: each context is read once for each arm."""
    return by_arm(report, "What was read", [
        ("Tokens read", lambda arm: Value(f"{arm.read_tokens:,}")),
        ("... relative to the contexts' lengths", lambda arm: Value(_ratio(arm.read_ratio))),
        ("Tokens to ask the questions", lambda arm: Value(f"{arm.question_tokens:,}")),
        ("Questions asked", lambda arm: Value(f"{arm.asked:,}")),
        ("Questions scored", lambda arm: Value(f"{arm.scored:,}")),
    ])  # fmt: skip


def _ratio(value: float) -> str:
    return f"{value:.3f}x" if math.isfinite(value) else wording.UNDEFINED


def contexts_table(report: Report) -> Table:
    """The documents, by hash."""
    rows = [
        (str(entry["context"]), (Value(f"{entry['tokens']:,}"), Value(str(entry["sha256"]))))
        for entry in report.plan["experiment"]["contexts"]
    ]
    return Table("Contexts", ("Context", "Tokens", "sha256"), tuple(rows))


def memory_table(report: Report) -> Table:
    """Bytes of every reading."""
    rows = [
        (arm.name, (Value(str(row.context)), Value(f"{row.tokens:,}"), *(Value(f"{size:,}") for size in _sizes(row))))
        for arm in report.arms
        for row in arm.footprints
    ]
    columns = ("Arm", "Context", "Tokens", "Predicted", "Stored", "Reserved", "Weights", "Peak", "Before reading")
    note = "Predicted, stored and reserved are the KV cache."
    return Table("Memory of each reading, bytes", columns, tuple(rows), note)


def _sizes(row: Footprint) -> tuple[int, ...]:
    return row.predicted_bytes, row.stored_bytes, row.reserved_bytes, row.weights_bytes, row.peak_bytes, row.start_bytes


def speed_table(report: Report) -> Table:
    """Every phase at every length."""
    rows = [
        (
            arm.name,
            tuple(map(Value, (row.phase, f"{row.length:,}", f"{row.tokens:,}", f"{row.seconds:.2f}", _speed(row)))),
        )
        for arm in report.arms
        for row in arm.speeds
    ]
    columns = ("Arm", "Phase", "Tokens in the cache", "Tokens computed", "Seconds", "Tokens/s")
    return Table("Speed of each phase", columns, tuple(rows))


def _speed(row: Speed) -> str:
    return wording.rate(row.tokens / row.seconds) if row.seconds > 0 else wording.UNDEFINED
