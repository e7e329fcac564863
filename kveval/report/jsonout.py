"""The report as JSON: everything in the data model, nothing rounded. report.schema.json describes it."""

from __future__ import annotations

import dataclasses
import json
import math
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kveval.report.model import REPORT_VERSION, Arm, Rate

if TYPE_CHECKING:
    from kveval.report.model import Report


def render(report: Report) -> str:
    """The report as a JSON document in ASCII. A number that cannot be computed, or is infinite, is null."""
    document = {"format": "kveval-report", "version": REPORT_VERSION, **plain(report)}
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    from importlib.resources import files

    document: dict[str, Any] = json.loads((files("kveval.report") / "report.schema.json").read_text(encoding="utf-8"))
    return document


def plain(value: Any) -> Any:
    """``value`` as JSON types: dataclasses become objects, NaN and infinities null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, (str, Path)):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in _fields(value).items()}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"no JSON form for {type(value).__name__}")


def _fields(value: Any) -> dict[str, Any]:
    """The fields, and the derived values that the other renderings show."""
    found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Rate):
        found["tokens_per_s"] = value.tokens_per_s
    if isinstance(value, Arm):
        found |= {"footprint": value.footprint, "peak_bytes": value.peak_bytes}
    return found
