"""A context of generated documents, any of which may be asked about: question answering in one hop and in two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from kveval.samples.encoded import encode
from kveval.samples.ruler.documents import Fact, world
from kveval.samples.ruler.qa import HEADER, QUESTION
from kveval.samples.shared.context import Asking, Origin, SharedContext, crowded
from kveval.samples.shared.stream import Sentences, build_stream

DOCUMENT_TASKS = {"qa_synthetic_1": 1, "qa_synthetic_2": 2}  # task -> hops
_MEASURED = 12  # documents tokenised to learn how long one is
_MORE = 1.2  # so many times the documents that are expected to fit


def build_documents(
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    seed: int,
    context: int,
    lengths: Sequence[int],
    per_task: int,
    reserve_tokens: int = 0,
) -> SharedContext:
    """Context number ``context`` of generated documents: ``per_task`` questions of each of ``tasks`` at each length.

    A question of two hops is about documents of one block: those that come with one length. The same arguments give the
    same context in any process and order. Raises KvevalError when a length is too short.
    """
    name = f"{seed}:shared:documents:{context}"
    few = [_text(number, document.text) for number, document in enumerate(world(Random("measure"), _MEASURED))]
    size = sum(len(text) for text in encode(tokenizer, few)) / _MEASURED
    edges = [0, *(3 * int(length / size / 3) for length in sorted(lengths)[:-1])]
    count = 3 * (int(_MORE * max(lengths) / size / 3) + 2)
    documents = world(Random(name), count, [end - begin for begin, end in pairwise(edges)])

    def asking(task: str, length: int, depth: float, inside: int) -> Asking:
        wanted = round(depth * (inside - 1))
        facts = [fact for document in documents[:inside] for fact in document.facts]
        known = [fact for fact in facts if len(fact.documents) == DOCUMENT_TASKS[task] and max(fact.documents) < inside]
        if not known:
            raise crowded(length)
        nearest = min(abs(fact.documents[0] - wanted) for fact in known)
        fact = Random(f"{name}:{task}:{length}:{wanted}").choice(
            [fact for fact in known if abs(fact.documents[0] - wanted) == nearest]
        )
        return _asking(task, length, depth, fact)

    def texts() -> Iterator[str]:
        yield from (_text(number, document.text) for number, document in enumerate(documents))
        raise crowded(max(lengths))

    by_task = [(task, lambda length, depth, inside, task=task: asking(task, length, depth, inside)) for task in tasks]
    origin = Origin("documents", seed, context)
    return build_stream(tokenizer, origin, Sentences(HEADER, texts()), by_task, lengths, per_task, reserve_tokens)


def _text(number: int, text: str) -> str:
    return f"\n\nDocument {number + 1}:\n{text}"


def _asking(task: str, length: int, depth: float, fact: Fact) -> Asking:
    tail = "\n\n" + QUESTION.format(question=fact.question) + "\nAnswer:" + fact.answer_prefix
    return Asking(task, length, depth, tail, (fact.expected,), True, fact.documents)
