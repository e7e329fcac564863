"""What one KV format stores for one model: layout, bytes, engines and source. Data, and the same as text."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from kveval.errors import KvevalError
from kveval.formats.pruning import METHODS
from kveval.formats.registry import STORAGES
from kveval.formats.served import served_by
from kveval.formats.spec import KVFormat
from kveval.memory.geometry import Geometry, LayerKind
from kveval.memory.layers import layer_formats
from kveval.memory.predict import stream_bytes, token_bytes
from kveval.units import GIB, format_tokens

WIDTH = 100  # columns of what is printed
STREAM_TOKENS = 131_072
DEFAULT_GEOMETRY = "80x8x128"
LLAMA_70B = "Llama-3.3-70B"  # its config.json: 80 layers, 8 KV heads, head_dim 128
HEAD_DIMS = (64, 80, 96, 100, 112, 120, 128, 192, 256)  # sizes that published decoders have
MOST = {"layers": 10_000, "KV heads": 10_000, "head_dim": 65_536}  # more is a slip

_STREAMING_LLM = "StreamingLLM, Xiao et al. 2024, arXiv 2309.17453"
_QUAROT = "QuaRot, Ashkboos et al. 2024, arXiv 2404.00456"


@dataclass(frozen=True)
class Explanation:
    """A format for a geometry. Bytes of a key or value: of one token and KV head, in a layer that is not skipped."""

    name: str
    geometry: str
    layout: dict[str, str]  # by label: of both sides or of each, and what else is done to them
    key_bytes: float
    value_bytes: float
    key_bits: float  # of one number, scales included
    value_bits: float
    token_bytes: float  # one kept token in all layers, in the long run
    bf16_token_bytes: float
    constant_bytes: int  # whatever the number of tokens
    stream_tokens: int
    stream_kept_tokens: int
    stream_bytes: int
    bf16_stream_bytes: int
    head_dims: tuple[int, ...]  # of HEAD_DIMS, those that can be stored
    head_dims_refused: dict[int, str]
    engines: tuple[str, ...]
    sources: tuple[str, ...]


def parse_geometry(text: str) -> tuple[Geometry, str]:
    """``80x8x128`` as a geometry of full attention with 131,072 positions, and in words. Raises KvevalError otherwise."""
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})x([0-9]{1,6})", text.strip().lower())
    numbers = [int(group) for group in match.groups()] if match else [0]
    if not all(1 <= number <= most for number, most in zip(numbers, MOST.values(), strict=False)):
        limits = ", ".join(f"{most:,} {name}" for name, most in MOST.items())
        raise KvevalError(
            f"--geometry {text}: write LAYERSxKV_HEADSxHEAD_DIM, for instance {DEFAULT_GEOMETRY} ({LLAMA_70B}); "
            f"at most {limits}"
        )
    layers, kv_heads, head_dim = numbers
    full: LayerKind = "full"
    geometry = Geometry((full,) * layers, kv_heads, head_dim, positions=STREAM_TOKENS)
    return geometry, describe(geometry, LLAMA_70B if text.strip().lower() == DEFAULT_GEOMETRY else "")


def describe(geometry: Geometry, model: str = "") -> str:
    """The geometry in words: ``80 layers x 8 KV heads x head_dim 128 (Llama-3.3-70B)``."""
    words = f"{geometry.layers} layers x {geometry.kv_heads} KV heads x head_dim {geometry.head_dim}"
    sliding = geometry.kinds.count("sliding")
    slide = f", {sliding} of the layers slide over {geometry.sliding_window:,} tokens" if sliding else ""
    return words + slide + (f" ({model})" if model else "")


def explanation(fmt: KVFormat, geometry: Geometry, words: str = "") -> Explanation:
    """``fmt`` for a model of ``geometry`` (``words``: how it is called).

    Raises KvevalError when the format cannot store this head_dim, or does not go with the model's layers.
    """
    check_head_dim(fmt, geometry.head_dim)
    key, value = (side.token_bytes(geometry.head_dim) for side in fmt.sides)
    refused = {dim: why for dim in HEAD_DIMS if (why := _refusal(fmt, dim))}
    tokens = min(STREAM_TOKENS, geometry.positions)
    bf16 = KVFormat()
    return Explanation(
        name=fmt.name,
        geometry=words or describe(geometry),
        layout=_layout(fmt, geometry),
        key_bytes=key,
        value_bytes=value,
        key_bits=8 * key / geometry.head_dim,
        value_bits=8 * value / geometry.head_dim,
        token_bytes=token_bytes(geometry, fmt),
        bf16_token_bytes=token_bytes(geometry, bf16),
        constant_bytes=_constant_bytes(fmt, geometry),
        stream_tokens=tokens,
        stream_kept_tokens=fmt.kept(tokens),
        stream_bytes=stream_bytes(geometry, fmt, tokens),
        bf16_stream_bytes=stream_bytes(geometry, bf16, tokens),
        head_dims=tuple(dim for dim in HEAD_DIMS if dim not in refused),
        head_dims_refused=refused,
        engines=served_by(fmt),
        sources=_sources(fmt),
    )


def as_data(fmt: KVFormat, geometry: Geometry, words: str = "") -> dict[str, Any]:
    """``explanation`` for JSON."""
    return asdict(explanation(fmt, geometry, words))


def explain(fmt: KVFormat, geometry: Geometry, words: str = "") -> str:
    """``explanation`` as text of at most 100 columns. Raises KvevalError as it does."""
    told = explanation(fmt, geometry, words)
    skipped = ", in layers that are not skipped" if fmt.skip_layers else ""
    each = f"a token and KV head{skipped}"
    lines = [("format", told.name), *told.layout.items(), ("for", told.geometry)]
    lines += [("key", f"{_number(told.key_bytes)} B {each} ({told.key_bits:.2f} bits a number, scales included)")]
    lines += [("value", f"{_number(told.value_bytes)} B {each} ({told.value_bits:.2f} bits)")]
    lines += [("token", _token(fmt, told)), ("constant", _constant(told)), ("stream", _stream(fmt, told))]
    lines += [("head_dim", _head_dims(told))]
    engines = told.engines or ("no server that we know: kveval's own engine stores and reads it",)
    lines += zip(("served by", *[""] * len(engines)), engines, strict=False)
    lines += zip(("source", *[""] * len(told.sources)), told.sources, strict=False)
    return "\n".join(_labelled(label, text) for label, text in lines)


def check_head_dim(fmt: KVFormat, head_dim: int) -> None:
    """Raises KvevalError that names the format and ``head_dim`` when it cannot be stored, or not be rotated."""
    for side in fmt.sides:
        side.codec.block_bytes(head_dim)
    if fmt.rotate:
        _rotated(head_dim)


def number_bits(fmt: KVFormat, head_dim: int) -> float:
    """Bits that a stored number takes, scales included: the mean of keys and values."""
    return 8 * sum(side.token_bytes(head_dim) for side in fmt.sides) / (2 * head_dim)


def _rotated(head_dim: int) -> int:
    from kveval.formats.rotation import rotation_block  # brings numpy, which nothing else here needs

    return rotation_block(head_dim)


def _layout(fmt: KVFormat, geometry: Geometry) -> dict[str, str]:
    if fmt.keys == fmt.values:
        lines = {"what": STORAGES[fmt.keys].summary, "layout": STORAGES[fmt.keys].layout}
    else:
        keys, values = STORAGES[fmt.keys], STORAGES[fmt.values]
        lines = {"keys": f"as {fmt.keys}: {keys.summary}. {keys.layout}"}
        lines["values"] = f"as {fmt.values}: {values.summary}. {values.layout}"
    residuals = [side.residual for side in fmt.sides]
    if any(residuals):
        lines["residual"] = _residual(fmt)
    if fmt.rotate:
        block = _rotated(geometry.head_dim)
        lines["rotation"] = (
            f"keys (and queries, so that their products stay) and values are turned by a Hadamard matrix of {block} "
            "channels before they are stored; it takes no bytes"
        )
    if fmt.skip_layers:
        lines["layers"] = f"the first and last {fmt.skip_layers} of {geometry.layers} layers store BF16"
    if fmt.window or fmt.pruning:
        lines["tokens"] = _kept(fmt)
    return lines


def _residual(fmt: KVFormat) -> str:
    told = []
    for name, side in zip(("keys", "values"), fmt.sides, strict=True):
        if side.residual and side.codec.block_tokens > 1:
            told.append(f"{name} wait in BF16 until {side.residual} have gathered")
        elif side.residual:
            told.append(f"the latest {side.residual} {name} are in BF16")
    return "; ".join(told)


def _kept(fmt: KVFormat) -> str:
    if fmt.pruning:
        return (
            f"{fmt.pruning.fraction!r} of those read are seen by a question, while reading goes on with all; "
            f"which: {METHODS[fmt.pruning.method]}"
        )
    assert fmt.window is not None
    sinks = f"the first {fmt.window.sinks} and " if fmt.window.sinks else ""
    return f"{sinks}the latest {fmt.window.recent:,}; the others are gone for good"


def _constant_bytes(fmt: KVFormat, geometry: Geometry) -> int:
    sides = (side for layer in layer_formats(geometry, fmt) for side in layer.fmt.sides)
    return sum(side.codec.constant_bytes(geometry.kv_heads, geometry.head_dim) for side in sides)


def _refusal(fmt: KVFormat, head_dim: int) -> str:
    try:
        check_head_dim(fmt, head_dim)
    except KvevalError as error:
        return str(error)
    return ""


def _sources(fmt: KVFormat) -> tuple[str, ...]:
    found = [STORAGES[fmt.keys].source, STORAGES[fmt.values].source]
    found += [_QUAROT] if fmt.rotate else []
    found += [METHODS[fmt.pruning.method]] if fmt.pruning else []
    found += [_STREAMING_LLM] if fmt.window and fmt.window.sinks else []
    found += (
        ["sliding-window attention, as in Mistral 7B, arXiv 2310.06825"] if fmt.window and not fmt.window.sinks else []
    )
    return tuple(dict.fromkeys(found))


def _token(fmt: KVFormat, told: Explanation) -> str:
    kept = "a kept token" if fmt.window or fmt.pruning else "a token"
    own, base = told.token_bytes, told.bf16_token_bytes
    than = "as many as bf16" if own == base else f"{base / own:.3f} times fewer than bf16's {_number(base)}"
    return f"{_number(own)} B {kept} in all layers, {than}"


def _constant(told: Explanation) -> str:
    return f"{told.constant_bytes:,} B of scales" if told.constant_bytes else "0 B: nothing beside the tokens"


def _stream(fmt: KVFormat, told: Explanation) -> str:
    kept = f" ({told.stream_kept_tokens:,} of them kept)" if told.stream_kept_tokens != told.stream_tokens else ""
    residual = ", the newest in BF16" if any(side.residual for side in fmt.sides) else ""
    return (
        f"{format_tokens(told.stream_tokens)} tokens{kept}{residual}: {told.stream_bytes:,} B = "
        f"{told.stream_bytes / GIB:.3f} GiB (bf16: {told.bf16_stream_bytes / GIB:.3f} GiB)"
    )


def _head_dims(told: Explanation) -> str:
    if not told.head_dims_refused:
        return f"stored at {', '.join(map(str, told.head_dims))}"
    dim, why = next(iter(told.head_dims_refused.items()))
    others = ", ".join(map(str, list(told.head_dims_refused)[1:]))
    return (
        f"stored at {', '.join(map(str, told.head_dims))}; {dim} is refused"
        + (f", as are {others}" if others else "")
        + f" ({why})"
    )


def _number(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:,.2f}"


def _labelled(label: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:<11}", subsequent_indent=" " * 11)
