"""SQuAD 2.0 (Rajpurkar et al. 2018) and HotpotQA (Yang et al. 2018), as RULER's qa.py takes questions from them.

Read when a sample is built, from a file of the official format that the user names, or else through ``datasets``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kveval.errors import KvevalError


@dataclass(frozen=True)
class Question:
    """``gold``: numbers of the documents that tell the answer; ``near``: of those on the same subject."""

    text: str
    aliases: tuple[str, ...]  # of the answer: one is enough
    gold: tuple[int, ...]
    near: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents, none twice, and the questions about them in the data's own order."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Source:
    """Where a corpus comes from. ``rows`` makes the official format from what ``datasets`` gives."""

    variable: str  # environment variable with the path of a local copy
    files: tuple[str, ...]  # names in a folder: the official one, and RULER's
    hub: tuple[str, ...]  # arguments of datasets.load_dataset
    rows: Callable[[Iterable[Mapping[str, Any]]], Any]
    read: Callable[[Any], Corpus]
    stand_in: str


def corpus(name: str) -> Corpus:
    """The corpus ``squad`` or ``hotpotqa``, validation part; read once for each path.

    Raises KvevalError when there is no local copy and ``datasets`` cannot give it, or the data is of another format.
    """
    return _corpus(name, os.environ.get(SOURCES[name].variable) or None)


@lru_cache(maxsize=4)
def _corpus(name: str, path: str | None) -> Corpus:
    source = SOURCES[name]
    where = path or "/".join(source.hub)
    try:
        found = source.read(_local(source, Path(path).expanduser()) if path else source.rows(_hub(source)))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise KvevalError(
            f"'{where}' is not {name} in its official format ({type(error).__name__}: {error}): "
            f"give {source.files[0]} with {source.variable}, or use {source.stand_in}"
        ) from error
    if not found.questions:
        raise KvevalError(f"'{where}' holds no question with an answer: give {source.files[0]} with {source.variable}")
    return found


def _local(source: Source, path: Path) -> Any:
    file = next((path / name for name in source.files if (path / name).is_file()), path) if path.is_dir() else path
    if not file.is_file():
        raise KvevalError(
            f"{source.variable}='{path}' is not a file, nor a folder with {' or '.join(source.files)} in it: "
            f"give such a file, or use {source.stand_in}, whose documents are generated"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def _hub(source: Source) -> Any:
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]

        return load_dataset(*source.hub, split="validation")
    except Exception as error:  # no package, no network, no such files: each of many kinds
        raise KvevalError(
            f"no local copy of {source.hub[0]} ({type(error).__name__}): set {source.variable} to {source.files[0]} or its "
            "folder, or load it once with datasets where there is a network; "
            f"{source.stand_in} needs neither, its documents are generated"
        ) from error


def read_squad(data: Any) -> Corpus:
    """From SQuAD 2.0's JSON. Questions without an answer are left out; ``near`` are the article's other paragraphs."""
    numbers: dict[str, int] = {}
    questions = []
    for article in data["data"]:
        own = [numbers.setdefault(part["context"], len(numbers)) for part in article["paragraphs"]]
        for number, part in zip(own, article["paragraphs"], strict=True):
            near = tuple(other for other in dict.fromkeys(own) if other != number)
            for asked in part["qas"]:
                aliases = _unlike(answer["text"] for answer in asked["answers"])
                if aliases and not asked.get("is_impossible", False):
                    questions.append(Question(asked["question"].strip(), aliases, (number,), near))
    return Corpus(tuple(numbers), tuple(questions))


def read_hotpotqa(data: Any) -> Corpus:
    """From HotpotQA's JSON (distractor). ``gold`` are the documents with supporting facts, ``near`` the question's others."""
    numbers: dict[str, int] = {}
    questions = []
    for asked in data:
        own = {
            title: numbers.setdefault(f"{title}\n{''.join(sentences)}", len(numbers))
            for title, sentences in asked["context"]
        }
        gold = dict.fromkeys(own[title] for title, _ in asked["supporting_facts"] if title in own)
        aliases = _unlike([asked["answer"]])
        if gold and aliases:
            near = tuple(number for number in dict.fromkeys(own.values()) if number not in gold)
            questions.append(Question(asked["question"].strip(), aliases, tuple(gold), near))
    return Corpus(tuple(numbers), tuple(questions))


def squad_rows(rows: Iterable[Mapping[str, Any]]) -> Any:
    """SQuAD's own format from rows with title, context, question and answers."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        asked = {"question": row["question"], "answers": [{"text": text} for text in row["answers"]["text"]]}
        articles.setdefault(row["title"], {}).setdefault(row["context"], []).append(asked)
    return {
        "data": [
            {"paragraphs": [{"context": context, "qas": qas} for context, qas in parts.items()]}
            for parts in articles.values()
        ]
    }


def hotpotqa_rows(rows: Iterable[Mapping[str, Any]]) -> Any:
    """HotpotQA's own format from rows, whose context and supporting facts are columns."""

    def pairs(columns: Mapping[str, Sequence[Any]], second: str) -> list[tuple[Any, Any]]:
        return list(zip(columns["title"], columns[second], strict=True))

    return [
        {
            "question": row["question"],
            "answer": row["answer"],
            "context": pairs(row["context"], "sentences"),
            "supporting_facts": pairs(row["supporting_facts"], "sent_id"),
        }
        for row in rows
    ]


def _unlike(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))


SOURCES: dict[str, Source] = {
    "squad": Source(
        "KVEVAL_SQUAD",
        ("dev-v2.0.json", "squad.json"),
        ("rajpurkar/squad_v2",),
        squad_rows,
        read_squad,
        "qa_synthetic_1",
    ),
    "hotpotqa": Source(
        "KVEVAL_HOTPOTQA",
        ("hotpot_dev_distractor_v1.json", "hotpotqa.json"),
        ("hotpotqa/hotpot_qa", "distractor"),
        hotpotqa_rows,
        read_hotpotqa,
        "qa_synthetic_2",
    ),
}
