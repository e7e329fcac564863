"""Each check of the evidence: what makes it pass, and what makes it fire."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from kveval.measure.checks import discriminative, engaged, paired, run_checks, whole_prompts
from kveval.runs.evidence import TABLES

FP8 = {"name": "fp8", "kv": "fp8", "role": "candidate", "lossy": True}
BF16 = {"name": "bf16", "kv": "bf16", "role": "baseline", "lossy": False}


def footprint(stored: int, predicted: int = 1000, arm: str = "fp8") -> pd.DataFrame:
    return pd.DataFrame([{"arm": arm, "context": 0, "stored_bytes": stored, "predicted_bytes": predicted}])


def divergence(moved: bool) -> pd.DataFrame:
    return pd.DataFrame({"arm": "fp8", "nll_baseline": [1.0, 2.0], "nll": [1.0, 2.5 if moved else 2.0]})


def answers(**changes: Any) -> pd.DataFrame:
    """Two arms, two prompts each, all right; ``changes`` overrides columns of the candidate's rows."""
    rows = []
    for arm in ("bf16", "fp8"):
        for number in (0, 1):
            row = {
                "arm": arm,
                "task": "t",
                "length": 128,
                "depth": 0.0,
                "prompt_sha256": f"hash{number}",
                "prompt_tokens": 100,
                "read_tokens": 100,
                "score": 1.0,
                "status": "scored",
            }
            rows.append(row | (changes if arm == "fp8" else {}))
    return pd.DataFrame(rows)


def one(rows: Any) -> tuple[str, str]:
    """Status and detail of the only row."""
    (row,) = rows
    return row[2], row[3]


def test_engaged_passes_on_the_formats_bytes_and_moved_log_probabilities() -> None:
    assert one(engaged(FP8, footprint(1000), divergence(True)))[0] == "passed"


def test_engaged_fires_when_more_is_stored_than_the_format_says() -> None:
    """A format that silently stays in BF16 stores twice the bytes (case 13's kind of fault)."""
    status, told = one(engaged(FP8, footprint(2000), divergence(True)))
    assert status == "failed"
    assert "2,000 B" in told
    assert "1,000 B" in told


def test_engaged_fires_on_identical_log_probabilities() -> None:
    status, told = one(engaged(FP8, footprint(1000), divergence(False)))
    assert status == "failed"
    assert "to the last bit" in told


def test_engaged_fires_without_a_footprint() -> None:
    assert one(engaged(FP8, footprint(1000, arm="other"), divergence(True)))[0] == "failed"


def test_engaged_lets_the_baseline_equal_itself() -> None:
    assert one(engaged(BF16, footprint(1000, arm="bf16"), divergence(False)))[0] == "passed"


def test_whole_prompts_fires_on_a_shortened_prompt() -> None:
    assert one(whole_prompts("fp8", answers()))[0] == "passed"
    status, told = one(whole_prompts("fp8", answers(read_tokens=55)))
    assert status == "failed"
    assert "55 of 100" in told
    assert one(whole_prompts("nobody", answers()))[0] == "failed"


def test_paired_fires_on_unequal_prompts() -> None:
    assert one(paired("bf16", "fp8", answers()))[0] == "passed"
    assert one(paired("bf16", "fp8", answers(prompt_sha256="other")))[0] == "failed"
    assert one(paired("bf16", "fp8", answers().iloc[:3]))[0] == "failed"


def test_discriminative_fires_when_the_baseline_cannot_answer() -> None:
    frame = answers()
    assert one(discriminative("bf16", 128, frame))[0] == "passed"
    frame.loc[frame["arm"] == "bf16", "score"] = 0.0
    assert one(discriminative("bf16", 128, frame))[0] == "failed"
    assert one(discriminative("bf16", 256, answers()))[0] == "failed"


def test_every_check_has_a_row_and_what_was_not_checked_says_so() -> None:
    tables = {
        "answers": answers(),
        "divergence": divergence(True),
        "footprint": pd.concat([footprint(1000, arm="bf16"), footprint(1000)]),
    }
    found = run_checks({"arms": [BF16, FP8], "ctx_tokens": 128}, tables)
    assert list(found.columns) == list(TABLES["checks"])
    by_check = {check: set(rows) for check, rows in found.groupby("check")["status"]}
    assert by_check == {
        "engaged": {"passed"},
        "whole prompts": {"passed"},
        "paired": {"passed"},
        "discriminative": {"passed"},
        "sane": {"not checked"},
        "noise floor": {"not checked"},
    }


@pytest.mark.parametrize("arm", ["bf16", "fp8"])
def test_checks_cover_both_arms(arm: str) -> None:
    assert one(whole_prompts(arm, answers()))[0] == "passed"
