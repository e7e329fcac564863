"""From the journal to the tables of a run (``runs.evidence.TABLES``)."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kveval.runs.evidence import TABLES
from kveval.runs.journal import Journal
from kveval.runs.plan import Arm, Plan
from kveval.runs.texts import Text
from kveval.samples.ruler.score import score, status

if TYPE_CHECKING:
    import pandas as pd

    from kveval.engines.base import Prompt


def build_rows(plan: Plan, journal: Journal, prompts: dict[int, list[Prompt]]) -> dict[str, pd.DataFrame]:
    """All tables but ``checks``, columns and dtypes as TABLES says."""
    return {
        "answers": _table("answers", _answers(plan, journal, prompts)),
        "divergence": _divergence(plan, journal),
        "footprint": _table("footprint", _footprint(plan, journal)),
        "throughput": _table(
            "throughput", [dict(zip(TABLES["throughput"], span, strict=True)) for span in journal.spans()]
        ),
    }


def _table(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows, columns=list(TABLES[name])).astype(TABLES[name])


def _answers(plan: Plan, journal: Journal, prompts: dict[int, list[Prompt]]) -> list[dict[str, Any]]:
    rows = []
    for arm in plan.arms:
        for context in plan.contexts:
            for question, prompt in zip(context.questions, prompts[context.context], strict=True):
                answer = journal.get(arm.name, prompt.sha256)
                assert answer is not None
                outcome = status(answer.text, answer.finish_reason, question.expected, question.any_of)
                told = score(question.expected, answer.text, question.any_of) if outcome == "scored" else np.nan
                rows.append(
                    {
                        "arm": arm.name,
                        "task": question.task,
                        "context": context.context,
                        "length": question.length,
                        "depth": question.depth,
                        "question": question.number,
                        "prompt_sha256": prompt.sha256,
                        "prompt_tokens": answer.prompt_tokens,
                        "read_tokens": answer.read_tokens,
                        "needle_first": question.first,
                        "needle_last": question.last,
                        "expected": question.told,
                        "answer": answer.text,
                        "score": told,
                        "finish_reason": answer.finish_reason,
                        "status": outcome,
                        "error": "",
                    }
                )
    return rows


def _divergence(plan: Plan, journal: Journal) -> pd.DataFrame:
    import pandas as pd

    baseline = {row["context"]: row["nll"] for row in journal.readings(plan.arms[0].name)}
    contexts = {context.context: context for context in plan.contexts}
    parts = []
    for arm in plan.arms[1:]:
        for row in journal.readings(arm.name):
            context = contexts[row["context"]]
            positions = np.arange(1, len(context.ids))
            recorded = slice(first_recorded(plan, arm, len(context.ids)), None)
            kl, agree = (np.full(len(positions), np.nan, dtype=np.float32) for _ in range(2))
            sampled = sampled_positions(plan, context) - 1
            kl[sampled], agree[sampled] = row["kl"], row["top1_agree"]
            columns = {
                "arm": arm.name,
                "context": context.context,
                "position": positions,
                "scored": ~context.left_out[1:],
                "nll_baseline": baseline[context.context],
                "nll": row["nll"],
                "kl": kl,
                "top1_agree": agree,
            }
            table = pd.DataFrame(columns, columns=list(TABLES["divergence"])).iloc[recorded]
            parts.append(table.astype(TABLES["divergence"]))
    return pd.concat(parts, ignore_index=True)


def sampled_positions(plan: Plan, context: Text) -> np.ndarray:
    """Where whole distributions are compared, (positions,) int64 ascending."""
    from kveval.measure.divergence import sample_positions

    settings = plan.experiment["divergence"]
    seed = plan.experiment["task"]["seed"]
    return sample_positions(
        len(context.ids), settings["sampled_positions"], seed, context.context, look_on=look_on(plan, len(context.ids))
    )


def look_on(plan: Plan, tokens: int) -> int:
    """Of a context of ``tokens``, how many at the end are computed over a pruned cache, where an arm prunes."""
    return min(plan.experiment["divergence"]["pruned_tokens"], tokens // 4)


def first_recorded(plan: Plan, arm: Arm, tokens: int) -> int:
    """The first position whose prediction of the next token is recorded for ``arm``."""
    return tokens - look_on(plan, tokens) if arm.fmt.pruning is not None else 0


def _footprint(plan: Plan, journal: Journal) -> list[dict[str, Any]]:
    return [
        {"arm": arm.name, **{name: row[name] for name in TABLES["footprint"] if name != "arm"}}
        for arm in plan.arms
        for row in journal.readings(arm.name)
    ]


def write_tables(directory: Path, tables: dict[str, pd.DataFrame]) -> dict[str, str]:
    """Write each table as Parquet, whole or not at all; returns the SHA-256 of each file."""
    hashes = {}
    for name in TABLES:
        file = directory / f"{name}.parquet"
        partial = file.with_suffix(".partial")
        tables[name].to_parquet(partial, index=False)
        hashes[name] = hashlib.sha256(partial.read_bytes()).hexdigest()
        os.replace(partial, file)
    return hashes
