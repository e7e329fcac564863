"""Named KV formats: configs/kv/NAME.yaml, or a YAML file of one's own, beside the grammar of ``formats.spec``."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kveval.errors import KvevalError
from kveval.formats.parse import WINDOWS, parse_format
from kveval.formats.pruning import METHODS
from kveval.formats.registry import ALIASES, STORAGES
from kveval.formats.spec import KVFormat
from kveval.resources import data_path


class NamedFormat(BaseModel):
    """One file of configs/kv/: ``format`` in the grammar of ``formats.spec``, ``why`` in a sentence."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: str = Field(min_length=1)
    why: str = Field(min_length=1)


def resolve_format(text: str) -> KVFormat:
    """The format that ``text`` means: a name in configs/kv/, a YAML file, or the grammar of ``formats.spec``.

    Raises KvevalError as ``parse_format`` does, for a name that is none of these (close ones are told), and for a YAML
    file that is missing or not in order.
    """
    asked = text.strip()
    path = Path(asked).expanduser()
    if path.suffix.lower() in (".yaml", ".yml") or len(path.parts) > 1:
        return _of_file(path)
    if asked.lower() in names():
        return _of_file(_file(asked.lower()))
    _refuse_unknown(text)
    return parse_format(text)


def names() -> list[str]:
    """Names of the formats in configs/kv/."""
    return sorted(file.stem for file in data_path("configs", "kv").glob("*.yaml"))


def named_format(name: str) -> NamedFormat:
    """What configs/kv/ says of ``name``, one of ``names()``. Raises KvevalError when the file is not in order."""
    return _read(_file(name))


def _file(name: str) -> Path:
    return data_path("configs", "kv", f"{name}.yaml")


def _of_file(file: Path) -> KVFormat:
    if not file.is_file():
        raise KvevalError(f"KV format '{file}' is no file: give a YAML file with the keys format and why, or a name")
    named = _read(file)
    try:
        return parse_format(named.format)
    except KvevalError as error:
        raise KvevalError(f"KV format '{file}': {error}") from error


def _read(file: Path) -> NamedFormat:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KvevalError(f"KV format '{file}' cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise KvevalError(f"KV format '{file}' holds no keys: write format: and why:, as the files in configs/kv do")
    try:
        return NamedFormat.model_validate(values)
    except ValidationError as error:
        told = "; ".join(_told(dict(problem)) for problem in error.errors())
        raise KvevalError(f"KV format '{file}': {told}") from error


def _told(problem: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}': accepted are {', '.join(NamedFormat.model_fields)}"
    if problem["type"] == "missing":
        return f"the key '{key}' is missing"
    return f"'{key}' is {problem['input']!r}: {problem['msg']}"


def _refuse_unknown(text: str) -> None:
    """Raises KvevalError when the grammar does not know the name that ``text`` begins with."""
    head, comma, options = text.strip().lower().partition(",")
    name = head.partition(":")[0].strip()
    if name in STORAGES or name in ALIASES or name in WINDOWS or name in METHODS:
        return
    if name in names():
        written = ",".join([named_format(name).format, *([options] if comma else [])])
        raise KvevalError(
            f"'{text}': {name} is a whole format and takes nothing more; write out what it means: {written}"
        )
    grammar = [*STORAGES, *(f"{window}:4k" for window in WINDOWS), *(f"{method}:0.5" for method in METHODS)]
    keys = {known.partition(":")[0]: known for known in [*grammar, *names()]}
    close = [keys[key] for key in difflib.get_close_matches(name, keys, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise KvevalError(
        f"'{text}': '{name}' is not a KV format: {hint}use one of {', '.join(grammar)}; one of the named "
        f"{', '.join(names())}; or a YAML file ('kveval formats' explains them)"
    )
