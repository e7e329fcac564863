"""lm-eval's own evaluation of a run's answers: the same tasks, the same scoring, its results format beside ours."""

from __future__ import annotations

import io
import logging
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

from kveval.errors import EvidenceError
from kveval.runs.journal import Journal
from kveval.runs.plan import Plan

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM

    from kveval.engines.base import Prompt

_LEFT_OUT = ("recall_stderr_stderr", "score_stderr_stderr")  # the error of an error (kveval.lm_stderr), which has none


def lm_eval_results(plan: Plan, journal: Journal, prompts: dict[int, list[Prompt]]) -> dict[str, Any]:
    """Arm -> lm-eval's ``results`` (metric, standard error), from the journaled answers; asks the model nothing.

    Of one task they are its own; of several, task -> results.

    Raises EvidenceError when lm-eval asks for a document that was not answered.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import get_task_dict

    from kveval import lmtasks

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = lmtasks.task_manager(plan.metadata)
    tasks = plan.lm_eval_tasks
    found = {}
    for arm in plan.arms:
        lm = _journaled_lm(plan, journal, prompts, arm.name)
        with redirect_stderr(io.StringIO()):  # progress bars of a second
            evaluated = evaluate(lm, get_task_dict(tasks, manager), bootstrap_iters=1, log_samples=False)
        told = {task: _metrics(evaluated["results"][task]) for task in tasks}
        found[arm.name] = told[tasks[0]] if len(tasks) == 1 else told
    return found


def _metrics(results: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if name != "alias" and not name.startswith(_LEFT_OUT)}


def _place(doc: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers by which a task's document names its question (``runs.texts.Asked.place``)."""
    if "index" in doc:  # the strict protocol: one question in a context
        return (doc["task"], doc["index"], doc["length"], 0)
    place = (doc["context"], doc["length"], doc["number"])
    return (doc["task"], *place) if "task" in doc else place


def _journaled_lm(plan: Plan, journal: Journal, prompts: dict[int, list[Prompt]], arm: str) -> LM:
    from lm_eval.api.model import LM

    by_question = {
        question.place: prompt
        for context in plan.contexts
        for question, prompt in zip(context.questions, prompts[context.context], strict=True)
    }

    class JournaledLM(LM):
        """Answers from the journal alone."""

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            return [self._answer(request) for request in requests]

        def _answer(self, request: Instance) -> str:
            doc = request.doc
            prompt = by_question[_place(doc)]
            answer = journal.get(arm, prompt.sha256)
            if answer is None:
                raise EvidenceError(f"{arm}: the question {_place(doc)} of {doc['length']:,} tokens has no answer")
            return answer.text

        def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            raise NotImplementedError("the journal keeps generated answers only")

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError("the journal keeps generated answers only")

    return JournaledLM()
