"""The report's sentences: the question, what a probe run is not about, what was not measured, what was run on what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kveval.report.wording import count, listing, percent
from kveval.units import format_bytes, format_tokens

if TYPE_CHECKING:
    from kveval.policy import Policy
    from kveval.report.model import Arm, CheckRow, Grid


def question(experiment: dict[str, Any]) -> str:
    """The run's question in one sentence."""
    formats = [arm["kv"] for arm in experiment["arms"] if arm["role"] == "candidate"]
    model, tokens = experiment["model"]["name"], int(experiment["ctx_tokens"])
    return f"May {model} be served with a KV cache in {listing(formats, 'or')} at {tokens:,} tokens?"


def setting(plan: dict[str, Any]) -> str:
    """What was run on what, on one line."""
    experiment, machine = plan["experiment"], plan.get("machine", {})
    engine, versions = experiment["engine"], experiment.get("versions", {})
    version = versions.get(engine["name"])
    parts = [
        f"{experiment['model']['name']} on {engine['name']}" + (f" {version}" if version else ""),
        f"{engine.get('attention')} attention, {engine.get('compute_dtype')}",
        _joined(machine, ("device_name", "cpu"), cores="cores"),
        str(plan.get("created", ""))[:10],
    ]
    return "; ".join(part for part in parts if part)


def instrument_notice(experiment: dict[str, Any]) -> str | None:
    """What a run on the built-in probe says, in plain words. None for any other model."""
    if not experiment["model"].get("instrument"):
        return None
    name = experiment["model"]["name"]
    return (
        f"This run measures the instrument, not your model. '{name}' is a reference transformer whose weights are "
        "computed, not trained: its right answers are known, so it shows what the KV format does to exact recall. "
        "To judge a model that you want to serve, run the same command with --model."
    )


def not_measured(
    experiment: dict[str, Any], arms: tuple[Arm, ...], grids: tuple[Grid, ...], checks: tuple[CheckRow, ...]
) -> tuple[str, ...]:
    """What the numbers leave open, each as one sentence that ends with the arms it is about."""
    open_points: dict[str, list[str]] = {}
    for row in checks:
        if row.status == "not checked":
            open_points.setdefault(f"Check '{row.check}': {row.detail}", []).extend([row.arm] if row.arm else [])
    for arm in arms:
        for line in _gaps(arm):
            open_points.setdefault(line, []).append(arm.name)
    for grid in grids:
        empty = sum(cell is None for row in grid.cells for cell in row)
        if empty:
            line = f"{count(empty, 'cell')} of the length x depth grid of {grid.task}: no question"
            open_points.setdefault(line, []).append(grid.arm)
    told = [f"{line}{_of(named, len(arms))}." for line, named in open_points.items()]
    return (*told, *_scope(experiment))


def _of(named: list[str], arms: int) -> str:
    if not named:
        return ""
    return " (all arms)" if len(set(named)) == arms else f" ({listing(named)})"


def _gaps(arm: Arm) -> list[str]:
    lines = []
    if arm.pairing_error:
        lines.append(f"Retention: {arm.pairing_error}")
    if arm.asked > arm.scored:
        lines.append(f"{count(arm.asked - arm.scored, 'question')} of {arm.asked:,}: no score")
    if arm.role == "candidate":
        if arm.divergence is None:
            lines.append(f"Divergence: {arm.divergence_error or 'no row of it'}")
        elif arm.coverage and arm.coverage.sampled < arm.coverage.scored:
            sampled = f"{arm.coverage.sampled:,} of {arm.coverage.scored:,} positions were compared"
            lines.append(f"KL and top-1 agreement over whole contexts: {sampled}")
    if not arm.footprints:
        lines.append("Memory")
    missing = [name for name, rate in (("Prefill", arm.prefill), ("Decode", arm.decode)) if rate is None]
    return [*lines, *(f"{name} speed" for name in missing)]


def _scope(experiment: dict[str, Any]) -> list[str]:
    task, engine = experiment["task"], experiment["engine"]
    lines = []
    if experiment["model"].get("instrument"):
        lines.append("Any trained model: the probe copies and does nothing else.")
    lines.append(f"Any task but {task['name']}.")
    own = "other engines have kernels and scales of their own"
    lines.append(f"Any engine but {engine['name']} on {engine['device']}: {own}.")
    lines.append("Several streams at once: memory and speed are those of one stream.")
    return lines


def facts(plan: dict[str, Any], policy: Policy) -> tuple[tuple[str, str], ...]:
    """Label and value of all that a reader needs to judge or repeat the run."""
    experiment = plan["experiment"]
    rows = [*_model_facts(experiment), *_engine_facts(experiment), *_task_facts(experiment)]
    machine = plan.get("machine", {})
    rows += [
        (
            "Policy",
            f"{policy.name}: retention {percent(policy.retention_margin)}, confidence {percent(policy.confidence)}",
        ),
        ("Machine", _joined(machine, ("device_name", "cpu"), cores="cores", memory_bytes="memory", platform="")),
        ("Started", str(plan.get("created", ""))),
        ("Plan hash", str(plan.get("hash", ""))),
    ]
    return tuple((label, value) for label, value in rows if value)


def _model_facts(experiment: dict[str, Any]) -> list[tuple[str, str]]:
    model = experiment["model"]
    shape = [
        str(model[key]) if key == "architecture" else f"{model[key]:,} {unit}"
        for key, unit in _MODEL_UNITS.items()
        if model.get(key) is not None
    ]
    return [
        ("Model", f"{model['name']} ({model.get('source', 'unknown source')})"),
        ("Geometry", ", ".join(shape)),
        ("Model sha256", str(model.get("sha256") or "")),
        ("Tokenizer sha256", str(experiment.get("tokenizer_sha256") or "")),
    ]


_MODEL_UNITS = {
    "architecture": "",
    "layers": "layers",
    "kv_heads": "KV heads",
    "head_dim": "elements a head",
    "positions": "positions",
    "parameters": "parameters",
}


def _engine_facts(experiment: dict[str, Any]) -> list[tuple[str, str]]:
    engine, versions = experiment["engine"], experiment.get("versions", {})
    known = {"name", "attention", "device", "compute_dtype", "threads", "chunk_tokens"}
    arithmetic = f"{engine.get('compute_dtype')} on {engine['device']}"
    return [
        ("Engine", f"{engine['name']}, {engine.get('attention')} attention, {arithmetic}"),
        ("Threads", str(engine.get("threads") or "")),
        ("Chunk", f"{engine['chunk_tokens']:,} tokens" if engine.get("chunk_tokens") else ""),
        ("Engine options", ", ".join(f"{key} {value}" for key, value in sorted(engine.items()) if key not in known)),
        ("Versions", ", ".join(f"{package} {version}" for package, version in versions.items())),
    ]


def _task_facts(experiment: dict[str, Any]) -> list[tuple[str, str]]:
    task = experiment["task"]
    haystack = task.get("haystack") or {}
    lengths = ", ".join(format_tokens(int(length)) for length in task.get("lengths", ()))
    read = f"{count(len(experiment['contexts']), 'context')}, lengths {lengths}"
    return [
        ("Task", f"{task['name']}, {task.get('protocol')} protocol, {read}"),
        ("Needles", f"{task['needles_per_cell']} in each cell of a context" if task.get("needles_per_cell") else ""),
        ("Seed", str(task.get("seed", ""))),
        ("Haystack", f"{haystack.get('name')}, sha256 {haystack.get('sha256')}" if haystack else ""),
    ]


def _joined(machine: dict[str, Any], names: tuple[str, ...], **units: str) -> str:
    """The machine on one line: its names, then what has a unit."""
    parts = list(dict.fromkeys(str(machine[key]) for key in names if machine.get(key)))
    for key, unit in units.items():
        value = machine.get(key)
        if value is not None:
            parts.append(format_bytes(value) + " memory" if key == "memory_bytes" else f"{value} {unit}".strip())
    return ", ".join(parts)
