"""What a run resolves to before anything is spent, what its journal keeps, and how it tells where it stands."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from kveval.engines.base import Answer
from kveval.errors import EngineError, KvevalError
from kveval.models.catalogue import resolve
from kveval.runs.directory import claim, difference
from kveval.runs.evidence import experiment_hash
from kveval.runs.journal import SERIES, SIZES, Journal
from kveval.runs.plan import Request, resolve_arms, resolve_plan
from kveval.runs.progress import Progress, Work
from kveval.runs.tasks import TASK, default_lengths, task_metadata


@pytest.mark.parametrize(
    ("ctx", "lengths"),
    [
        (131_072, [4096, 8192, 16_384, 32_768, 65_536, 131_072]),
        (128_000, [8000, 16_000, 32_000, 64_000, 128_000]),
        (8192, [4096, 8192]),
        (4096, [2048, 4096]),
        (2048, [1024, 2048]),
        (1024, [1024]),
    ],
)
def test_default_lengths_double_up_to_the_context(ctx: int, lengths: list[int]) -> None:
    assert default_lengths(ctx) == lengths


def test_arms_are_the_baseline_and_each_format_once() -> None:
    arms = resolve_arms(["fp8", "bf16", "window:4096", "FP8", "window:4k"])
    assert [(arm.name, arm.role) for arm in arms] == [
        ("bf16", "baseline"),
        ("fp8", "candidate"),
        ("window:4k", "candidate"),
    ]
    with pytest.raises(KvevalError, match="nothing to compare"):
        resolve_arms(["bf16"])


@pytest.mark.parametrize(("ctx", "contexts", "questions"), [(131_072, 1, 264), (32_768, 4, 176), (2048, 8, 176)])
def test_defaults_read_about_128k_and_ask_hundreds(ctx: int, contexts: int, questions: int) -> None:
    found = task_metadata(Request(("fp8",), ctx), (TASK,), resolve("probe"))
    assert found["contexts"] == contexts
    cells = len(found["lengths"]) * len(found["depths"])
    assert contexts * cells * found["needles_per_cell"] == questions


def test_a_plan_is_the_same_twice_and_another_for_another_seed() -> None:
    request = Request(("fp8",), 2048, contexts=1, needles=1)
    one, two = resolve_plan(request), resolve_plan(request)
    assert one.hash == two.hash == experiment_hash(one.experiment)
    assert one.directory_name == two.directory_name
    assert one.directory_name.startswith("probe-2k-")
    other = resolve_plan(Request(("fp8",), 2048, contexts=1, needles=1, seed=1))
    assert other.hash != one.hash
    assert "seed" in difference(one.experiment["task"], other.experiment["task"]) or "contexts" in difference(
        one.experiment, other.experiment
    )
    assert one.experiment["model"]["instrument"] is True


def test_difference_names_the_first_place() -> None:
    there, here = {"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}}
    assert difference(there, here) == "b.c is 2 there and 3 here"


def answer(number: int) -> Answer:
    return Answer(f"hash{number}", 10, 10, "1234567", "stop")


def test_the_journal_keeps_answers_whole_and_refuses_a_second_one(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        arm = journal.arm("fp8")
        arm.put([answer(1), answer(2)])
        with pytest.raises(sqlite3.IntegrityError):
            arm.put([answer(3), answer(2)])  # all or none: 3 is not kept either
        assert arm.get("hash1") == answer(1)
        assert arm.get("hash3") is None
        assert journal.arm("bf16").get("hash1") is None
    with Journal(tmp_path / "j.sqlite") as journal:
        assert journal.get("fp8", "hash2") == answer(2)


def test_the_journal_gives_readings_back_as_they_were(tmp_path: Path) -> None:
    sizes = {name: i for i, name in enumerate(SIZES)}
    series = {name: np.arange(5, dtype=np.float32) / 3 + i for i, name in enumerate(SERIES)}
    with Journal(tmp_path / "j.sqlite") as journal:
        assert not journal.has_reading("fp8", 0)
        journal.put_reading("fp8", 0, sizes, series, [("prefill", 5, 5, 0.5)])
        assert journal.has_reading("fp8", 0)
        (row,) = journal.readings("fp8")
        assert {name: row[name] for name in SIZES} == sizes
        for name in SERIES:
            np.testing.assert_array_equal(row[name], series[name])
        assert journal.spans() == [("fp8", 0, "prefill", 5, 5, 0.5)]


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "j.sqlite").write_text("not a database, but long enough to be read as the header of one" * 20)
    with pytest.raises(KvevalError, match="cannot be used"):
        Journal(tmp_path / "j.sqlite")


@pytest.mark.parametrize("damage", ["pages", "columns"])
def test_a_damaged_journal_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "j.sqlite"
    with Journal(file) as journal:
        journal.put("fp8", [answer(number) for number in range(500)])
    if damage == "pages":
        whole = file.read_bytes()
        file.write_bytes(whole[:8192] + b"\xff" * (len(whole) - 8192))
    else:
        with contextlib.closing(sqlite3.connect(file)) as db:
            db.executescript("DROP TABLE answers; CREATE TABLE answers (arm TEXT)")
    with pytest.raises(KvevalError, match="cannot be used"):
        Journal(file)


def test_something_in_the_place_of_the_work_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"hash": "x"}')
    (tmp_path / "work").write_text("a file")
    with pytest.raises(KvevalError, match=r"work' cannot be written"), claim(tmp_path, {"hash": "x"}):
        raise AssertionError


def test_a_journal_that_cannot_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    with Journal(tmp_path / "j.sqlite") as journal:
        journal.put("fp8", [answer(1)])
        journal._db.execute("PRAGMA query_only=ON")  # what a read-only or full disk answers
        with pytest.raises(EngineError, match="cannot be written"):
            journal.put("fp8", [answer(2)])
        assert journal.get("fp8", "hash1") == answer(1)


def test_a_run_that_cannot_be_run_leaves_no_directory(tmp_path: Path) -> None:
    plan = {"hash": "x", "experiment": {}}
    with pytest.raises(KvevalError), claim(tmp_path / "run", plan):
        raise KvevalError("this model's layers cannot be stored")
    assert not (tmp_path / "run").exists()
    with pytest.raises(EngineError), claim(tmp_path / "run", plan):
        raise EngineError("out of memory")
    assert (tmp_path / "run" / "plan.json").exists()  # can be continued


def test_what_a_process_killed_before_its_plan_was_written_left_is_no_obstacle(tmp_path: Path) -> None:
    for name in ("run.lock", "holder.json", "holder.json.partial", "plan.json.partial"):
        (tmp_path / name).write_text("{")
    with claim(tmp_path, {"hash": "x", "experiment": {}}):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_journal_without_its_plan_is_refused(tmp_path: Path) -> None:
    """Another model may have answered the same prompts in it."""
    with Journal(tmp_path / "journal.sqlite") as journal:
        journal.put("bf16", [answer(1)])
    with pytest.raises(KvevalError, match=r"holds other things \(journal.sqlite"), claim(tmp_path, {"hash": "x"}):
        raise AssertionError


def test_the_cost_of_a_reading_grows_with_what_its_tokens_attend_to() -> None:
    full, window = Work("bf16", 0, 1000, 0), Work("window", 0, 1000, 0, window=100)
    assert full.cost(1000, turn=0) == 500_000
    assert window.cost(100, turn=0) == full.cost(100, turn=0)
    assert window.cost(1000, turn=0) == 5000 + 900 * 100
    assert full.cost(1000, turn=10) == 510_000


def test_progress_is_plain_lines_when_piped() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    with progress.over([Work("bf16", 0, 100, 7), Work("fp8", 0, 100, 7)]):
        with progress.reading("bf16", 0) as watch:
            watch.read(100)
            watch.asked(7)
        assert "100 of 200 tokens read, 7 of 14 questions asked" in progress.line()
    assert "tokens read" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    silent = io.StringIO()
    Progress(stream=silent, quiet=True).note("nothing")
    assert silent.getvalue() == ""


@pytest.mark.parametrize(
    ("kv", "told"),
    [
        ("kivi4,residual=4096", "quantises nothing, so it is bf16"),
        ("kivi4,residual=992", "at 978 tokens quantises nothing"),  # shorter than --ctx, longer than what is read
        ("bf16,values=kivi4,residual=1024", "quantises nothing, so it is bf16"),
        ("window:1024,store=fp8", "keeps every token, so it is fp8"),
        ("window:1023", "at 978 tokens keeps every token, so it is bf16"),
        ("swa:2k", "keeps every token, so it is bf16"),
    ],
)
def test_a_format_that_does_nothing_at_this_length_is_refused(kv: str, told: str) -> None:
    with pytest.raises(KvevalError, match=told):
        resolve_plan(Request(kv=(kv,), ctx_tokens=1024, contexts=1))


def test_default_needles_fit_into_the_shortest_length() -> None:
    plan = resolve_plan(Request(kv=("fp8",), ctx_tokens=1024, contexts=1))
    assert plan.experiment["task"]["needles_per_cell"] == 1


def test_what_is_about_storage_needs_a_store() -> None:
    for kv in ("window:4k,rotate=hadamard", "snapkv:0.5,skip_layers=2", "knorm:0.5,residual=32"):
        with pytest.raises(KvevalError, match=rf"'{kv}'.*add store="):
            resolve_arms([kv])
