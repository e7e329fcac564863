"""The main job end to end, as a user starts it: real processes, the real probe, short contexts."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from filelock import FileLock
from pandas.testing import assert_frame_equal

from kveval.cache.layer import FormatLayer
from kveval.formats.fp8 import Fp8
from kveval.formats.half import Bf16
from kveval.runs.evidence import TABLES, load
from kveval.runs.plan import Request, resolve_plan
from kveval.runs.progress import Progress
from kveval.runs.runner import run

pytestmark = pytest.mark.e2e

ASKED = ["--ctx", "2k", "--contexts", "2", "--needles", "2", "--depths", "0,0.25,0.5,0.75,1", "--chunk", "512"]
FORMATS = ["--kv", "fp8", "--kv", "int4-g32", "--kv", "window:512"]


def kveval(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program; never raises."""
    command = [sys.executable, "-m", "kveval.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """An undisturbed run, and what it printed."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, kveval("run", *FORMATS, *ASKED, "--out", directory)


def test_run_ends_with_the_report(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    directory, done = whole
    assert done.returncode == 0, done.stderr
    assert "measures the instrument, not your model" in " ".join(done.stdout.split())
    for told in ("Recall retention", "PPL ratio", "KV bytes per token", "FAIL", str(directory)):
        assert told in done.stdout
    assert "\x1b[" not in done.stdout + done.stderr
    assert "tokens read" in done.stderr
    assert "Traceback" not in done.stderr


def test_rows_are_whole(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    evidence = load(whole[0])
    assert evidence.candidates == ["fp8", "int4-g32", "window:512"]
    answers = evidence.answers
    assert len(answers) == 4 * 2 * 2 * 5 * 2  # arms, contexts, lengths, depths, needles
    assert set(answers["status"]) == {"scored"}
    assert (answers["prompt_tokens"] == answers["read_tokens"]).all()
    assert (answers["prompt_tokens"] + 7 <= answers["length"]).all()
    bytes_per_token = {arm["name"]: arm["bytes_per_token"] for arm in evidence.plan["experiment"]["arms"]}
    assert bytes_per_token == {"bf16": 2048.0, "fp8": 1024.0, "int4-g32": 640.0, "window:512": 2048.0}
    footprint = evidence.footprint
    assert (footprint["stored_bytes"] == footprint["predicted_bytes"]).all()
    assert (footprint["stored_bytes"] <= footprint["reserved_bytes"]).all()
    for arm in ("bf16", "fp8", "int4-g32"):
        rows = footprint[footprint["arm"] == arm]
        assert (rows["stored_bytes"] == rows["tokens"] * bytes_per_token[arm]).all()
    assert (footprint.loc[footprint["arm"] == "window:512", "stored_bytes"] == 512 * 2048).all()


def test_each_context_is_read_once(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Prompt tokens read per arm <= 1.10 x the sum of the contexts' lengths; here exactly once."""
    evidence = load(whole[0])
    lengths = {row["context"]: row["tokens"] for row in evidence.plan["experiment"]["contexts"]}
    prefill = evidence.throughput[evidence.throughput["phase"] == "prefill"]
    for arm in ("bf16", "fp8", "int4-g32", "window:512"):
        assert prefill.loc[prefill["arm"] == arm, "tokens"].sum() == sum(lengths.values())


def test_the_baseline_finds_every_needle_and_fp8_keeps_them(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    scores = load(whole[0]).answers.groupby("arm")["score"].mean()
    assert scores["bf16"] == 1.0
    assert scores["fp8"] >= 0.95


def test_a_window_finds_a_needle_if_and_only_if_it_is_kept(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """The probe reads the code word before a value and the value: kept means both stay until the last digit is generated, lost
    means that the value is gone before the first."""
    answers = load(whole[0]).answers
    rows = answers[answers["arm"] == "window:512"]
    recent = 512 - 4
    first_query, last_query = rows["prompt_tokens"] - 1, rows["prompt_tokens"] + 3
    kept = rows["needle_first"] > last_query - recent
    lost = rows["needle_last"] <= first_query - recent
    assert (kept | lost).sum() >= len(rows) - 2  # a needle on the edge may lose its first words and still be found
    assert kept.sum() >= 5
    assert lost.sum() >= 20
    assert (rows.loc[kept, "score"] == 1.0).all()
    assert (rows.loc[lost, "score"] == 0.0).all()


def test_gate_and_its_exit_codes(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    judged = kveval("gate", whole[0])
    assert judged.returncode == 1
    assert "2,048" in judged.stdout
    assert "window:512" in judged.stdout
    assert kveval("gate", whole[0], "--policy", "no-such-policy").returncode == 2


@pytest.mark.parametrize("kind", ["md", "html", "json"])
def test_report_renders_each_format(
    whole: tuple[Path, subprocess.CompletedProcess[str]], kind: str, tmp_path: Path
) -> None:
    out = tmp_path / f"report.{kind}"
    done = kveval("report", whole[0], "--format", kind, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "window:512" in out.read_text(encoding="utf-8")
    if kind == "json":
        json.loads(out.read_text(encoding="utf-8"))


def test_output_that_cannot_be_written_is_one_sentence(
    whole: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kveval.cli", "report", str(whole[0])],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 5
    assert "cannot be written (No space left on device)" in done.stderr
    assert "Traceback" not in done.stderr


def test_lm_evals_own_results_agree_with_the_rows(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    results = json.loads((whole[0] / "lm_eval.json").read_text(encoding="utf-8"))
    scores = load(whole[0]).answers.groupby("arm")["score"].mean()
    for arm, score in scores.items():
        assert results[arm]["recall,none"] == pytest.approx(score)
        assert results[arm]["recall_stderr,none"] >= 0


def test_a_finished_run_is_shown_again_and_asks_nothing(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in whole[0].iterdir()}
    again = kveval("run", *FORMATS, *ASKED, "--out", whole[0])
    assert again.returncode == 0, again.stderr
    assert "nothing was asked again" in again.stderr
    assert again.stdout == whole[1].stdout
    assert {file.name: file.stat().st_mtime_ns for file in whole[0].iterdir()} == before


def checks_of_a_small_run(directory: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """(check, arm) -> status and detail of a run in this process."""
    plan = resolve_plan(Request(("fp8",), 1024, contexts=1, needles=1, depths=(0.0, 1.0), chunk_tokens=256, threads=1))
    rows = load(run(plan, directory, Progress(quiet=True))).checks.to_dict("records")
    return {(row["check"], row["arm"]): (row["status"], row["detail"]) for row in rows}


def test_a_candidate_that_is_stored_as_the_baseline_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp8, "encode", Bf16.encode)
    monkeypatch.setattr(Fp8, "decode", Bf16.decode)
    status, told = checks_of_a_small_run(tmp_path / "run")["engaged", "fp8"]
    assert status == "failed"
    assert "but the format says" in told
    assert kveval("gate", tmp_path / "run").returncode == 4


def test_a_candidate_whose_cache_is_written_but_never_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are fp8's, but attention reads the baseline's numbers."""
    stored = FormatLayer.update
    behind: dict[FormatLayer, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(layer: FormatLayer, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = stored(layer, keys, values, *args, **kwargs)
        if not layer.asking:
            behind.setdefault(layer, []).append((keys.bfloat16(), values.bfloat16()))
        for part, kept in zip(out, zip(*behind[layer], strict=True), strict=True):
            part[:, :, : layer.read[0].tokens] = torch.cat(kept, dim=2)
        return out

    monkeypatch.setattr(FormatLayer, "update", update)
    status, told = checks_of_a_small_run(tmp_path / "run")["engaged", "fp8"]
    assert status == "failed"
    assert "to the last bit" in told


def answered(directory: Path) -> int:
    """Answers in a run's journal so far."""
    try:
        with sqlite3.connect(f"file:{directory}/journal.sqlite?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM answers").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def stop_after(process: subprocess.Popen, directory: Path, answers: int, number: signal.Signals) -> None:
    """Send ``number`` once the journal holds ``answers``."""
    deadline = time.monotonic() + 300
    while answered(directory) < answers and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -9), (signal.SIGTERM, 130), (signal.SIGINT, 130)],
    ids=["kill", "term", "ctrl-c"],
)
def test_a_stopped_run_continues_where_it_was(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """Rows equal those of the undisturbed run but for timings and gauges; no answer is asked or written twice."""
    directory = tmp_path / "run"
    command = [sys.executable, "-m", "kveval.cli", "run", *FORMATS, *ASKED, "--out", str(directory)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # What runs the tests in the background ignores Ctrl-C, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads are running
    )
    stop_after(process, directory, 30, number)
    told = process.communicate()[1]
    assert process.returncode == code, told
    assert "Traceback" not in told
    before = answered(directory)
    assert 30 <= before < 160
    assert not (directory / "manifest.json").exists()
    assert kveval("report", directory).returncode == 2
    with sqlite3.connect(directory / "journal.sqlite") as db:
        first = db.execute("SELECT rowid, * FROM answers ORDER BY rowid").fetchall()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    with sqlite3.connect(directory / "journal.sqlite") as db:
        kept = db.execute("SELECT rowid, * FROM answers ORDER BY rowid").fetchall()
    assert kept[: len(first)] == first  # untouched, and the primary key lets no question in twice
    assert len(kept) == 160
    ours, theirs = load(directory), load(whole[0])
    for table in ("answers", "divergence", "checks"):
        assert_frame_equal(getattr(ours, table), getattr(theirs, table))
    sizes = ["arm", "context", "tokens", "predicted_bytes", "stored_bytes", "reserved_bytes", "weights_bytes"]
    assert_frame_equal(ours.footprint[sizes], theirs.footprint[sizes])
    assert not (directory / "work").exists()


BAD = [
    (["--kv", "fp9", "--ctx", "2k"], "did you mean fp8"),
    (["--kv", "bf16", "--ctx", "2k"], "nothing to compare"),
    (["--kv", "fp8", "--ctx", "1m"], "262144 positions"),
    (["--kv", "fp8", "--ctx", "many"], "not a number of tokens"),
    (["--kv", "window:3", "--ctx", "2k"], "at least 5"),
    (["--kv", "fp8", "--ctx", "2k", "--needles", "0"], "no needle"),
    (["--kv", "fp8", "--ctx", "2k", "--contexts", "0"], "--contexts"),
    (["--kv", "fp8", "--ctx", "2k", "--depths", "0,2"], "between 0"),
    (["--kv", "fp8", "--ctx", "2k", "--depths", "a"], "numbers"),
    (["--kv", "fp8", "--ctx", "2k", "--lengths", "1k"], "the longest length must be"),
    (["--kv", "fp8", "--ctx", "1k", "--lengths", "1000,1001,1k"], "end with the same sentence"),
    (["--kv", "fp8", "--ctx", "64"], "length"),
    (["--kv", "fp8", "--ctx", "2k", "--out", "caf\udce9"], "not UTF-8"),
    (["--kv", "fp8", "--ctx", "2k", "--model", "/no/such/model"], "no directory"),
    (["--kv", "fp8", "--ctx", "2k", "--haystack", "/no/such/file"], "/no/such/file"),
    (["--kv", "fp8", "--ctx", "2k", "--device", "tpu"], "--device tpu"),
    (["--kv", "fp8", "--ctx", "2k", "--gate", "nothing"], "nothing"),
    (["--kv", "fp8", "--ctx", "2k", "--gate", ""], "unknown policy ''"),
    (["--kv", "fp8", "--ctx", "2k", "--lengths", ""], "no value is given"),
    (["--kv", "fp8", "--ctx", "2k", "--depths", ","], "no value is given"),
    (["--kv", "fp8", "--ctx", "2k", "--threads", "100000"], "--threads"),
    (["--kv", "window:9999999999999999999999", "--ctx", "2k"], "more tokens than any model reads"),
    (["--kv", "window:2k", "--ctx", "2k"], "keeps every token, so it is bf16"),
    (["--kv", "fp8", "--ctx", "2k", "--contexts", "1000000000000"], "1 to 10,000"),
    (["--kv", "fp8"], "--ctx"),
    (["--ctx", "2k", "--tasks", "needless"], "did you mean needles"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_sentence_and_leaves_nothing(arguments: list[str], told: str, tmp_path: Path) -> None:
    done = kveval("run", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_model_directory_without_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = kveval("run", "--kv", "fp8", "--ctx", "2k", "--model", "model", cwd=tmp_path)
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


def test_foreign_and_unwritable_directories_are_refused(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    small = ["run", "--kv", "fp8", "--ctx", "2k", "--needles", "1", "--contexts", "1"]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("cat")
    done = kveval(*small, "--out", tmp_path / "photos")
    assert (done.returncode, list((tmp_path / "photos").iterdir())) == (2, [tmp_path / "photos" / "cat.jpg"])
    assert "holds other things (cat.jpg ...)" in done.stderr
    done = kveval(*small, "--out", tmp_path / "photos" / "cat.jpg")
    assert done.returncode == 2
    assert "is a file" in done.stderr
    done = kveval(*small, "--out", "/proc/kveval/run")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    done = kveval(*small, "--out", whole[0])
    assert done.returncode == 2
    assert "holds another experiment" in done.stderr


def test_a_second_process_on_one_directory_is_refused_by_the_name_of_the_first(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    for name in ("plan.json", "journal.sqlite"):
        (directory / name).write_bytes((whole[0] / name).read_bytes())
    (directory / "holder.json").write_text(json.dumps({"process": os.getpid(), "host": "here"}))
    with FileLock(directory / "run.lock"):
        done = kveval("run", *FORMATS, *ASKED, "--out", directory)
    assert done.returncode == 2
    assert f"process {os.getpid()} on here" in done.stderr


@pytest.mark.parametrize("damage", ["manifest", "plan", "table", "columns", "schema", "edited plan", "edited rows"])
def test_a_damaged_run_directory_is_told_not_shown(
    whole: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, damage: str
) -> None:
    for file in whole[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if damage == "table":
        (tmp_path / "answers.parquet").write_bytes(b"PAR1 nonsense")
    elif damage == "columns":
        pd.DataFrame({"arm": ["bf16"]}).to_parquet(tmp_path / "answers.parquet")
    elif damage == "schema":
        (tmp_path / "manifest.json").write_text('{"schema": 99}')
    elif damage == "edited plan":
        plan = json.loads((tmp_path / "plan.json").read_text())
        plan["experiment"]["model"]["instrument"] = False
        (tmp_path / "plan.json").write_text(json.dumps(plan))
    elif damage == "edited rows":
        pd.read_parquet(tmp_path / "answers.parquet").assign(score=1.0).to_parquet(tmp_path / "answers.parquet")
    else:
        (tmp_path / f"{damage}.json").write_text("{")
    for command in (["report"], ["gate"]):
        done = kveval(*command, tmp_path)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert str(tmp_path) in done.stderr


def test_tables_have_their_columns(whole: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    for name, columns in TABLES.items():
        assert list(pd.read_parquet(whole[0] / f"{name}.parquet").columns) == list(columns)
