"""What every engine shares: prompts that share a context, the length guard, and where answers are kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kveval.errors import KvevalError


@dataclass(frozen=True)
class Prompt:
    """A question: the first ``prefix`` tokens of a context, then ``tail``; answered greedily until a stop or ``max_tokens``."""

    context: Sequence[int] | np.ndarray = field(repr=False)
    prefix: int
    tail: tuple[int, ...]
    until: tuple[str, ...] = ()
    max_tokens: int = 32

    @property
    def tokens(self) -> int:
        """Prompt tokens, without those generated."""
        return self.prefix + len(self.tail)

    @property
    def sha256(self) -> str:
        """Hash of the prompt's token ids and of how the answer ends: what makes two questions the same question."""
        digest = hashlib.sha256(np.asarray(self.context[: self.prefix], dtype="<i4").tobytes())
        digest.update(np.asarray(self.tail, dtype="<i4").tobytes())
        digest.update(repr((self.until, self.max_tokens)).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Answer:
    """What an arm answered. ``read_tokens`` is the engine's own count of prompt tokens."""

    prompt_sha256: str
    prompt_tokens: int
    read_tokens: int
    text: str
    finish_reason: str  # stop | length | eos


class Answers(Protocol):
    """Where answers are kept, so that nothing is asked twice."""

    def get(self, prompt_sha256: str) -> Answer | None:
        """The answer to a prompt, if it was asked before."""

    def put(self, answers: Iterable[Answer]) -> None:
        """Keep answers that came together: all of them or, should the process die, none."""


class Memory:
    """Answers kept for the life of the process."""

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    def get(self, prompt_sha256: str) -> Answer | None:
        """The answer to a prompt, if it was asked before."""
        return self._answers.get(prompt_sha256)

    def put(self, answers: Iterable[Answer]) -> None:
        """Keep answers."""
        self._answers.update((answer.prompt_sha256, answer) for answer in answers)


def guard(prompts: Iterable[Prompt], limit_tokens: int) -> None:
    """Refuse prompts that do not fit, before the first is asked: a shortened prompt is never scored.

    Raises KvevalError naming the tokens needed and the limit.
    """
    for prompt in prompts:
        needed = prompt.tokens + prompt.max_tokens
        if needed > limit_tokens:
            raise KvevalError(
                f"a prompt of {prompt.tokens} tokens with {prompt.max_tokens} to generate needs {needed} positions, but the model "
                f"has {limit_tokens}: ask for a shorter context"
            )


def stop_at(text: str, until: Sequence[str]) -> tuple[str, bool]:
    """``text`` before the first stop string, and whether there was one."""
    ends = [text.find(stop) for stop in until if stop and stop in text]
    return (text[: min(ends)], True) if ends else (text, False)
