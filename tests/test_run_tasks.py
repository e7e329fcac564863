"""Runs of several tasks: every task is asked and reported, what cannot be told is named, a window finds what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kveval import ruler_tasks
from kveval.errors import KvevalError
from kveval.gate import load_policy
from kveval.report import render
from kveval.report.data import build
from kveval.report.tables import task_table
from kveval.runs.evidence import Evidence, load
from kveval.runs.plan import Request, resolve_plan
from kveval.runs.progress import Progress
from kveval.runs.runner import run
from kveval.runs.tasks import SUITES, resolve_tasks
from kveval.samples.ruler.registry import FAMILIES, OFFLINE

COPIED = {f"niah_single_{n}" for n in (1, 2, 3)} | {f"niah_multikey_{n}" for n in (1, 2)} | {"qa_synthetic_1"}
COUNTED = {"vt", "cwe", "fwe", "niah_multivalue", "niah_multiquery", "qa_synthetic_2"}  # no copying answers them


@pytest.fixture(scope="module")
def ruler(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    plan = resolve_plan(Request(("window:1k",), 4096, tasks=("ruler", "hard"), contexts=1))
    directory = tmp_path_factory.mktemp("ruler")
    run(plan, directory, Progress(quiet=True))
    return load(directory)


def test_every_task_is_asked_at_the_deployed_length(ruler: Evidence) -> None:
    asked = ruler.answers.groupby(["arm", "task"]).size().unstack()
    assert set(asked.columns) == {*OFFLINE, "needle_hard"}
    assert set(asked.loc["bf16"]) == {1, 2}  # tasks whose texts do not nest have one question in each context
    assert (ruler.answers["length"] == 4096).all()
    assert ruler.plan["experiment"]["task"]["protocol"] == "shared"


def test_the_probe_copies_and_does_nothing_else(ruler: Evidence) -> None:
    own = ruler.answers[ruler.answers["arm"] == "bf16"]
    scores = own.groupby("task")["score"].mean().to_dict()
    assert {task for task, score in scores.items() if score == 1.0} >= COPIED | {"needle_hard"}
    assert {task for task, score in scores.items() if score < 0.5} == COUNTED


def test_a_window_finds_what_it_keeps(ruler: Evidence) -> None:
    rows = ruler.answers[(ruler.answers["arm"] == "window:1k") & ruler.answers["task"].isin(COPIED | {"needle_hard"})]
    for row in rows.to_dict("records"):
        last = row["prompt_tokens"] + 12  # while it answers the window moves on
        if row["needle_first"] > last - 1024 + 64:
            assert row["score"] == 1.0, row["task"]
        if row["needle_last"] < row["prompt_tokens"] - 1024:
            assert row["score"] == 0.0, row["task"]


def test_the_report_has_a_row_for_each_task(ruler: Evidence) -> None:
    report = build(ruler, load_policy("default"))
    table = task_table(report)
    assert table is not None
    rows = dict(table.rows)
    assert set(rows) == {*OFFLINE, "needle_hard"}
    assert {task for task, values in rows.items() if values[1].detail == "not discriminative"} == COUNTED
    assert rows["niah_single_2"][0].text == "2/2"
    for kind in ("terminal", "md", "html", "json"):
        assert "niah_multikey_3" in render(report, kind).replace("\\_", "_")


def test_lm_evals_scores_are_the_rows(ruler: Evidence) -> None:
    found = json.loads((ruler.path / "lm_eval.json").read_text())
    means = ruler.answers.groupby(["arm", "task"], as_index=False)["score"].mean()
    for arm, task, score in means.itertuples(index=False):
        assert found[arm][f"kveval_shared_{task}"]["score,none"] == pytest.approx(score)


def test_words_and_repeated_sentences_are_left_out_of_divergence(ruler: Evidence) -> None:
    kinds = {entry["context"]: entry["kind"] for entry in ruler.plan["experiment"]["contexts"]}
    scored = ruler.divergence.groupby("context")["scored"].mean()
    for context, share in scored.items():
        assert (share > 0.7) == (kinds[context] in ("prose", "hard", "documents")), kinds[context]


def test_names_of_tasks(tmp_path: Path) -> None:
    assert resolve_tasks(("ruler",)) == OFFLINE
    assert resolve_tasks(("vt", "hard", "vt")) == ("vt", "needle_hard")
    assert len(resolve_tasks(("ruler", "hard"))) == 14
    for names, told in (
        (("rular",), "did you mean ruler"),
        (("qa_1",), "needs data of yours, and --protocol strict"),
        (("needles", "vt"), "run it alone"),
    ):
        with pytest.raises(KvevalError, match=told):
            resolve_tasks(names)
    assert set(SUITES) == {"needles", "ruler", "hard"}


def test_texts_that_do_not_nest_are_read_at_the_deployed_length_alone() -> None:
    plan = resolve_plan(Request(("fp8",), 8192, tasks=("vt", "fwe")))
    asked = {(asked.task, asked.length) for text in plan.contexts for asked in text.questions}
    assert asked == {("vt", 4096), ("vt", 8192), ("fwe", 8192)}
    every = resolve_plan(Request(("fp8",), 8192, tasks=("fwe",), lengths=(4096, 8192)))
    assert {asked.length for text in every.contexts for asked in text.questions} == {4096, 8192}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    tasks = ("niah_single_2", "vt", "hard")
    plan = resolve_plan(Request(("int4-g32",), 2048, tasks=tasks, protocol="strict", contexts=2))
    directory = tmp_path_factory.mktemp("strict")
    run(plan, directory, Progress(quiet=True))
    return load(directory)


def test_the_strict_protocol_reads_a_context_for_each_question(strict: Evidence) -> None:
    own = strict.answers[strict.answers["arm"] == "bf16"]
    assert sorted(own["task"]) == ["needle_hard", "needle_hard", "niah_single_2", "niah_single_2", "vt", "vt"]
    assert own["context"].is_unique
    assert set(own.loc[own["task"] != "vt", "score"]) == {1.0}
    assert strict.plan["experiment"]["task"]["protocol"] == "strict"
    assert "strict protocol" in render(build(strict, load_policy("default")), "terminal")
    kept_out = ~strict.divergence.set_index("context")["scored"]
    kinds = {entry["context"]: entry["kind"] for entry in strict.plan["experiment"]["contexts"]}
    for context, share in kept_out.groupby("context").mean().items():
        assert (0 < share < 0.5) if kinds[context] in ("prose", "hard") else share == 1.0


def test_the_strict_protocols_samples_are_lm_evals() -> None:
    tasks = ("niah_multikey_1", "qa_synthetic_2", "fwe", "needle_hard")
    plan = resolve_plan(Request(("fp8",), 4096, tasks=tasks, protocol="strict", contexts=2, seed=7))
    texts = {asked.place: (text, asked) for text in plan.contexts for asked in text.questions}
    assert len(texts) == 8
    for task in tasks:
        for doc in ruler_tasks.strict(task, **plan.metadata)["test"]:
            text, asked = texts[task, doc["index"], 4096, 0]
            ids = [*text.ids[: asked.prefix].tolist(), *asked.tail]
            assert ids == plan.tokenizer.encode(ruler_tasks.doc_to_text(doc) + doc["answer_prefix"])
            assert [list(group) for group in asked.expected] == doc["expected"]
            assert (asked.until, asked.budget_tokens) == ((), FAMILIES[task].budget_tokens)
            planted = plan.tokenizer.decode(text.ids[asked.first : asked.last + 1])
            assert task in ("qa_synthetic_2", "fwe") or doc["expected"][0][0] in planted


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"tasks": ("needles",)}, "leave out --protocol strict"),
        ({"lengths": (1024, 2048)}, "leave out --lengths"),
        ({"needles": 2}, "--contexts is the number"),
    ],
)
def test_what_the_strict_protocol_does_not_do_is_refused(asked: dict[str, object], told: str) -> None:
    with pytest.raises(KvevalError, match=told):
        resolve_plan(Request(("fp8",), 2048, **{"tasks": ("vt",), "protocol": "strict"} | asked))  # type: ignore[arg-type]
