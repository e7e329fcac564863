"""RULER in lm-evaluation-harness by the shared protocol: many questions about each context, errors clustered by it."""

from __future__ import annotations

import math
import runpy
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from kveval import lmtasks, shared_tasks, task_list
from kveval.errors import EvidenceError, KvevalError
from kveval.samples.ruler.registry import OFFLINE

FOLDER = lmtasks.tasks_path() / "shared"
METADATA: dict[str, Any] = {"pretrained": "probe", "lengths": ["4k", 8192], "contexts": 2, "questions": 2}


class Knowing(LM):
    """Answers what is expected, but in one context."""

    def __init__(self, wrong: int) -> None:
        super().__init__()
        self.wrong = wrong

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [
            "nothing" if request.doc["context"] == self.wrong else f" {shared_tasks.doc_to_target(request.doc)}."
            for request in requests
        ]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError


def test_the_files_are_those_that_are_written() -> None:
    written = runpy.run_path(str(FOLDER / "_write.py"))["files"]()
    found = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.yaml")}
    assert found == written, "run python tasks/shared/_write.py"
    manager = lmtasks.task_manager({})
    assert {shared_tasks.PREFIX + task for task in shared_tasks.TASKS} <= set(manager.all_subtasks)
    assert "kveval_shared" in manager.all_groups


def test_lm_eval_generates_no_more_than_is_told() -> None:
    assert f"max_gen_toks: {shared_tasks.MOST_GENERATED}," in (FOLDER / "_shared").read_text(encoding="utf-8")


def test_the_base_explains_every_key() -> None:
    text = (FOLDER / "_shared").read_text(encoding="utf-8")
    for key in (*shared_tasks.Settings.__dataclass_fields__, "tokenizer"):
        assert f"\n#   {key} " in text, f"{key} is not explained"


def test_each_task_has_its_questions() -> None:
    for task in ("niah_multivalue", "vt", "niah_multikey_3", "qa_synthetic_2"):
        docs = shared_tasks.shared(task, **METADATA)["test"]
        assert len(docs) == 2 * 2 * 2
        assert {doc["length"] for doc in docs} == {4096, 8192}
    counting = shared_tasks.shared("cwe", **METADATA, alone_lengths=["8k"])["test"]
    assert [(doc["context"], doc["length"]) for doc in counting] == [(0, 8192), (1, 8192)]


def test_the_list_tells_the_questions_there_are() -> None:
    metadata = {"pretrained": "probe", "contexts": 1}
    made = {task: len(shared_tasks.shared(task, **metadata)["test"]) for task in OFFLINE}
    assert made == {task: shared_tasks.questions(task) for task in OFFLINE}
    assert f" {sum(made.values())} questions  all of RULER" in task_list.listing()


def test_a_question_is_the_same_in_any_subset_and_order() -> None:
    def asked(tasks: list[str]) -> dict[tuple[Any, ...], str]:
        contexts = shared_tasks.contexts_of("probe", tasks, METADATA)
        return {
            (question.task, question.context, question.length, question.number): context.text(question)
            for context in contexts
            for question in context.questions
        }

    every = asked(list(OFFLINE))
    for tasks in (["vt"], ["niah_multiquery", "niah_single_2"], ["fwe"]):
        some = asked(tasks)
        assert {key[0] for key in some} == set(tasks)
        assert some.items() <= every.items()


def test_a_document_finds_its_question_again() -> None:
    docs = shared_tasks.shared("niah_single_3", **METADATA)["test"]
    for doc in reversed(list(docs)):
        context, question = shared_tasks.question_of(doc)
        assert [list(group) for group in question.expected] == doc["expected"]
        assert shared_tasks.doc_to_text(doc) == context.text(question)
    with pytest.raises(EvidenceError, match="no question 99"):
        shared_tasks.question_of(docs[0] | {"number": 99})


def test_errors_are_clustered_by_context_and_the_protocol_is_named() -> None:
    metadata = METADATA | {"contexts": 4, "lengths": [4096]}
    names = ["kveval_shared_niah_single_2", "kveval_shared_niah_multivalue"]
    evaluated = simple_evaluate(model=Knowing(wrong=1), tasks=names, task_manager=lmtasks.task_manager(metadata))
    for name in names:
        result = evaluated["results"][name]
        assert result["score,none"] == 0.75
        # Four clusters of two, one of them all wrong: squared sums 3 * 0.5^2 + 1.5^2 = 3, times 4 / 3, over 8.
        assert result["score_stderr,none"] == pytest.approx(math.sqrt(4 / 3 * 3) / 8)
        assert evaluated["configs"][name]["metadata"]["protocol"] == "shared"
        assert "shared" in result["alias"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"questions": 0}, "questions is 0: give a whole number of 1 or more"),
        ({"contexts": True}, "contexts is True"),
        ({"question": 3}, "did you mean 'questions'"),
        ({"lengths": []}, "lengths are empty"),
        ({"lengths": ["many"]}, "many"),
        (
            {"lengths": [8192], "max_length": 8192},
            "with 128 tokens that lm-eval may generate .* more than the model's max_length",
        ),
    ],
)
def test_bad_metadata_is_told(given: dict[str, Any], told: str) -> None:
    with pytest.raises(KvevalError, match=told):
        shared_tasks.shared("vt", **(METADATA | given))
