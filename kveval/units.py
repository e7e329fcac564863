"""Token counts and byte counts as people write and read them."""

from __future__ import annotations

import re

from kveval.errors import KvevalError

KIB, MIB, GIB = 1024, 1024**2, 1024**3
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)(k|m)?", re.IGNORECASE)
MOST_TOKENS = 2**40  # larger counts are slips, and would overflow tensors of positions
_SCALE = {"": 1, "k": 1024, "m": 1024**2}


def parse_tokens(text: str) -> int:
    """Token count of ``text``: ``128k`` is 131,072, ``128000`` is 128,000, ``1m`` is 1,048,576.

    Raises KvevalError when it is not a positive whole number of tokens, or more than MOST_TOKENS.
    """
    match = _TOKENS.fullmatch(text.strip().replace(",", "").replace("_", ""))
    count = float(match[1]) * _SCALE[(match[2] or "").lower()] if match else 0.0
    if count < 1 or count != int(count):
        raise KvevalError(f"'{text}' is not a number of tokens: write it as 131072 or 128k (128 x 1,024), at least 1")
    if count > MOST_TOKENS:
        raise KvevalError(f"'{text}' is more tokens than any model reads: give {MOST_TOKENS} at most")
    return int(count)


def format_tokens(count: int) -> str:
    """``131072`` as ``128k``, ``128000`` as ``128,000``: the short form only where it is exact."""
    return f"{count // 1024}k" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


def format_bytes(count: float) -> str:
    """Bytes with a binary unit: 320 KiB, 40.000 GiB."""
    if count >= GIB:
        return f"{count / GIB:.3f} GiB"
    if count >= MIB:
        return f"{count / MIB:.1f} MiB"
    if count >= 10 * KIB:
        return f"{count / KIB:g} KiB" if count % KIB == 0 else f"{count / KIB:.1f} KiB"
    return f"{count:,.0f} B"
