"""The list of KV formats: what there is, how many bits a number takes, who serves it. Data, and the same as a table."""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from kveval.formats.explain import WIDTH, number_bits
from kveval.formats.named import named_format, names
from kveval.formats.parse import parse_format
from kveval.formats.pruning import METHODS
from kveval.formats.registry import STORAGES
from kveval.formats.served import served_by

HEAD_DIM = 128  # of the listed bits: scales weigh more on smaller heads
SERVERS = ("vLLM", "SGLang", "TensorRT-LLM", "llama.cpp")
_NAME, _BITS, _SUMMARY = 17, 5, 50  # columns
_FEWER = {
    "window:4k": "4 sinks and the latest tokens, 4,096 in all, at places within the cache (StreamingLLM)",
    "swa:4k": "the latest 4,096 tokens, a plain sliding window",
}


@dataclass(frozen=True)
class Row:
    """A format of the list. ``bits``: of a stored number at head_dim 128, scales included, mean of keys and values."""

    group: str
    name: str
    bits: float
    summary: str
    engines: tuple[str, ...]


@dataclass(frozen=True)
class Option:
    """A key of the grammar, with a format that uses it."""

    key: str
    meaning: str
    example: str


OPTIONS = (
    Option("values=STORAGE", "values in another storage than the keys (keys=STORAGE likewise)", "q8_0,values=q4_0"),
    Option("residual=N", "KIVI's newest tokens in BF16, a multiple of 32 (usually 128)", "kivi4,residual=32"),
    Option("rotate=hadamard", "keys and values turned before they are stored: no outlier", "int4-g32,rotate=hadamard"),
    Option("skip_layers=N", "the first and last N layers in BF16", "int4-g32,skip_layers=2"),
    Option("store=STORAGE", "how a window or a pruning stores what it keeps", "window:4k,store=fp8"),
    Option("sinks=N", "first tokens that a window keeps (usually 4)", "window:4k,sinks=16"),
)


def listing() -> list[Row]:
    """Every storage format, window and pruning, 16 bits first, fewer tokens last."""
    rows = [
        Row(_group(bits), name, bits, storage.summary, storage.engines)
        for name, storage in STORAGES.items()
        for bits in [number_bits(parse_format(name), HEAD_DIM)]
    ]
    fewer = _FEWER | {f"{method}:0.5": f"half of the prompt: {source}" for method, source in METHODS.items()}
    for name, summary in fewer.items():
        fmt = parse_format(name)
        rows.append(Row("fewer tokens", name, number_bits(fmt, HEAD_DIM), summary, served_by(fmt)))
    groups = ["16 bits", "8 bits", "4 and 5 bits", "2 bits", "fewer tokens"]
    return sorted(rows, key=lambda row: groups.index(row.group))


def as_data() -> dict[str, Any]:
    """The list for JSON."""
    named = [{"name": name, **named_format(name).model_dump()} for name in names()]
    return {
        "head_dim": HEAD_DIM,
        "formats": [asdict(row) for row in listing()],
        "options": [asdict(option) for option in OPTIONS],
        "named": named,
    }


def as_text() -> str:
    """The list as a plain table of at most 100 columns, then the grammar and the named formats."""
    lines = [_line("format", "bits", f"stored (bits a number at head_dim {HEAD_DIM}, scales included)", "served by")]
    group = ""
    for row in listing():
        if row.group != group:
            group = row.group
            lines += ["", group]
        lines += _wrapped(row.name, f"{row.bits:.2f}", row.summary, _servers(row.engines))
    lines += ["", "options: name[:argument][,key=value ...]"]
    for option in OPTIONS:
        lines += _pair(option.key, f"{option.meaning}: {option.example}")
    lines += ["", "named: configs/kv/NAME.yaml, or --kv FILE.yaml with the same two keys, format and why"]
    for name in names():
        named = named_format(name)
        lines += _pair(name, f"{named.format}. {named.why}")
    return "\n".join([*lines, "", "'kveval formats NAME' explains one: layout, bytes for a model, engines, source."])


def _group(bits: float) -> str:
    return "16 bits" if bits >= 16 else "8 bits" if bits >= 8 else "4 and 5 bits" if bits >= 4 else "2 bits"


def _servers(engines: tuple[str, ...]) -> str:
    found = [server for server in SERVERS if any(server in engine for engine in engines)]
    if any(engine.partition(",")[0] == "all" for engine in engines):
        return "all"
    return ", ".join(found) or ("research code" if engines else "-")


def _wrapped(name: str, bits: str, summary: str, servers: str) -> list[str]:
    first, *rest = textwrap.wrap(summary, _SUMMARY)
    return [_line(f"  {name}", bits, first, servers), *(_line("", "", part, "") for part in rest)]


def _line(name: str, bits: str, summary: str, servers: str) -> str:
    return f"{name:<{_NAME}} {bits:>{_BITS}}  {summary:<{_SUMMARY}}  {servers}".rstrip()


def _pair(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {name:<{_NAME}}", subsequent_indent=" " * (_NAME + 2))
