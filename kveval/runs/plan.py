"""What a run will do, resolved before anything is spent: every choice written out, and one hash over all of it."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import TYPE_CHECKING, Any

from kveval.errors import KvevalError
from kveval.formats.named import resolve_format
from kveval.formats.parse import parse_format
from kveval.formats.spec import BASELINES, KVFormat
from kveval.memory.geometry import Geometry, from_config
from kveval.memory.predict import stream_bytes, token_bytes
from kveval.models.catalogue import ModelSource, resolve
from kveval.runs.evidence import SCHEMA_VERSION, experiment_hash
from kveval.runs.tasks import build_texts, lm_eval_names, resolve_tasks, task_facts, task_metadata
from kveval.units import format_tokens

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from kveval.runs.texts import Text

BASELINE = "bf16"
DEPTHS = tuple(i / 10 for i in range(11))
MOST_ASKED_CONTEXTS = 10_000  # all contexts are built beforehand
SAMPLED_POSITIONS = 512  # of each context, where whole distributions are compared
PRUNED_TOKENS = (
    1024  # at each context's end (a quarter of it at most) are computed over what a pruning left of the rest
)
PIECES_AT_ONCE = 64  # of a haystack, between two looks at how many tokens they make
CALIBRATION_TOKENS = 2048  # of the haystack's text, but of no context: static scales are found on them


@dataclass(frozen=True)
class Request:
    """What the user asked for; None: the default for this model and length."""

    kv: tuple[str, ...]
    ctx_tokens: int
    model: str = "probe"
    baseline: str = BASELINE
    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = DEPTHS
    contexts: int | None = None
    needles: int | None = None  # for each cell and context
    tasks: tuple[str, ...] = ("needles",)
    protocol: str = "shared"
    haystack: str = "auto"
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    chunk_tokens: int = 4096
    command: str = ""


@dataclass(frozen=True)
class Arm:
    """One KV format of the run."""

    name: str
    fmt: KVFormat
    role: str  # baseline | candidate


@dataclass(frozen=True)
class Plan:
    """A resolved experiment. ``experiment`` is all that decides the rows; ``document`` is plan.json."""

    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    geometry: Geometry
    arms: tuple[Arm, ...]
    contexts: tuple[Text, ...]
    metadata: dict[str, Any]  # of the lm-eval tasks
    lm_eval_tasks: list[str]
    experiment: dict[str, Any]
    document: dict[str, Any] = field(repr=False)
    calibration: np.ndarray | None = field(repr=False)  # (tokens,) int64, where a format has static scales

    def arm(self, name: str) -> Arm:
        """The arm of this name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def hash(self) -> str:
        """SHA-256 of the experiment."""
        return str(self.document["hash"])

    @property
    def directory_name(self) -> str:
        """A name for the run directory: the same command gives the same one."""
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", self.source.name).strip("-.") or "model"
        return f"{model[-40:]}-{format_tokens(self.experiment['ctx_tokens']).replace(',', '')}-{self.hash[:10]}"


def resolve_plan(request: Request) -> Plan:
    """The plan of ``request``. Loads the tokenizer and builds the contexts, but no weights of a checkpoint.

    Raises KvevalError for an unknown format or model, and for a context beyond the model's positions.
    """
    from kveval.models.hashing import tokenizer_sha256
    from kveval.models.load import load_config, load_tokenizer, model_sha256

    arms = resolve_arms(request.kv, request.baseline)
    if request.contexts is not None and not 1 <= request.contexts <= MOST_ASKED_CONTEXTS:
        raise KvevalError(f"--contexts {request.contexts}: read 1 to {MOST_ASKED_CONTEXTS:,} contexts")
    source = resolve(request.model)
    config = load_config(source)
    geometry = from_config(config)
    for arm in arms:
        token_bytes(geometry, arm.fmt)  # refuses a format that cannot store this head_dim
    check_context(request.ctx_tokens, geometry, source)
    refuse_idle(arms, geometry, request.ctx_tokens)
    tokenizer = load_tokenizer(source)
    tasks = resolve_tasks(request.tasks, request.protocol)
    metadata = task_metadata(request, tasks, source)
    contexts = build_texts(tokenizer, tasks, metadata)
    source_haystack = next((context.haystack for context in contexts if context.haystack), ("noise", ""))
    refuse_idle(arms, geometry, max(len(context.ids) for context in contexts))
    calibrated = any(arm.fmt.calibrated for arm in arms)
    calibration = calibration_ids(tokenizer, source_haystack[0], request) if calibrated else None
    experiment: dict[str, Any] = {
        "model": {
            "name": source.name,
            "source": source.kind,
            "sha256": model_sha256(source),
            "instrument": source.instrument,
            "architecture": (config.get("architectures") or [config.get("model_type", "unknown")])[0],
            "layers": geometry.layers,
            "kv_heads": geometry.kv_heads,
            "head_dim": geometry.head_dim,
            "positions": geometry.positions,
        },
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "versions": versions(),
        "engine": engine_settings(request),
        "arms": [
            {
                "name": arm.name,
                "kv": arm.fmt.name,
                "role": arm.role,
                "lossy": arm.fmt.lossy,
                "bytes_per_token": token_bytes(geometry, arm.fmt),
            }
            for arm in arms
        ],
        "ctx_tokens": request.ctx_tokens,
        "task": task_facts(request, tasks, metadata, contexts),
        "contexts": [
            {"context": context.context, "kind": context.kind, "sha256": context.sha256, "tokens": len(context.ids)}
            for context in contexts
        ],
        "divergence": {
            "sampled_positions": SAMPLED_POSITIONS,
            "pruned_tokens": PRUNED_TOKENS if any(arm.fmt.pruning for arm in arms) else 0,
        },
        "calibration": {
            "haystack": source_haystack[0],
            "tokens": len(calibration),
            "sha256": hashlib.sha256(calibration.tobytes()).hexdigest(),
        }
        if calibration is not None
        else None,
    }
    document = {
        "schema": SCHEMA_VERSION,
        "hash": experiment_hash(experiment),
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": request.command,
        "machine": machine(experiment["engine"]["device"]),
        "experiment": experiment,
    }
    names = lm_eval_names(tasks, request.protocol)
    return Plan(source, tokenizer, geometry, arms, contexts, metadata, names, experiment, document, calibration)


def calibration_ids(tokenizer: PreTrainedTokenizerBase, haystack_name: str, request: Request) -> np.ndarray:
    """Token ids (tokens,) int64 of the text that static scales are found on: the haystack's, in an order of its own."""
    import numpy as np

    from kveval.samples.haystack import haystack

    wanted = min(CALIBRATION_TOKENS, request.ctx_tokens)
    pieces = haystack(haystack_name).pieces(request.seed, -1)
    text, ids = "", list[int]()
    while len(ids) < wanted:
        text += "".join(islice(pieces, PIECES_AT_ONCE))
        ids = tokenizer.encode(text)
    return np.asarray(ids[:wanted], dtype=np.int64)


def resolve_arms(names: Sequence[str], baseline: str = BASELINE) -> tuple[Arm, ...]:
    """The baseline and a candidate for each format, in the order asked for; a format named twice counts once.

    Raises KvevalError when there is no candidate, or the baseline is no 16-bit format.
    """
    formats = list(dict.fromkeys(resolve_format(name) for name in names))
    first = parse_format(baseline)
    if first.name not in BASELINES:
        raise KvevalError(
            f"--baseline {baseline}: candidates are compared with a 16-bit cache, {' or '.join(BASELINES)}"
        )
    candidates = [fmt for fmt in formats if fmt != first]
    if not candidates:
        raise KvevalError(
            f"nothing to compare: {first.name} is the baseline of this run; add a candidate, for instance --kv fp8"
        )
    return (
        Arm(first.name, first, "baseline"),
        *(Arm(fmt.name, fmt, "candidate") for fmt in candidates),
    )


def refuse_idle(arms: Sequence[Arm], geometry: Geometry, tokens: int) -> None:
    """Raises KvevalError for a format that does nothing within ``tokens`` tokens: its result would be another format's.

    That is a window or a pruning that keeps them all, and a residual that holds them all unquantised.
    """
    for arm in arms:
        fmt, told = arm.fmt, f"{arm.name} at {tokens:,} tokens"
        if (fmt.window or fmt.pruning) and fmt.kept(tokens) >= tokens:
            rest = replace(fmt, window=None, pruning=None)
            raise KvevalError(
                f"{told} keeps every token, so it is {rest.name}: give a smaller window or a longer context, or ask for "
                f"{rest.name}"
            )
        plain = replace(fmt, keys=BASELINE, values=BASELINE, residual=None, rotate=False, skip_layers=0)
        if fmt.quantised and stream_bytes(geometry, fmt, tokens) == stream_bytes(geometry, plain, tokens):
            raise KvevalError(
                f"{told} quantises nothing, so it is {plain.name}: its residual window holds all of them; give a smaller "
                "residual= or a longer context"
            )


def check_context(ctx_tokens: int, geometry: Geometry, source: ModelSource) -> None:
    """Raises KvevalError when the model has fewer positions than the context."""
    if ctx_tokens > geometry.positions:
        raise KvevalError(
            f"--ctx {ctx_tokens}: '{source.name}' has {geometry.positions} positions; "
            f"ask for --ctx {format_tokens(geometry.positions).replace(',', '')} or less"
        )


def engine_settings(request: Request) -> dict[str, Any]:
    """Device, arithmetic and threads, resolved. Raises KvevalError for a device that is not there."""
    import torch

    from kveval.cache.attention import NAME
    from kveval.engines.transformers import default_dtype

    device = request.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise KvevalError(f"--device {device}: use cpu, cuda or auto")
    if device == "cuda" and not torch.cuda.is_available():
        raise KvevalError(
            "--device cuda: torch sees no CUDA GPU here; use --device cpu, or install a CUDA build of torch"
        )
    return {
        "name": "transformers",
        "attention": NAME,
        "device": device,
        "device_name": device_name(device),
        "compute_dtype": str(default_dtype(device)).removeprefix("torch."),
        "threads": request.threads or usable_cores(),
        "chunk_tokens": request.chunk_tokens,
    }


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of what the rows depend on."""
    found = {"python": platform.python_version()}
    for package in ("kveval", "torch", "transformers", "tokenizers", "lm_eval"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(device: str) -> dict[str, Any]:
    """Where the run happens; not part of the experiment's hash."""
    import psutil

    return {
        "cpu": device_name("cpu"),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "device_name": device_name(device),
    }


def device_name(device: str) -> str:
    """Name of the processor or GPU that computes; rows of two kinds are never mixed in one run."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return _cpu_name()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
