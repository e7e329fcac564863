"""Pruning after the prompt: of what was read, a fraction is kept while a question is answered."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kveval.errors import KvevalError

# How tokens are chosen (kveval/cache/pruning.py), and where that comes from.
METHODS = {
    "snapkv": "SnapKV, Li et al. 2024, arXiv 2404.14469",
    "tova": "TOVA, Oren et al. 2024, arXiv 2401.06104",
    "knorm": "key norms, Devoto et al. 2024, arXiv 2406.11430",
    "streaming": "the first 4 and the latest tokens, at their own positions (after StreamingLLM, arXiv 2309.17453)",
}


@dataclass(frozen=True)
class Pruning:
    """Of ``tokens`` read, ``method`` keeps ``fraction``: they alone are seen by what is asked; reading goes on with all."""

    method: str
    fraction: float

    def __post_init__(self) -> None:
        if not 0 < self.fraction < 1:
            raise KvevalError(
                f"{self.method}:{self.fraction:g} keeps no proper part of the cache: give a fraction between 0 and 1, "
                f"for instance {self.method}:0.5"
            )

    def kept(self, tokens: int) -> int:
        """Tokens left of ``tokens``."""
        return max(min(tokens, 1), int(Fraction(str(self.fraction)) * tokens))  # 0.29 of 100 is 29; in floats, 28

    @property
    def name(self) -> str:
        """``snapkv:0.5``."""
        return f"{self.method}:{self.fraction!r}"
