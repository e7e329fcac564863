"""What the lm-eval tasks in tasks/ call, and the contexts behind their documents.

A document is small: it names its question. The contexts (megabytes of text each) are built once in a process, and the
runner's contexts are the very objects that lm-eval's documents speak of.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kveval.errors import EvidenceError, KvevalError
from kveval.resources import data_path
from kveval.samples.context import Context, Question, build_context, prompt_ids, prompt_text
from kveval.samples.haystack import Haystack, haystack
from kveval.samples.layout import Grid
from kveval.samples.needles import TASK, UNTIL, generation_budget
from kveval.samples.scoring import score
from kveval.units import parse_tokens

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

__all__ = [
    "TASK",
    "UNTIL",
    "doc_to_target",
    "doc_to_text",
    "generation_budget",
    "load_tokenizer",
    "needle_grid",
    "plan_contexts",
    "process_results",
    "prompt_ids",
    "question_of",
    "task_manager",
    "tasks_path",
]

_TOKENIZER_KEYS = ("tokenizer", "pretrained", "model")  # the first that is given counts
_TOKENIZERS: dict[str, Any] = {}  # by fingerprint: documents find the tokenizer that their contexts were built with


@dataclass(frozen=True)
class Settings:
    """The task's metadata, checked, with defaults filled in; tasks/needles/kveval_needle_grid.yaml explains it."""

    lengths: tuple[int, ...] = (4096,)
    depths: tuple[float, ...] = tuple(tenth / 10 for tenth in range(11))
    contexts: int = 1
    needles_per_cell: int = 2
    seed: int = 0
    haystack: str = "auto"

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Settings:
        """Settings from lm-eval's metadata, which also holds the model's arguments.

        Raises KvevalError for values that are not usable and for a key that looks like a misspelt one.
        """
        known = {field.name for field in fields(cls)}
        for key in set(metadata) - known - set(_TOKENIZER_KEYS):
            if meant := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
                raise KvevalError(f"metadata key '{key}' is not known: did you mean '{meant[0]}'?")
        given = {key: value for key, value in metadata.items() if key in known and value is not None}
        settings = cls(**given)
        grid = Grid.of(_lengths(settings.lengths), _listed("depths", settings.depths), settings.needles_per_cell)
        require_whole("contexts", settings.contexts, 1)
        require_whole("seed", settings.seed, None)
        if settings.haystack == "auto":
            given["haystack"] = "noise" if is_instrument(metadata) else "pydoc"
        return cls(**{**given, **asdict(grid)})


def needle_grid(**metadata: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: split -> datasets.Dataset, one small document for each question.

    Raises KvevalError when the metadata is not usable, no tokenizer is named, or the model would not get whole prompts.
    """
    from datasets import Dataset  # type: ignore[import-untyped]

    name = require_tokenizer_name(metadata)
    settings = Settings.of(metadata)
    refuse_short_model(metadata, settings.lengths[-1])
    tokenizer = load_tokenizer(name)
    contexts = plan_contexts(tokenizer, metadata)
    plan = json.dumps({"tokenizer": _register(tokenizer), **asdict(settings)})
    rows = [
        {
            "context": question.context,
            "length": question.length,
            "depth": question.depth,
            "number": question.number,
            "key": context.needles[question.needle].key,
            "expected": question.expected,
            "plan": plan,
        }
        for context in contexts
        for question in context.questions
    ]
    return {"test": Dataset.from_list(rows)}


def plan_contexts(tokenizer: Any, metadata: Mapping[str, Any]) -> list[Context]:
    """The contexts of the task under ``metadata``: the same objects for equal tokenizers and settings."""
    settings = Settings.of(metadata)
    source, fingerprint = haystack(settings.haystack), _register(tokenizer)
    return [_built(fingerprint, settings, source, number) for number in range(settings.contexts)]


def question_of(doc: Mapping[str, Any]) -> tuple[Context, Question]:
    """The context and the question that a document of the task names."""
    context = _context_of(doc["plan"], doc["context"])
    for question in context.questions:
        if (question.length, question.number) == (doc["length"], doc["number"]):
            return context, question
    raise EvidenceError(f"context {doc['context']} has no question {doc['number']} at length {doc['length']}")


def doc_to_text(doc: Mapping[str, Any]) -> str:
    """The whole prompt."""
    return prompt_text(*question_of(doc))


def doc_to_target(doc: Mapping[str, Any]) -> str:
    """The value asked for."""
    return str(doc["expected"])


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
    """``recall``: 1 when the value is in the answer, else 0; and what its error, clustered by context, is made of."""
    value = score(str(doc["expected"]), results[0])
    return {"recall": value, "recall_stderr": (doc["context"], value)}


def load_tokenizer(name: str) -> Any:
    """The tokenizer of model ``name``: probe, a catalogue model, a checkpoint or tokenizer directory, or a hub id.

    Raises KvevalError when there is none.
    """
    from kveval.models.catalogue import ModelSource, resolve
    from kveval.models.load import load_tokenizer as load

    directory = Path(name).expanduser()
    if name != "probe" and directory.is_dir():  # a tokenizer's own directory needs no weights
        return load(ModelSource(name, "directory", str(directory.resolve())))
    return load(resolve(name))


def tasks_path() -> Path:
    """Directory of the task YAMLs, for lm-eval's ``--include_path``."""
    return data_path("tasks")


def task_manager(metadata: Mapping[str, Any], path: Path | None = None) -> TaskManager:
    """lm-eval's TaskManager over kveval's tasks and groups alone.

    lm-eval drops a YAML that it cannot read without a word, and takes a group's member that it does not know for a task
    written there; here both are a KvevalError naming the file.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    root = path or tasks_path()
    manager = TaskManager(include_path=str(root), include_defaults=False, metadata=dict(metadata))
    for file in sorted(root.rglob("*.yaml")):
        try:
            config = load_yaml(file)
            name = config.get("group") or config.get("task")
            members = _group_members(config)
        except Exception as error:
            raise KvevalError(
                f"task file '{file}' cannot be loaded ({error}): mend it or install kveval again"
            ) from error
        if name not in manager.all_tasks or manager.task_index[name].yaml_path != file:
            raise KvevalError(
                f"task file '{file}' (task {name!r}) is not known to lm-eval: give it a task name of its own"
            )
        if unknown := [member for member in members if member not in manager.task_index]:
            raise KvevalError(
                f"task file '{file}': group {name!r} names {unknown[0]!r}, which is no task: mend the name"
            )
    return manager


def _group_members(config: Mapping[str, Any]) -> list[str]:
    """The names in a group's ``task`` list; nothing for a task."""
    from lm_eval.config.group import GroupConfig

    if "group" not in config:
        return []
    known = {field.name for field in fields(GroupConfig)}
    group = GroupConfig(**{key: value for key, value in config.items() if key in known})  # raises what lm-eval would
    return [
        member if isinstance(member, str) else str(member.get("group") or member.get("task"))
        for member in group.task or []
    ]


@lru_cache(maxsize=32)
def _built(fingerprint: str, settings: Settings, source: Haystack, number: int) -> Context:
    return build_context(
        _TOKENIZERS[fingerprint],
        seed=settings.seed,
        context=number,
        lengths=settings.lengths,
        depths=settings.depths,
        needles_per_cell=settings.needles_per_cell,
        haystack=source,
    )


@lru_cache(maxsize=32)
def _context_of(plan: str, number: int) -> Context:
    values = json.loads(plan)
    tokenizer = _TOKENIZERS.get(values.pop("tokenizer"))
    if tokenizer is None:
        raise EvidenceError("this document was made in another process: build the task again in this one")
    return plan_contexts(tokenizer, values)[number]


def _register(tokenizer: Any) -> str:
    """Fingerprint of the tokenizer, under which ``_TOKENIZERS`` keeps it."""
    fingerprint = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    _TOKENIZERS.setdefault(fingerprint, tokenizer)
    return fingerprint


def tokenizer_name(metadata: Mapping[str, Any]) -> str | None:
    """The first of ``tokenizer``, ``pretrained`` and ``model`` that is given; lm-eval's backends differ in how they call it."""
    names = (metadata.get(key) for key in _TOKENIZER_KEYS)
    return next((name for name in names if isinstance(name, str) and name), None)


def require_tokenizer_name(metadata: Mapping[str, Any]) -> str:
    """The tokenizer's name. Raises KvevalError when none is given."""
    name = tokenizer_name(metadata)
    if name is None:
        raise KvevalError('no tokenizer: give --model_args pretrained=MODEL, or --metadata \'{"tokenizer": "MODEL"}\'')
    return name


def is_instrument(metadata: Mapping[str, Any]) -> bool:
    """Whether the model is the probe, built in or exported."""
    from kveval.models.catalogue import PROBE_MARK, is_probe

    name = metadata.get("pretrained") or tokenizer_name(metadata) or ""
    return is_probe(name) or bool(_config(name).get(PROBE_MARK))


def _config(name: str) -> dict[str, Any]:
    file = Path(name).expanduser() / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def refuse_short_model(metadata: Mapping[str, Any], longest: int, generated: int = 0) -> None:
    """lm-eval cuts a prompt that is longer than the model's max_length, and scores it: refuse such lengths beforehand.

    Its API models have a max_length of 2,048 unless told otherwise, whatever the server can do.
    """
    config = _config(str(metadata.get("pretrained") or ""))
    limits = [metadata.get("max_length"), 2048 if metadata.get("base_url") else None]
    limits += [config.get(key) for key in ("n_positions", "max_position_embeddings", "n_ctx")]
    limit = next((int(limit) for limit in limits if limit), None)
    if limit is not None and longest + generated > limit:
        room = f" with {generated} tokens that lm-eval may generate after it" if generated else ""
        raise KvevalError(
            f"length {longest:,}{room} is more than the model's max_length of {limit:,}: lm-eval would cut the prompts; give "
            f"shorter lengths, or a model argument max_length={longest} if the model can read so much"
        )


def _listed(name: str, values: Any) -> list[Any]:
    listed = list(values) if isinstance(values, (list, tuple)) else [values]
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in listed):
        raise KvevalError(f"{name} {values!r} are not usable: give a list of numbers")
    return listed


def _lengths(values: Any) -> list[Any]:
    values = values if isinstance(values, (list, tuple)) else [values]
    return _listed("lengths", [parse_tokens(value) if isinstance(value, str) else value for value in values])


def require_whole(name: str, value: Any, least: int | None) -> None:
    """Raise KvevalError unless ``value`` is a whole number, of ``least`` or more where that is given."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        accepted = "a whole number" if least is None else f"a whole number of {least} or more"
        raise KvevalError(f"{name} is {value!r}: give {accepted}")
