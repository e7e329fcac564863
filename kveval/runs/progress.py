"""Progress of a run on stderr: a live line on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

PLAIN_EVERY_S = 20.0  # between plain lines


@dataclass(frozen=True)
class Work:
    """One reading that is still to be done."""

    arm: str
    context: int
    tokens: int
    questions: int
    window: int | None = None

    def cost(self, tokens: int, turn: float) -> float:
        """Cost of the first ``tokens`` of this reading: a token costs ``turn`` and one for each token that it attends to."""
        grown = min(tokens, self.window or tokens)
        return tokens * turn + grown * grown / 2 + (tokens - grown) * grown


class Progress:
    """Where a run stands: tokens read, questions asked, time left."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, turn: float = 4096.0) -> None:
        """``turn``: what a token costs apart from attention, in tokens attended to (weights against attention work)."""
        self._quiet, self.turn = quiet, turn
        self._console = Console(file=stream or sys.stderr, highlight=False)
        self._live: Live | None = None
        self._works: Sequence[Work] = ()
        self._begun = self._told = 0.0
        self._done: list[Work] = []
        self._now: _Now | None = None

    def note(self, text: str) -> None:
        """Say something once."""
        if not self._quiet:
            self._console.print(Text(text))

    @contextmanager
    def over(self, works: Sequence[Work]) -> Iterator[None]:
        """Show progress over ``works`` while they are done."""
        self._works, self._begun, self._told, self._done = works, time.monotonic(), 0.0, []
        if self._quiet or not self._console.is_terminal:
            yield
            return
        with Live(
            console=self._console, get_renderable=lambda: Text(self.line()), refresh_per_second=4, transient=True
        ) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    @contextmanager
    def reading(self, arm: str, context: int) -> Iterator[_Now]:
        """The reading at hand; yields what the engine tells (``engines.transformers.Watch``)."""
        work = next(one for one in self._works if (one.arm, one.context) == (arm, context))
        self._now = _Now(self, work)
        yield self._now
        self._done.append(work)
        self._now = None
        self.tell()

    def tell(self) -> None:
        """Print a plain line when it is time."""
        if self._quiet or self._live is not None or time.monotonic() - self._told < PLAIN_EVERY_S:
            return
        self._told = time.monotonic()
        self._console.print(Text(self.line()), soft_wrap=True)

    def line(self) -> str:
        """The state in one line."""
        now = self._now
        tokens = sum(work.tokens for work in self._done) + (now.tokens if now else 0)
        questions = sum(work.questions for work in self._done) + (now.questions if now else 0)
        all_tokens, all_questions = (
            sum(getattr(work, name) for work in self._works) for name in ("tokens", "questions")
        )
        at = f"{now.work.arm}, context {now.work.context}: " if now else ""
        return f"{at}{tokens:,} of {all_tokens:,} tokens read, {questions:,} of {all_questions:,} questions asked, {self._left()}"

    def _left(self) -> str:
        now = self._now
        done = sum(work.cost(work.tokens, self.turn) for work in self._done)
        done += now.work.cost(now.tokens, self.turn) if now else 0.0
        whole = sum(work.cost(work.tokens, self.turn) for work in self._works)
        elapsed = time.monotonic() - self._begun
        if done == 0 or elapsed < 1:
            return "time left unknown yet"
        seconds = int(elapsed * (whole - done) / done)
        return f"about {seconds // 60}:{seconds % 60:02d} left"


class _Now:
    """The reading at hand, as the engine tells of it."""

    def __init__(self, progress: Progress, work: Work) -> None:
        self.progress, self.work = progress, work
        self.tokens = self.questions = 0

    def read(self, tokens: int) -> None:
        """``tokens`` more of the context were read."""
        self.tokens += tokens
        self.progress.tell()

    def asked(self, questions: int) -> None:
        """``questions`` more were answered."""
        self.questions += questions
        self.progress.tell()
