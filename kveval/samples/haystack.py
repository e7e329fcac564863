"""The text that needles are hidden in: generated prose, a few sentences repeated, Python's documentation, the user's files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random

from kveval.errors import KvevalError
from kveval.samples.lexicon import FRAMES, SLOTS

REPEATED = (" The river is cold.", " The garden is warm.", " The road is long.", " Then the day was over.")
SUFFIXES = (".txt", ".md", ".rst")
_PIECE_CHARS = 160
_GOLDEN_TURN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, fall evenly and apart
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)|(?=\n\s*\n)")
_AT_MOST = re.compile(rf"\s*.{{1,{_PIECE_CHARS}}}(?!\S)|\s*.{{1,{_PIECE_CHARS}}}", re.DOTALL)
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Haystack:
    """A haystack by name, with the hash of what it is made of.

    ``chars`` is the length of the text before it repeats; None for generated text, which never does.
    """

    name: str
    sha256: str
    chars: int | None
    _documents: tuple[tuple[str, ...], ...] = field(default=(), repr=False)

    def pieces(self, seed: int, context: int) -> Iterator[str]:
        """Endless sentence-like strings with their own leading spaces: joined with nothing between, they are the text.

        Contexts differ in the order of documents (one document: in where they start, spread through it). The same
        seed, context and content give the same text, wherever the files lie.
        """
        if self.name == "repeat":
            return cycle(REPEATED)
        if not self._documents:
            return _noise(Random(f"{seed}:haystack:{context}:{self.name}"))
        random = Random(f"{seed}:haystack:{context}:{self.sha256}")
        turn = Random(f"{seed}:haystack:{self.sha256}").random() + context * _GOLDEN_TURN
        return _texts(random, self._documents, turn % 1)


def haystack(name: str) -> Haystack:
    """The haystack ``noise``, ``repeat`` (a few sentences over and over), ``pydoc``, or the one in the UTF-8 text file or
    folder of text files at path ``name``.

    Raises KvevalError when there is no such file, or it is empty, of another kind or not UTF-8.
    """
    if name == "noise":
        return Haystack(name, _sha256(json.dumps([FRAMES, SLOTS]).encode()), chars=None)
    if name == "repeat":
        return Haystack(name, _sha256("".join(REPEATED).encode()), chars=None)
    if name == "pydoc":
        from pydoc_data.topics import topics

        return _of_documents(name, [(title, topics[title].encode()) for title in sorted(topics)])
    return _of_documents(name, [(str(file), file.read_bytes()) for file in _files(Path(name).expanduser())])


def _files(path: Path) -> list[Path]:
    kinds = ", ".join(SUFFIXES)
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in SUFFIXES)
        if files:
            return files
        raise KvevalError(f"haystack folder '{path}' holds no {kinds} file: give a folder with such files")
    what = "is not a text file" if path.exists() else "does not exist"
    raise KvevalError(f"haystack '{path}' {what}: give noise, repeat, pydoc, a {kinds} file or a folder of such files")


def _of_documents(name: str, files: list[tuple[str, bytes]]) -> Haystack:
    documents = []
    for title, content in files:
        try:
            text = content.decode("utf-8-sig").replace("\r\n", "\n").strip()
        except UnicodeDecodeError as error:
            raise KvevalError(
                f"haystack file '{title}' is not UTF-8 text ({error}): convert it, or leave it out"
            ) from error
        if text:
            documents.append(split(text))
    if not documents:
        raise KvevalError(f"haystack '{name}' is empty: give a file or folder with text in it")
    chars = sum(len(piece) for pieces in documents for piece in pieces)
    return Haystack(name, _sha256(*(content for _, content in files)), chars, tuple(documents))


def split(text: str) -> tuple[str, ...]:
    """``text`` cut before the white space that follows a sentence, and before blank lines; nothing is lost.

    >>> split("Two words. Three more words.")
    ('Two words.', ' Three more words.')
    """
    return tuple(part for sentence in _SENTENCE_END.split(text) for part in _AT_MOST.findall(sentence))


def _texts(random: Random, documents: tuple[tuple[str, ...], ...], start: float) -> Iterator[str]:
    """The documents again and again, each time in another order; one alone goes round from ``start`` (0 to 1) of it."""
    first = int(start * len(documents[0])) if len(documents) == 1 else 0
    while True:
        for document in random.sample(documents, len(documents)):
            for number, piece in enumerate(document[first:]):
                yield "\n\n" + piece.lstrip() if number == 0 else piece
            first = 0


def _noise(random: Random) -> Iterator[str]:
    """Paragraphs of 4 to 9 sentences. Each has a cast of its own, so that words come back as they do in prose."""
    while True:
        cast = {slot: random.choice(words) for slot, words in SLOTS.items()}
        for number in range(random.randint(4, 9)):
            yield ("\n" if number == 0 else " ") + _sentence(random, cast)


def _sentence(random: Random, cast: dict[str, str]) -> str:
    def fill(slot: re.Match[str]) -> str:
        return cast[slot[1]] if random.random() < 0.4 else random.choice(SLOTS[slot[1]])

    return _SLOT.sub(fill, random.choice(FRAMES))


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
