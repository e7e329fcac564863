"""Where the files that ship with kveval lie: tasks/ and configs/, in a checkout as in an installed wheel."""

from __future__ import annotations

from pathlib import Path

from kveval.errors import KvevalError

PACKAGE = Path(__file__).resolve().parent


def data_path(*parts: str) -> Path:
    """Path of a shipped file or directory, for instance ``data_path("configs", "models")``.

    A wheel holds them in ``kveval/_data``; an editable install reads the checkout beside the package.
    Raises KvevalError when it is in neither place.
    """
    for root in (PACKAGE / "_data", PACKAGE.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise KvevalError(f"kveval's own file '{'/'.join(parts)}' is missing: install kveval again")
