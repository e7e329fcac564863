"""From what somebody typed to a KV format, or to one sentence that says what is wrong with it."""

from __future__ import annotations

import difflib
from dataclasses import replace

from kveval.errors import KvevalError
from kveval.formats.pruning import METHODS, Pruning
from kveval.formats.registry import ALIASES, STORAGES
from kveval.formats.spec import KVFormat
from kveval.formats.window import DEFAULT_SINKS, Window
from kveval.units import parse_tokens

WINDOWS = ("window", "swa")
_STORAGE_OPTIONS = {"keys", "values", "residual", "rotate", "skip_layers"}


def parse_format(text: str) -> KVFormat:
    """The format that ``text`` names (grammar in ``formats.spec``).

    Raises KvevalError that names the bad part and what is accepted.
    """
    head, *pairs = (part.strip() for part in text.strip().lower().split(","))
    name, colon, argument = (part.strip() for part in head.partition(":"))
    options = _options(text, pairs)
    keeps = name in WINDOWS or name in METHODS
    allowed = _STORAGE_OPTIONS | ({"store"} if keeps else set()) | ({"sinks"} if name == "window" else set())
    unknown = sorted(set(options) - allowed)
    if unknown:
        raise KvevalError(f"'{text}': {name} takes {', '.join(sorted(allowed))}, not '{unknown[0]}'")
    if not keeps:
        if colon:
            raise KvevalError(f"'{text}': {_storage(text, name)} takes no argument, but ':{argument}' was given")
        return _stored(text, name, options)
    store = options.pop("store", None)
    if store is None and (told := [key for key in ("residual", "rotate", "skip_layers") if key in options]):
        raise KvevalError(
            f"'{text}': {told[0]}= is about what is stored: add store=, for instance {name}:{argument},store=int4-g32"
        )
    fmt = _stored(text, store or "bf16", options)
    if name in METHODS:
        return replace(fmt, pruning=Pruning(name, _fraction(text, name, argument)))
    return replace(fmt, window=_window(text, name, argument, options.get("sinks")))


def _options(text: str, pairs: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (equals and key and value):
            raise KvevalError(f"'{text}': '{pair}' is not an option; write it as key=value")
        if key in options:
            raise KvevalError(f"'{text}': {key}= is given twice")
        options[key] = value
    return options


def _storage(text: str, name: str) -> str:
    name = ALIASES.get(name, name)
    if name in STORAGES:
        return name
    known = [*STORAGES, "window:4k", "swa:4k", *(f"{method}:0.5" for method in METHODS)]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise KvevalError(f"'{text}': '{name}' is not a KV format; use one of {', '.join(known)}{hint}")


def _stored(text: str, name: str, options: dict[str, str]) -> KVFormat:
    base = _storage(text, name)
    return KVFormat(
        keys=_storage(text, options.get("keys", base)),
        values=_storage(text, options.get("values", base)),
        residual=_count(text, "residual", options["residual"]) if "residual" in options else None,
        rotate=_rotation(text, options.get("rotate", "none")),
        skip_layers=_count(text, "skip_layers", options.get("skip_layers", "0")),
    )


def _rotation(text: str, value: str) -> bool:
    if value not in ("hadamard", "none"):
        raise KvevalError(f"'{text}': rotate={value} is not known; use rotate=hadamard")
    return value == "hadamard"


def _count(text: str, option: str, value: str) -> int:
    if not (value.isdecimal() and value.isascii()) or len(value) > 9:
        raise KvevalError(f"'{text}': {option}={value} is not a whole number of at most nine digits")
    return int(value)


def _window(text: str, name: str, argument: str, sinks: str | None) -> Window:
    if not argument:
        example = "window:4k (4 sinks + 4,092 recent)" if name == "window" else "swa:4k"
        raise KvevalError(f"'{text}': a window needs its size in tokens, for instance {example}")
    if name == "swa":
        return Window(parse_tokens(argument), 0)
    return Window(parse_tokens(argument), DEFAULT_SINKS if sinks is None else _count(text, "sinks", sinks))


def _fraction(text: str, name: str, argument: str) -> float:
    try:
        return float(argument)
    except ValueError:
        raise KvevalError(
            f"'{text}': {name} needs the fraction of the tokens that is kept, for instance {name}:0.5"
        ) from None
