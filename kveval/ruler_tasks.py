"""What the lm-eval tasks in tasks/ruler call: RULER by the strict protocol, one question in each prompt.

A document names its sample and holds what the answer must; the prompt (half a megabyte at 128k) is built when lm-eval asks
for it. Sample ``index`` is the same whichever others are built, in whichever order and process.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from kveval import lmtasks
from kveval.errors import KvevalError
from kveval.samples.encoded import special_prefix
from kveval.samples.haystack import haystack
from kveval.samples.ruler.registry import FAMILIES, OFFLINE, THIRTEEN
from kveval.samples.ruler.sample import Family, Sample, count_tokens, sample
from kveval.samples.ruler.score import score
from kveval.samples.shared.alone import build_alone
from kveval.samples.shared.context import SharedContext
from kveval.shared_tasks import KINDS
from kveval.units import parse_tokens

PROTOCOL = "strict"
LENGTHS = ("4k", "8k", "16k", "32k", "64k", "128k")  # those with tasks of their own
SAMPLES = 50  # RULER's tables have 500; their standard error is a third of this one
JOINT_TOKENS = 4  # where a chat template meets the text, tokens may fall otherwise than in either


@dataclass(frozen=True)
class Settings:
    """A task's metadata, checked, with defaults filled in; tasks/ruler/_strict explains it."""

    length: int
    samples: int = SAMPLES
    seed: int = 0
    haystack: str = "auto"
    reserve_tokens: int | None = None  # None: as many as the tokenizer's chat template adds

    @classmethod
    def of(cls, metadata: Mapping[str, Any], at: str | int | None = None) -> Settings:
        """Settings from lm-eval's metadata, which also holds the model's arguments; ``at`` is the length in a task's name.

        Raises KvevalError for values that are not usable and for a key that looks like a misspelt one.
        """
        known = {field.name for field in fields(cls)}
        for key in set(metadata) - known - {field.name for field in fields(lmtasks.Settings)}:
            if meant := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
                raise KvevalError(f"metadata key '{key}' is not known: did you mean '{meant[0]}'?")
        given = {key: value for key, value in metadata.items() if key in known and value is not None}
        settings = cls(**(given | {"length": _length(given.get("length"), at)}))
        lmtasks.require_whole("samples", settings.samples, 1)
        lmtasks.require_whole("seed", settings.seed, None)
        if settings.reserve_tokens is not None:
            lmtasks.require_whole("reserve_tokens", settings.reserve_tokens, 0)
        if settings.haystack == "auto":
            settings = replace(settings, haystack="noise" if lmtasks.is_instrument(metadata) else "pydoc")
        return settings


def contexts_of(tokenizer: str, tasks: Sequence[str], metadata: Mapping[str, Any]) -> list[SharedContext]:
    """The samples of ``tasks`` as contexts with one question each, number 0 of every task first.

    They are those of ``strict`` with the same metadata and ``reserve_tokens`` 0, and no chat template is applied.
    """
    settings, loaded = Settings.of(metadata), _tokenizer(tokenizer)
    source = haystack(settings.haystack)
    found = []
    for index in range(settings.samples):
        for task in tasks:
            kind = next(
                (kind for kind, served in KINDS.items() if task in served), "documents" if "qa_" in task else task
            )
            origin = (source.name, source.sha256) if kind in ("prose", "hard") else None
            asked: dict[str, Any] = {"seed": settings.seed, "context": index, "length": settings.length, "until": ()}
            found.append(build_alone(loaded, _family(task, settings.haystack), kind=kind, haystack=origin, **asked))
    return found


def task_name(family: str) -> str:
    """The lm-eval task of a family, without a length. Only what is RULER's is called so: not generated documents."""
    return f"kveval_ruler_{family}" if family in THIRTEEN else f"kveval_{family}"


def groups() -> dict[str, list[str]]:
    """Group -> its tasks or groups: one for each length, one over all, one for the length in the metadata.

    Their questions about documents are about generated ones; the groups ``kveval_ruler13`` ask about SQuAD and HotpotQA.
    """
    found: dict[str, list[str]] = {}
    for group, families in (("kveval_ruler", OFFLINE), ("kveval_ruler13", THIRTEEN)):
        tasks = [task_name(family) for family in families]
        of_length = {f"{group}_{length}": [f"{task}_{length}" for task in tasks] for length in LENGTHS}
        found |= of_length | {group: list(of_length), f"{group}_at_length": tasks}
    return found


def strict(family: str, at: str | None = None, **metadata: Any) -> dict[str, Any]:
    """lm-eval's ``custom_dataset``: split -> datasets.Dataset of ``samples`` documents, each built when it is read.

    Raises KvevalError when the metadata is not usable, no tokenizer is named, or the model would not get whole prompts.
    """
    from datasets import Dataset  # type: ignore[import-untyped]

    name = lmtasks.require_tokenizer_name(metadata)
    settings = Settings.of(metadata, at)
    lmtasks.refuse_short_model(metadata, settings.length)
    plan = json.dumps({"tokenizer": name, **asdict(settings)})
    rows = [{"task": family, "length": settings.length, "index": i, "plan": plan} for i in range(settings.samples)]
    return {"test": Dataset.from_list(rows).with_transform(_with_facts)}


def sample_of(doc: Mapping[str, Any]) -> Sample:
    """The sample that a document names."""
    return _sample(doc["task"], doc["plan"], doc["index"])


def doc_to_text(doc: Mapping[str, Any]) -> str:
    """The prompt up to where the answer is begun; lm-eval adds ``answer_prefix``, in a chat as the assistant's words."""
    draft = sample_of(doc).draft
    return draft.text.removesuffix(draft.answer_prefix)


def doc_to_target(doc: Mapping[str, Any]) -> str:
    """What is expected, for people to read."""
    return ", ".join(group[0] for group in doc["expected"])


def process_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """``score``: the share of what is expected that is in the answer; where one alias is enough, 1 or 0.

    lm-eval does not say why an answer ended: ``status`` of an answer cut by the length limit is known to ``kveval run`` alone.
    """
    return {"score": score(doc["expected"], results[0], any_of=FAMILIES[doc["task"]].any_of)}


def chat_tokens(tokenizer: Any) -> int:
    """Tokens that the tokenizer's chat template adds around a prompt and its begun answer, at most; 0 without a template.

    A BOS that the tokenizer puts before every text is not among them: ``sample`` counts it.
    Raises KvevalError when the template cannot be filled in.
    """
    if not getattr(tokenizer, "chat_template", None):
        return 0
    user, begun = {"role": "user", "content": "Text"}, {"role": "assistant", "content": "Answer"}
    try:
        filled = [
            tokenizer.apply_chat_template([user, begun], tokenize=False, continue_final_message=True),
            tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True),
        ]
    except Exception as error:  # a template is a program: it may raise anything
        raise KvevalError(
            f"the tokenizer's chat template cannot be filled in ({error}): give the number of tokens it needs with "
            "--metadata '{\"reserve_tokens\": 64}', or 0 if it is not applied"
        ) from error
    bos, own = getattr(tokenizer, "bos_token", None), len(special_prefix(tokenizer))
    twice = [
        own if bos and text.startswith(bos) else 0 for text in filled
    ]  # engines then leave out the tokenizer's own
    added = [count_tokens(tokenizer, text) - again for text, again in zip(filled, twice, strict=True)]
    return max(added) + JOINT_TOKENS


@lru_cache(maxsize=64)  # lm-eval reads all documents of a task, and then asks for all prompts
def _sample(task: str, plan: str, index: int) -> Sample:
    values = json.loads(plan)
    tokenizer = _tokenizer(values.pop("tokenizer"))
    settings = Settings(**values)
    reserve = chat_tokens(tokenizer) if settings.reserve_tokens is None else settings.reserve_tokens
    family = _family(task, settings.haystack)
    return sample(tokenizer, family, seed=settings.seed, length=settings.length, index=index, reserve_tokens=reserve)


@lru_cache(maxsize=100_000)  # small, and asked for again when answers are scored
def _facts(task: str, plan: str, index: int) -> dict[str, Any]:
    built = _sample(task, plan, index)
    return {
        "answer_prefix": built.draft.answer_prefix,
        "expected": [list(group) for group in built.draft.expected],
        "depths": list(built.draft.depths),
        "tokens": built.tokens,
        "sha256": built.sha256,
    }


def _with_facts(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """What datasets calls with the documents that are read: their columns, with what the samples say."""
    facts = [_facts(*names) for names in zip(batch["task"], batch["plan"], batch["index"], strict=True)]
    return batch | {key: [fact[key] for fact in facts] for key in facts[0]}


@lru_cache(maxsize=8)
def _tokenizer(name: str) -> Any:
    return lmtasks.load_tokenizer(name)


def _family(task: str, haystack: str) -> Family:
    """The family, with the haystack that was asked for where RULER has essays (``haystack="auto"``)."""
    family: Any = FAMILIES[task]
    return replace(family, haystack=haystack) if getattr(family, "haystack", None) == "auto" else family


def _length(asked: Any, at: str | int | None) -> int:
    if asked is None and at is None:
        raise KvevalError(
            'no length: give --metadata \'{"length": "4k"}\', or name a task with a length: kveval_ruler_niah_single_1_4k'
        )
    named, wanted = (None if value is None else _tokens(value) for value in (at, asked))
    if named is not None and wanted not in (None, named):
        raise KvevalError(
            f"metadata length {asked} is not the {at} in the task's name: leave it out, or name the task without a length"
        )
    return named or wanted or 0


def _tokens(value: Any) -> int:
    if isinstance(value, str):
        return parse_tokens(value)
    lmtasks.require_whole("length", value, 1)
    return int(value)
