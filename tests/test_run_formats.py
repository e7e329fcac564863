"""Formats end to end on the probe, whose right answers are known: what each is made for, and what breaks it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from kveval.errors import KvevalError
from kveval.gate import Outcome, decide, load_policy
from kveval.report.data import build
from kveval.report.tables import formats_table, main_table
from kveval.runs.evidence import Evidence, load
from kveval.runs.plan import Request, resolve_plan
from kveval.runs.progress import Progress
from kveval.runs.runner import run

pytestmark = pytest.mark.e2e


def evidence_of(directory: Path, *kv: str, model: str = "probe", ctx_tokens: int = 2048, **asked: object) -> Evidence:
    """A run of a few questions in this process."""
    settings = {"contexts": 2, "needles": 2, "depths": (0.0, 0.3, 0.6, 1.0), "chunk_tokens": 512, "threads": 1}
    plan = resolve_plan(Request(kv, ctx_tokens, model=model, **settings | asked))  # type: ignore[arg-type]
    return load(run(plan, directory, Progress(quiet=True)))


def scores(evidence: Evidence) -> dict[str, float]:
    """Share of the questions that each arm answers right."""
    return {str(arm): float(score) for arm, score in evidence.answers.groupby("arm")["score"].mean().items()}


def test_an_outlier_channel_ruins_per_tensor_scales_and_not_per_channel_ones(tmp_path: Path) -> None:
    """Equal bits. One channel of 3e6 sets the scale of all: the others fall under E4M3's smallest number (issue 3)."""
    arms = ("fp8-tensor", "fp8-head", "fp8-token-head", "fp8-channel", "fp8")
    evidence = evidence_of(tmp_path / "run", *arms, model="probe:outlier=3e6")
    found = scores(evidence)
    assert found["bf16"] == found["fp8-channel"] == found["fp8"] == 1.0
    assert max(found["fp8-tensor"], found["fp8-head"], found["fp8-token-head"]) <= 0.05
    bits = {arm["name"]: arm["bytes_per_token"] for arm in evidence.plan["experiment"]["arms"]}
    assert bits["fp8-tensor"] == bits["fp8-channel"] == 1024
    verdicts = {arm.arm: arm.outcome for arm in decide(evidence, load_policy("exploratory")).arms}
    assert verdicts["fp8-tensor"] == Outcome.FAIL
    assert verdicts["fp8-channel"] != Outcome.FAIL


def test_an_outlier_channel_ruins_groups_along_the_token_and_not_kivis_along_the_channel(tmp_path: Path) -> None:
    evidence = evidence_of(tmp_path / "run", "int4-g32", "kivi4,residual=32", model="probe:outlier=1000")
    found = scores(evidence)
    assert found["bf16"] == found["kivi4,residual=32"] == 1.0
    assert found["int4-g32"] <= 0.05
    bits = {arm["name"]: arm["bytes_per_token"] for arm in evidence.plan["experiment"]["arms"]}
    assert bits["int4-g32"] == bits["kivi4,residual=32"] == 640


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Arms of every kind side by side."""
    arms = (
        "snapkv:0.5",
        "knorm:0.5,store=fp8-channel",
        "kivi4",
        "q8_0,values=q4_0",
        "int4-g32,rotate=hadamard",
        "swa:512",
    )
    return evidence_of(tmp_path_factory.mktemp("mixed") / "run", *arms)


def test_every_arm_is_whole_and_stores_what_its_format_says(mixed: Evidence) -> None:
    assert (mixed.footprint["stored_bytes"] == mixed.footprint["predicted_bytes"]).all()
    assert not (mixed.checks["status"] == "failed").any()
    assert set(mixed.answers["status"]) == {"scored"}
    assert len(mixed.answers) == 7 * 2 * 2 * 4 * 2


def test_a_pruned_arm_is_compared_where_pruning_is_seen(mixed: Evidence) -> None:
    """Only the end of each context is computed over a pruned cache; there the baseline's distributions wait, too."""
    rows = mixed.divergence
    tokens = {row["context"]: row["tokens"] for row in mixed.plan["experiment"]["contexts"]}
    assert mixed.plan["experiment"]["divergence"]["pruned_tokens"] == 1024
    for context, count in tokens.items():
        own = rows[rows["context"] == context]
        pruned, whole = (own[own["arm"] == name].set_index("position") for name in ("snapkv:0.5", "kivi4"))
        first = count - count // 4  # a quarter of so short a context
        assert list(pruned.index) == list(range(first + 1, count))
        assert list(whole.index) == list(range(1, count))
        assert pruned["kl"].notna().sum() >= 256
        pd.testing.assert_series_equal(pruned["nll_baseline"], whole.loc[pruned.index, "nll_baseline"])
        assert (pruned["nll"] != pruned["nll_baseline"]).mean() > 0.9


def test_static_scales_come_from_a_text_that_the_plan_names(mixed: Evidence) -> None:
    calibration = mixed.plan["experiment"]["calibration"]
    assert calibration["tokens"] == 2048
    assert calibration["haystack"] == "noise"
    again, other = (resolve_plan(Request(("fp8-head",), 2048, seed=seed)) for seed in (0, 1))
    assert again.experiment["calibration"] == calibration
    assert other.experiment["calibration"]["sha256"] != calibration["sha256"]
    assert resolve_plan(Request(("fp8",), 2048)).experiment["calibration"] is None
    assert again.calibration is not None
    for context in again.contexts:
        assert again.calibration.tolist() != list(context.ids[: len(again.calibration)])


def test_many_formats_stand_in_one_table_by_their_bytes(mixed: Evidence) -> None:
    report = build(mixed, load_policy("default"))
    table = formats_table(report)
    assert table is not None
    sizes = [float(values[0].text.removesuffix(" B").replace(",", "")) for _, values in table.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert table.rows[0][0] == "bf16"
    assert len(table.rows) == 7
    assert table.columns[4] == "PPL ratio"
    assert all(" to " in values[3].detail for name, values in table.rows if name != "bf16")
    ppl = dict(main_table(report).rows)["PPL"]
    assert ppl[0].text == ""  # the arms are compared at different positions: each says against what
    assert all("baseline's" in value.detail for value in ppl[1:])


def test_sixteen_bits_of_the_other_kind(tmp_path: Path) -> None:
    """Either 16-bit format can be the baseline; the other is then an arm that loses nothing."""
    evidence = evidence_of(tmp_path / "run", "bf16", "fp8", baseline="fp16", contexts=1)
    assert evidence.baseline == "fp16"
    assert evidence.candidates == ["bf16", "fp8"]
    found = scores(evidence)
    assert found["fp16"] == found["bf16"] == 1.0
    assert (evidence.checks.loc[evidence.checks["check"] == "engaged", "status"] == "passed").all()
    with pytest.raises(KvevalError, match="16-bit cache, bf16 or fp16"):
        resolve_plan(Request(("fp8",), 2048, baseline="q8_0"))
    with pytest.raises(KvevalError, match="nothing to compare: fp16 is the baseline"):
        resolve_plan(Request(("fp16",), 2048, baseline="fp16"))


def test_numbers_beyond_float16_are_told_and_not_stored_as_infinity(tmp_path: Path) -> None:
    with pytest.raises(KvevalError, match=r"keys of layer 1 at position \d+ hold numbers beyond 65504"):
        evidence_of(tmp_path / "run", "fp16", model="probe:outlier=3e6", contexts=1)
