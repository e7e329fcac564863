"""What the lm-eval tasks in tasks/shared call: RULER's tasks by the shared protocol, many questions about each context.

A context is built for all tasks of its kind, whichever of them are asked: a question is the same in any subset.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from kveval import lmtasks
from kveval.errors import EvidenceError, KvevalError
from kveval.samples.haystack import haystack
from kveval.samples.ruler.registry import FAMILIES
from kveval.samples.ruler.score import score
from kveval.samples.shared.alone import build_alone
from kveval.samples.shared.context import Question, SharedContext
from kveval.samples.shared.documents import DOCUMENT_TASKS, build_documents
from kveval.samples.shared.prose import HARD_TASKS, PROSE_TASKS, REPEAT_TASKS, build_prose
from kveval.samples.shared.stream import STREAMS, build_needles
from kveval.units import parse_tokens

PROTOCOL = "shared"
PREFIX = "kveval_shared_"
QUESTIONS = 2  # of each task, in each context, at each length
MOST_GENERATED = 128  # max_gen_toks in tasks/shared/_shared; lm-eval cuts a prompt that leaves the model less room
# Kind of context -> the tasks that it serves. A task in none of them has contexts of its own, one for each length.
KINDS: dict[str, tuple[str, ...]] = {
    "prose": PROSE_TASKS,
    "hard": HARD_TASKS,
    "repeat": REPEAT_TASKS,
    **{task: (task,) for task in STREAMS},
    "documents": tuple(DOCUMENT_TASKS),
}
NESTED = {task for tasks in KINDS.values() for task in tasks}
TASKS = tuple(name for name in FAMILIES if name not in ("qa_1", "qa_2"))  # those that need nobody's data


@dataclass(frozen=True)
class Settings:
    """A task's metadata, checked, with defaults filled in; tasks/shared/_shared explains it."""

    lengths: tuple[int, ...] = (4096,)
    contexts: int = 4
    questions: int = QUESTIONS
    seed: int = 0
    haystack: str = "auto"
    alone_lengths: tuple[int, ...] | None = None

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Settings:
        """Settings from lm-eval's metadata, which also holds the model's arguments.

        Raises KvevalError for values that are not usable and for a key that looks like a misspelt one.
        """
        known = {field.name for field in fields(cls)}
        for key in set(metadata) - known - {"tokenizer", "pretrained", "model"}:
            if meant := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
                raise KvevalError(f"metadata key '{key}' is not known: did you mean '{meant[0]}'?")
        settings = cls(**{key: value for key, value in metadata.items() if key in known and value is not None})
        for name, least in (("contexts", 1), ("questions", 1), ("seed", None)):
            lmtasks.require_whole(name, getattr(settings, name), least)
        lengths = _lengths(settings.lengths)
        alone = lengths if settings.alone_lengths is None else _lengths(settings.alone_lengths)
        settings = replace(settings, lengths=lengths, alone_lengths=alone)
        if settings.haystack == "auto":
            settings = replace(settings, haystack="noise" if lmtasks.is_instrument(metadata) else "pydoc")
        return settings


def questions(task: str) -> int:
    """Questions of ``task`` at a length in a context, by default: one where a text serves one question."""
    return QUESTIONS if task in NESTED else 1


def shared(family: str, **metadata: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: split -> datasets.Dataset, one small document for each question of ``family``.

    Raises KvevalError when the metadata is not usable, no tokenizer is named, or the model would not get whole prompts.
    """
    from datasets import Dataset  # type: ignore[import-untyped]

    name = lmtasks.require_tokenizer_name(metadata)
    settings = Settings.of(metadata)
    lmtasks.refuse_short_model(metadata, settings.lengths[-1], MOST_GENERATED)
    plan = json.dumps({"tokenizer": name, **asdict(settings)})
    return {"test": Dataset.from_list(list(_rows(family, name, settings, plan)))}


def _rows(family: str, tokenizer: str, settings: Settings, plan: str) -> Iterator[dict[str, Any]]:
    for slot in slots([family], settings):
        for question in _built(tokenizer, settings, slot).questions:
            if question.task == family:
                yield {
                    "task": family,
                    "slot": json.dumps(slot),
                    "context": question.context,
                    "length": question.length,
                    "depth": question.depth,
                    "number": question.number,
                    "expected": [list(group) for group in question.expected],
                    "any_of": question.any_of,
                    "plan": plan,
                }


def slots(tasks: Sequence[str], settings: Settings) -> list[tuple[str, int, int]]:
    """(kind or task, context, length) of each context that ``tasks`` need; length 0: all of them, nested."""
    found = []
    for context in range(settings.contexts):
        found += [(kind, context, 0) for kind, served in KINDS.items() if set(served) & set(tasks)]
        alone = [task for task in tasks if task not in NESTED]
        found += [(task, context, length) for task in alone for length in settings.alone_lengths or ()]
    return found


def contexts_of(tokenizer: str, tasks: Sequence[str], metadata: Mapping[str, Any]) -> list[SharedContext]:
    """The contexts of ``tasks``, and in each the questions of these tasks alone. The same objects for equal settings."""
    settings = Settings.of(metadata)
    return [_only(_built(tokenizer, settings, slot), tuple(tasks)) for slot in slots(tasks, settings)]


def _only(context: SharedContext, tasks: tuple[str, ...]) -> SharedContext:
    return replace(context, questions=tuple(question for question in context.questions if question.task in tasks))


def question_of(doc: Mapping[str, Any]) -> tuple[SharedContext, Question]:
    """The context and the question that a document of the task names."""
    values = json.loads(doc["plan"])
    name = values.pop("tokenizer")
    kind, number, length = json.loads(doc["slot"])
    context = _built(name, Settings.of(values), (kind, int(number), int(length)))
    for question in context.questions:
        if (question.task, question.length, question.number) == (doc["task"], doc["length"], doc["number"]):
            return context, question
    raise EvidenceError(f"context {doc['slot']} has no question {doc['number']} of {doc['task']} at {doc['length']}")


def doc_to_text(doc: Mapping[str, Any]) -> str:
    """The whole prompt."""
    context, question = question_of(doc)
    return context.text(question)


def doc_to_target(doc: Mapping[str, Any]) -> str:
    """What is expected, for people to read."""
    return ", ".join(group[0] for group in doc["expected"])


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """``score``: the share of what is expected that is in the answer; and what its clustered error is made of."""
    value = score(doc["expected"], results[0], any_of=doc["any_of"])
    return {"score": value, "score_stderr": (doc["context"], value)}


@lru_cache(maxsize=256)
def _built(tokenizer: str, settings: Settings, slot: tuple[str, int, int]) -> SharedContext:
    kind, context, length = slot
    loaded = _tokenizer(tokenizer)
    asked: dict[str, Any] = {"seed": settings.seed, "context": context}
    if length:
        return build_alone(loaded, FAMILIES[kind], length=length, **asked)
    asked |= {"lengths": settings.lengths, "per_task": settings.questions}
    if kind in ("prose", "hard", "repeat"):
        source = haystack("repeat" if kind == "repeat" else settings.haystack)
        return build_prose(loaded, KINDS[kind], source, **asked)
    if kind == "documents":
        return build_documents(loaded, KINDS[kind], **asked)
    return build_needles(loaded, kind, **asked)


@lru_cache(maxsize=8)
def _tokenizer(name: str) -> Any:
    return lmtasks.load_tokenizer(name)


def _lengths(values: Any) -> tuple[int, ...]:
    listed = list(values) if isinstance(values, (list, tuple)) else [values]
    found = [parse_tokens(value) if isinstance(value, str) else value for value in listed]
    for value in found:
        lmtasks.require_whole("length", value, 1)
    if not found:
        raise KvevalError("lengths are empty: give one or more, for instance [4096]")
    return tuple(sorted(set(found)))
