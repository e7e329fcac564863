"""The one place that knows what transformers calls the cache: renamed from ``past_key_values`` to ``cache`` in 5.24."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """Name of the keyword under which ``model.forward`` takes its cache.

    5.24 still accepts the old name through a decorator that hides the signature, so the new name is looked for
    behind it.
    """
    return "cache" if "cache" in inspect.signature(inspect.unwrap(model.forward)).parameters else "past_key_values"
