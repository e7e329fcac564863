"""A KV format as people name it: ``bf16``, ``fp8``, ``int4-g32``, ``window:4k``, ``window:4k,sinks=0,store=fp8``."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from kveval.errors import KvevalError
from kveval.formats.bf16 import Bf16
from kveval.formats.codec import Codec
from kveval.formats.fp8 import Fp8
from kveval.formats.int4 import Int4
from kveval.formats.window import DEFAULT_SINKS, Window
from kveval.units import parse_tokens

CODECS: dict[str, Codec] = {"bf16": Bf16(), "fp8": Fp8(), "int4-g32": Int4(32)}
ALIASES = {"bfloat16": "bf16", "fp8-e4m3": "fp8", "fp8_e4m3": "fp8"}


@dataclass(frozen=True)
class KVFormat:
    """How a stream's keys and values are kept: which numbers are stored, and which tokens."""

    storage: str = "bf16"
    window: Window | None = None

    @property
    def codec(self) -> Codec:
        """How one vector is stored."""
        return CODECS[self.storage]

    @property
    def name(self) -> str:
        """Canonical name; ``parse_format(f.name) == f``."""
        if self.window is None:
            return self.storage
        return self.window.name + ("" if self.storage == "bf16" else f",store={self.storage}")

    @property
    def lossy(self) -> bool:
        """Whether the cache can differ from what the model wrote."""
        return self.codec.lossy or self.window is not None

    def kept(self, tokens: int) -> int:
        """Tokens stored after ``tokens`` were read."""
        return tokens if self.window is None else self.window.kept(tokens)

    def token_bytes(self, head_dim: int, kv_heads: int) -> int:
        """Bytes of one kept token in one layer: its key and its value in every KV head."""
        return 2 * kv_heads * self.codec.vector_bytes(head_dim)


def parse_format(text: str) -> KVFormat:
    """The format that ``text`` names (grammar ``name[:arg][,key=value]``).

    Raises KvevalError that names the bad part and what is accepted.
    """
    head, *pairs = (part.strip() for part in text.strip().lower().split(","))
    name, _, argument = head.partition(":")
    options = dict(_option(text, pair) for pair in pairs)
    if name == "window":
        return _window(text, argument, options)
    name = ALIASES.get(name, name)
    if name not in CODECS:
        raise KvevalError(f"'{text}' is not a KV format: {_known(name)}")
    if argument or options:
        extra = argument or ", ".join(options)
        raise KvevalError(f"'{text}': {name} takes no argument, but '{extra}' was given")
    return KVFormat(storage=name)


def _window(text: str, argument: str, options: dict[str, str]) -> KVFormat:
    if not argument:
        raise KvevalError(
            f"'{text}': a window needs its size in tokens, for instance window:4k (4 sinks + 4,092 recent)"
        )
    unknown = set(options) - {"sinks", "store"}
    if unknown:
        raise KvevalError(f"'{text}': a window takes sinks= and store=, not '{min(unknown)}'")
    storage = ALIASES.get(options.get("store", "bf16"), options.get("store", "bf16"))
    if storage not in CODECS:
        raise KvevalError(f"'{text}': store={storage} is not a storage format; use one of {', '.join(CODECS)}")
    sinks = options.get("sinks", str(DEFAULT_SINKS))
    if not sinks.isdecimal():
        raise KvevalError(f"'{text}': sinks={sinks} is not a number of tokens; use sinks=0 or more")
    return KVFormat(storage=storage, window=Window(parse_tokens(argument), int(sinks)))


def _option(text: str, pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    if not equals or not key or not value:
        raise KvevalError(f"'{text}': '{pair}' is not an option; write it as key=value")
    return key.strip(), value.strip()


def _known(name: str) -> str:
    known = [*CODECS, "window:4k"]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"use one of {', '.join(known)}" + (f" (did you mean {close[0]}?)" if close else "")
