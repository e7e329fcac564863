"""The rows of a finished run, read back. Every number in a report is computed from these tables and from nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kveval.errors import KvevalError

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
_CHANGED = "the run directory is damaged or was changed; run it again"

# Column -> pandas dtype. A run writes one Parquet file for each table.
TABLES: dict[str, dict[str, str]] = {
    # One row per (arm, context, question). Arms join on prompt_sha256, never on order.
    "answers": {
        "arm": "string",
        "task": "string",
        "context": "int64",
        "length": "int64",  # the length that was asked for, tokens
        "depth": "float64",  # 0.0 start of the context .. 1.0 its end, as asked for
        "question": "int64",  # number of the question within (context, length)
        "prompt_sha256": "string",
        "prompt_tokens": "int64",
        # prompt tokens that the engine says it saw; differs from prompt_tokens when a prompt was shortened
        "read_tokens": "int64",
        "needle_first": "int64",  # position of the needle's first and last token in the context
        "needle_last": "int64",
        "expected": "string",
        "answer": "string",
        "score": "float64",  # NaN unless status is "scored"
        "finish_reason": "string",  # stop | length | eos
        "status": "string",  # scored | incomplete | error
        "error": "string",
    },
    # One row per (candidate arm, context, position of the predicted token); both arms' values, paired.
    "divergence": {
        "arm": "string",
        "context": "int64",
        "position": "int64",
        "scored": "bool",  # False inside planted needles: kept out of every mean
        "nll_baseline": "float32",  # nats
        "nll": "float32",
        "kl": "float32",  # nats, KL(baseline || candidate) over the whole vocabulary; NaN where not sampled
        "top1_agree": "float32",  # 1.0 / 0.0; NaN where not sampled
    },
    # One row per (arm, context), taken when the whole context was in the cache.
    "footprint": {
        "arm": "string",
        "context": "int64",
        "tokens": "int64",  # tokens read into the cache
        "predicted_bytes": "int64",  # by formula, all layers
        "stored_bytes": "int64",  # by the tensors, for the tokens kept
        "reserved_bytes": "int64",  # by the tensors, with the room they hold for growth
        "weights_bytes": "int64",
        "peak_bytes": "int64",  # peak of the process (CPU: resident set) or device (CUDA: allocator) during the reading
        "start_bytes": "int64",  # the same gauge before the reading
    },
    # One row per measured stretch of work.
    "throughput": {
        "arm": "string",
        "context": "int64",
        "phase": "string",  # prefill | record (log-probabilities) | ask | decode (one stream at a time, batch 1)
        "length": "int64",  # tokens in the cache at the end of the stretch
        "tokens": "int64",  # tokens computed
        "seconds": "float64",
    },
    "checks": {
        "check": "string",  # engaged | whole prompts | paired | discriminative | sane | noise floor
        "arm": "string",
        "status": "string",  # passed | failed | not checked
        "detail": "string",
    },
}


@dataclass(frozen=True)
class Evidence:
    """A finished run: its plan and its tables (columns and dtypes as in TABLES)."""

    path: Path
    plan: dict[str, Any]
    manifest: dict[str, Any]
    answers: pd.DataFrame
    divergence: pd.DataFrame
    footprint: pd.DataFrame
    throughput: pd.DataFrame
    checks: pd.DataFrame

    @property
    def baseline(self) -> str:
        """Name of the baseline arm."""
        return next(arm["name"] for arm in self.plan["experiment"]["arms"] if arm["role"] == "baseline")

    @property
    def candidates(self) -> list[str]:
        """Names of the candidate arms, in the order asked for."""
        return [arm["name"] for arm in self.plan["experiment"]["arms"] if arm["role"] == "candidate"]

    @property
    def rerun(self) -> str | None:
        """Name of the second baseline arm, which shows the noise floor; None where none was read."""
        return next((arm["name"] for arm in self.plan["experiment"]["arms"] if arm["role"] == "rerun"), None)


def load(path: Path) -> Evidence:
    """Evidence of the run directory ``path``.

    Raises KvevalError when there is no whole run there (no manifest.json) or it was written by another schema.
    """
    import pandas as pd

    if not path.is_dir():
        raise KvevalError(f"'{path}' is not a run directory: give the directory that 'kveval run' printed")
    if not (path / "manifest.json").is_file():
        unfinished = (path / "plan.json").is_file()
        hint = (
            "the run did not finish: start the same 'kveval run' again and it continues"
            if unfinished
            else "no run is there"
        )
        raise KvevalError(f"'{path}' holds no manifest.json: {hint}")
    manifest = read_json(path / "manifest.json")
    plan = read_json(path / "plan.json")
    if manifest.get("schema") != SCHEMA_VERSION:
        raise KvevalError(
            f"'{path}' was written with row schema {manifest.get('schema')!r}; this kveval reads schema {SCHEMA_VERSION}"
        )
    _refuse_changed(path, plan, manifest)
    tables: dict[str, pd.DataFrame] = {}
    for name, columns in TABLES.items():
        file = path / f"{name}.parquet"
        try:
            table = pd.read_parquet(file)
        except Exception as error:
            raise KvevalError(
                f"'{file}' cannot be read ({error}): the run directory is damaged; run it again"
            ) from error
        if list(table.columns) != list(columns):
            raise KvevalError(
                f"'{file}' has columns {list(table.columns)}, expected {list(columns)}: the run directory is damaged"
            )
        tables[name] = table.astype(columns)
    return Evidence(path=path, plan=plan, manifest=manifest, **tables)


def _refuse_changed(path: Path, plan: dict[str, Any], manifest: dict[str, Any]) -> None:
    """The plan and the tables must be those that the run wrote: an edited row would be reported as if it was measured."""
    if not (manifest.get("plan") == plan.get("hash") == experiment_hash(plan.get("experiment", {}))):
        raise KvevalError(f"'{path}/plan.json' is not the plan that this run carried out: {_CHANGED}")
    hashes = manifest.get("tables") or {}
    for name in TABLES:
        file = path / f"{name}.parquet"
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != hashes.get(name):
            raise KvevalError(f"'{file}' is not the file that this run wrote: {_CHANGED}")


def experiment_hash(experiment: dict[str, Any]) -> str:
    """SHA-256 of the experiment as canonical JSON."""
    text = json.dumps(experiment, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises KvevalError when there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvevalError(f"'{file}' cannot be read ({error}): the run directory is damaged") from error
    if not isinstance(value, dict):
        raise KvevalError(f"'{file}' holds no JSON object: the run directory is damaged")
    return value
