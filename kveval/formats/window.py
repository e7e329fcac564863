"""window:N: StreamingLLM's attention sinks and sliding window (Xiao et al. 2024, arXiv 2309.17453).

swa:N: a plain sliding window. It is the same without sinks: recent tokens keep their distances either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from kveval.errors import KvevalError
from kveval.units import format_tokens

DEFAULT_SINKS = 4  # the paper's choice (section 3.2)


@dataclass(frozen=True)
class Window:
    """A stream keeps its first ``sinks`` tokens and its most recent ``size - sinks``; everything between is evicted for good.

    Positions are places within the cache (the paper's section 3.2): a token at t >= size - 1 sees the sinks as if
    it stood at place size - 1. Recent tokens keep their true distances.
    """

    size: int
    sinks: int = DEFAULT_SINKS

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise KvevalError(f"a window cannot have {self.sinks} sinks: give sinks=0 or more")
        if self.size <= self.sinks:
            raise KvevalError(
                f"a window of {self.size} tokens cannot hold {self.sinks} sinks and a recent token: "
                f"give a window of at least {self.sinks + 1}, or fewer sinks (window:{self.size},sinks=0)"
            )

    @property
    def recent(self) -> int:
        """Recent tokens that a stream keeps, the newest included."""
        return self.size - self.sinks

    def kept(self, tokens: int) -> int:
        """Tokens stored after ``tokens`` were read."""
        return min(tokens, self.size)

    @property
    def name(self) -> str:
        """``window:4k``, with the sinks where they are not the usual 4; without sinks it is a plain sliding window, ``swa:4k``."""
        short = format_tokens(self.size).replace(",", "")
        if self.sinks == 0:
            return f"swa:{short}"
        return f"window:{short}" + ("" if self.sinks == DEFAULT_SINKS else f",sinks={self.sinks}")
