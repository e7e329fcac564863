"""What can go wrong, by who can mend it. Only ``kveval.cli`` turns these into messages and exit codes."""

from __future__ import annotations


class KvevalError(Exception):
    """A mistake in what was asked for: names the bad value, what is accepted and the next step. Exit code 2."""

    exit_code = 2


class EvidenceError(KvevalError):
    """The rows cannot bear a verdict (unpaired arms, a shortened prompt, a format that did not engage). Exit code 4."""

    exit_code = 4


class EngineError(KvevalError):
    """The engine or the machine failed (out of memory, a server that went away, NaN logits). Exit code 5."""

    exit_code = 5
