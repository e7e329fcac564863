"""Bytes of a stream's KV cache, by formula: what the measured tensors are held against."""

from __future__ import annotations

from kveval.formats.spec import KVFormat
from kveval.memory.geometry import Geometry


def token_bytes(geometry: Geometry, fmt: KVFormat) -> int:
    """Bytes that one kept token takes in all layers: layers x KV heads x (key vector + value vector), scales included.

    Raises KvevalError when the format cannot store vectors of this head_dim.
    """
    return geometry.layers * fmt.token_bytes(geometry.head_dim, geometry.kv_heads)


def stream_bytes(geometry: Geometry, fmt: KVFormat, tokens: int) -> int:
    """Bytes of one stream after ``tokens`` were read: each layer holds what the format's window and its own one leave."""
    layer = fmt.token_bytes(geometry.head_dim, geometry.kv_heads)
    return sum(layer * min(fmt.kept(tokens), geometry.layer_tokens(kind, tokens)) for kind in geometry.kinds)
