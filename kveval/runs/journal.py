"""The journal of a run: SQLite, one transaction for what came together, so that a killed run has lost nothing it was told."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kveval.engines.base import Answer
from kveval.errors import EngineError, KvevalError

SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    arm TEXT NOT NULL, prompt_sha256 TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, read_tokens INTEGER NOT NULL,
    text TEXT NOT NULL, finish_reason TEXT NOT NULL, PRIMARY KEY (arm, prompt_sha256)
);
CREATE TABLE IF NOT EXISTS readings (
    arm TEXT NOT NULL, context INTEGER NOT NULL, tokens INTEGER NOT NULL, predicted_bytes INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL, reserved_bytes INTEGER NOT NULL, weights_bytes INTEGER NOT NULL,
    start_bytes INTEGER NOT NULL, peak_bytes INTEGER NOT NULL,
    nll BLOB NOT NULL, kl BLOB NOT NULL, top1_agree BLOB NOT NULL, PRIMARY KEY (arm, context)
);
CREATE TABLE IF NOT EXISTS spans (
    arm TEXT NOT NULL, context INTEGER NOT NULL, phase TEXT NOT NULL, length INTEGER NOT NULL,
    tokens INTEGER NOT NULL, seconds REAL NOT NULL
);
"""
SIZES = ("tokens", "predicted_bytes", "stored_bytes", "reserved_bytes", "weights_bytes", "start_bytes", "peak_bytes")
SERIES = ("nll", "kl", "top1_agree")  # float32


class Journal:
    """What a run has been told so far. Close it; use as a context manager."""

    def __init__(self, file: Path) -> None:
        """Raises KvevalError when ``file`` is no journal or cannot be written."""
        self.file = file
        try:
            self._db = sqlite3.connect(file, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(SCHEMA)
            self._refuse_damaged()
        except sqlite3.Error as error:
            raise KvevalError(
                f"the journal '{file}' cannot be used ({error}): choose another run directory with --out"
            ) from error

    def _refuse_damaged(self) -> None:
        """Raises sqlite3.DatabaseError for pages that are broken and for tables that are not SCHEMA's."""
        found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(" ".join(found.split()))
        fresh = sqlite3.connect(":memory:")
        try:
            fresh.executescript(SCHEMA)
            for table in ("answers", "readings", "spans"):
                columns = f"PRAGMA table_info({table})"
                if self._db.execute(columns).fetchall() != fresh.execute(columns).fetchall():
                    raise sqlite3.DatabaseError(f"its table '{table}' has other columns")
        finally:
            fresh.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            with self._db:
                yield self._db
        except (
            sqlite3.OperationalError
        ) as error:  # a full or read-only disk; a doubled question is a bug and stays loud
            raise EngineError(
                f"the journal '{self.file}' cannot be written ({error}); what it holds is intact"
            ) from error

    def arm(self, name: str) -> ArmAnswers:
        """The answers of one arm."""
        return ArmAnswers(self, name)

    def get(self, arm: str, prompt_sha256: str) -> Answer | None:
        """One answer, if it was given."""
        row = self._db.execute(
            "SELECT prompt_sha256, prompt_tokens, read_tokens, text, finish_reason FROM answers WHERE arm=? AND prompt_sha256=?",
            (arm, prompt_sha256),
        ).fetchone()
        return Answer(*row) if row else None

    def put(self, arm: str, answers: Iterable[Answer]) -> None:
        """Write answers that came together. A prompt that has an answer already is an IntegrityError: it was asked twice."""
        rows = [(arm, a.prompt_sha256, a.prompt_tokens, a.read_tokens, a.text, a.finish_reason) for a in answers]
        with self._transaction() as db:
            db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)", rows)

    def has_reading(self, arm: str, context: int) -> bool:
        """Whether the whole context was read by this arm."""
        query = "SELECT 1 FROM readings WHERE arm=? AND context=?"
        return self._db.execute(query, (arm, context)).fetchone() is not None

    def nll(self, arm: str, context: int) -> np.ndarray:
        """What a reading that was put told of its context: NLL (tokens - 1,) float32, nats."""
        query = "SELECT nll FROM readings WHERE arm=? AND context=?"
        return np.frombuffer(self._db.execute(query, (arm, context)).fetchone()[0], dtype="<f4")

    def put_reading(
        self,
        arm: str,
        context: int,
        sizes: dict[str, int],
        series: dict[str, np.ndarray],
        spans: Iterable[tuple[str, int, int, float]],
    ) -> None:
        """Write a whole reading: ``sizes`` by SIZES, ``series`` by SERIES, spans as (phase, length, tokens, seconds)."""
        blobs = [np.asarray(series[name], dtype="<f4").tobytes() for name in SERIES]
        with self._transaction() as db:
            db.execute(
                f"INSERT INTO readings VALUES ({', '.join('?' * (2 + len(SIZES) + len(SERIES)))})",
                (arm, context, *(sizes[name] for name in SIZES), *blobs),
            )
            db.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", [(arm, context, *span) for span in spans])

    def readings(self, arm: str) -> list[dict[str, Any]]:
        """All readings of an arm, in order of context: SIZES as int, SERIES as float32 arrays."""
        columns = ("context", *SIZES, *SERIES)
        query = f"SELECT {', '.join(columns)} FROM readings WHERE arm=? ORDER BY context"
        rows = [dict(zip(columns, row, strict=True)) for row in self._db.execute(query, (arm,))]
        for row in rows:
            row.update((name, np.frombuffer(row[name], dtype="<f4")) for name in SERIES)
        return rows

    def spans(self) -> list[tuple[str, int, str, int, int, float]]:
        """(arm, context, phase, length, tokens, seconds), in the order measured."""
        return self._db.execute(
            "SELECT arm, context, phase, length, tokens, seconds FROM spans ORDER BY rowid"
        ).fetchall()


class ArmAnswers:
    """One arm's view of the journal, as engines keep answers (``engines.base.Answers``)."""

    def __init__(self, journal: Journal, arm: str) -> None:
        self._journal, self._arm = journal, arm

    def get(self, prompt_sha256: str) -> Answer | None:
        """The answer to a prompt, if it was asked before."""
        return self._journal.get(self._arm, prompt_sha256)

    def put(self, answers: Iterable[Answer]) -> None:
        """Keep answers that came together."""
        self._journal.put(self._arm, answers)
