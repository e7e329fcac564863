"""Which tasks a run asks, at which lengths, in how many contexts; and the texts that come of it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kveval import lmtasks, ruler_tasks, shared_tasks
from kveval.errors import KvevalError
from kveval.models.catalogue import ModelSource
from kveval.runs.texts import Text, of_grid, of_shared
from kveval.samples.layout import MAX_NEEDLE_SHARE
from kveval.samples.ruler.registry import FAMILIES, OFFLINE, THIRTEEN

if TYPE_CHECKING:
    from kveval.runs.plan import Request

TASK = lmtasks.TASK
SHARED, STRICT = shared_tasks.PROTOCOL, ruler_tasks.PROTOCOL
SUITES = {"needles": (TASK,), "ruler": OFFLINE, "hard": ("needle_hard",)}
STRICT_SUITES = {"ruler": OFFLINE, "ruler13": THIRTEEN, "hard": ("needle_hard",)}
SHORTEST = 4096  # of the default lengths: they double from here up to the context length
SHORTEST_HALF = 1024
TOKENS_PER_ARM = 131_072  # the default number of contexts reads about this much, so that a first run ends in minutes
MOST_CONTEXTS = 8
QUESTIONS_PER_ARM = 256  # wanted by default, over all contexts
NEEDLE_TOKENS = 25  # about, with any tokenizer: as many needles are asked for by default as the shortest length holds


def resolve_tasks(names: Sequence[str], protocol: str = SHARED) -> tuple[str, ...]:
    """The tasks that are asked: suites (needles, ruler, hard) and single tasks of the protocol by name.

    Raises KvevalError for a name that is none of them, and for the needle grid beside others: it has contexts of its own.
    """
    suites, single = (SUITES, shared_tasks.TASKS) if protocol == SHARED else (STRICT_SUITES, tuple(FAMILIES))
    found: dict[str, None] = {}
    for name in names:
        if name not in suites and name not in single:
            known = [*suites, *single]
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" (did you mean {close[0]}?)" if close else ""
            if name in ("qa_1", "qa_2", "ruler13"):
                hint = f": it needs data of yours, and --protocol {STRICT}; the questions that need none are in ruler"
            if name == "needles":
                hint = f": its questions share contexts; leave out --protocol {protocol}, or ask for ruler"
            raise KvevalError(
                f"--tasks '{name}' is not a task of the {protocol} protocol{hint}; accepted are {', '.join(known)}"
            )
        found |= dict.fromkeys(suites.get(name, (name,)))
    if TASK in found and len(found) > 1:
        raise KvevalError(
            "--tasks needles is a grid in contexts of its own: run it alone, and the other tasks in another run"
        )
    return tuple(found)


def lm_eval_names(tasks: Sequence[str], protocol: str = SHARED) -> list[str]:
    """The lm-eval tasks of a run's tasks."""
    if protocol == STRICT:
        return [ruler_tasks.task_name(task) for task in tasks]
    return [task if task == TASK else shared_tasks.PREFIX + task for task in tasks]


def build_texts(tokenizer: Any, tasks: Sequence[str], metadata: dict[str, Any]) -> tuple[Text, ...]:
    """The texts of ``tasks``, each with its questions."""
    if tuple(tasks) == (TASK,):
        return of_grid(tokenizer, lmtasks.plan_contexts(tokenizer, metadata))
    if "samples" in metadata:
        return of_shared(tokenizer, ruler_tasks.contexts_of(metadata["pretrained"], tasks, metadata))
    return of_shared(tokenizer, shared_tasks.contexts_of(metadata["pretrained"], tasks, metadata))


def task_facts(
    request: Request, tasks: Sequence[str], metadata: dict[str, Any], texts: Sequence[Text]
) -> dict[str, Any]:
    """What a plan says of its tasks."""
    source = next((text.haystack for text in texts if text.haystack and text.kind != "repeat"), None)
    facts: dict[str, Any] = {
        "name": TASK if tuple(tasks) == (TASK,) else "+".join(request.tasks),
        "protocol": request.protocol,
        "lengths": list(metadata.get("lengths", [request.ctx_tokens])),
        "contexts": len(texts),
        "seed": request.seed,
    }
    if tuple(tasks) == (TASK,):
        facts |= {"depths": list(metadata["depths"]), "needles_per_cell": metadata["needles_per_cell"]}
    elif request.protocol == STRICT:
        facts |= {"tasks": list(tasks), "samples": metadata["samples"]}
    else:
        facts |= {"tasks": list(tasks), "questions": metadata["questions"], "alone_lengths": metadata["alone_lengths"]}
    return facts | ({"haystack": {"name": source[0], "sha256": source[1]}} if source else {})


def task_metadata(request: Request, tasks: Sequence[str], source: ModelSource) -> dict[str, Any]:
    """The lm-eval tasks' metadata, defaults filled in.

    Raises KvevalError for lengths that leave out or exceed the context length.
    """
    if request.protocol == STRICT:
        return _strict_metadata(request, tasks, source)
    ctx, grid = request.ctx_tokens, tuple(tasks) == (TASK,)
    lengths = sorted(set(request.lengths)) if request.lengths else default_lengths(ctx)
    if not grid and not request.lengths:
        lengths = [length for length in lengths if length >= min(SHORTEST, ctx)]
    if lengths[-1] != ctx:
        raise KvevalError(
            f"--lengths {lengths[-1]}: the longest length must be the context length that is judged, --ctx {ctx}"
        )
    if not grid:
        return _shared_metadata(request, tasks, source, lengths)
    contexts = request.contexts or max(1, min(MOST_CONTEXTS, TOKENS_PER_ARM // ctx))
    depths = sorted(set(request.depths))
    needles = request.needles
    if needles is None:
        wanted = round(QUESTIONS_PER_ARM / (contexts * len(lengths) * max(1, len(depths))))
        fit = int(MAX_NEEDLE_SHARE * lengths[0] / (NEEDLE_TOKENS * max(1, len(depths))))
        needles = max(1, min(wanted, fit))
    return {
        "pretrained": source.name,
        "lengths": lengths,
        "depths": depths,
        "contexts": contexts,
        "needles_per_cell": needles,
        "seed": request.seed,
        "haystack": request.haystack,
    }


def default_lengths(ctx_tokens: int) -> list[int]:
    """4k, 8k, ... up to the context length; below 8k its half as well, where needles still fit into that."""
    lengths = [ctx_tokens]
    while lengths[0] // 2 >= SHORTEST:
        lengths.insert(0, lengths[0] // 2)
    if len(lengths) == 1 and ctx_tokens // 2 >= SHORTEST_HALF:
        lengths.insert(0, ctx_tokens // 2)
    return lengths


def _shared_metadata(request: Request, tasks: Sequence[str], source: ModelSource, lengths: list[int]) -> dict[str, Any]:
    """Of tasks that share contexts. Texts that do not nest are read at the deployed length alone, unless lengths are given."""
    alone = lengths if request.lengths else [request.ctx_tokens]
    once = shared_tasks.Settings.of({"lengths": lengths, "alone_lengths": alone, "contexts": 1, "haystack": "noise"})
    kinds = len(shared_tasks.slots(tasks, once))
    contexts = request.contexts or max(1, min(MOST_CONTEXTS, TOKENS_PER_ARM // (request.ctx_tokens * kinds)))
    if request.needles is not None and request.needles < 1:
        raise KvevalError(f"--needles {request.needles}: ask 1 question or more of each task in a context")
    return {
        "pretrained": source.name,
        "lengths": lengths,
        "contexts": contexts,
        "questions": request.needles or (shared_tasks.QUESTIONS if lengths[0] >= SHORTEST else 1),
        "seed": request.seed,
        "haystack": request.haystack,
        "alone_lengths": alone,
    }


def _strict_metadata(request: Request, tasks: Sequence[str], source: ModelSource) -> dict[str, Any]:
    """Of tasks with a context for each question, all at the deployed length; ``--contexts`` of each task.

    ``reserve_tokens`` 0: a run applies no chat template.
    """
    ctx = request.ctx_tokens
    if request.lengths not in (None, (ctx,)):
        raise KvevalError(
            f"--lengths {','.join(map(str, request.lengths or ()))}: the strict protocol has a context for each question, all at "
            f"--ctx {ctx}: leave out --lengths, and run other lengths by themselves"
        )
    if request.needles not in (None, 1):
        raise KvevalError(
            f"--needles {request.needles}: the strict protocol asks 1 question of a context; "
            "--contexts is the number of questions of each task"
        )
    contexts = request.contexts or max(1, min(MOST_CONTEXTS, TOKENS_PER_ARM // (ctx * len(tasks))))
    return {
        "pretrained": source.name,
        "length": ctx,
        "samples": contexts,
        "seed": request.seed,
        "haystack": request.haystack,
        "reserve_tokens": 0,
    }
