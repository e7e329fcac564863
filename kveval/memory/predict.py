"""Bytes of a stream's KV cache, by formula: what the measured tensors are held against."""

from __future__ import annotations

from kveval.errors import KvevalError
from kveval.formats.rotation import rotation_block
from kveval.formats.spec import KVFormat
from kveval.memory.geometry import Geometry
from kveval.memory.layers import layer_formats


def token_bytes(geometry: Geometry, fmt: KVFormat) -> float:
    """Bytes that one kept token takes in all layers in the long run: layers x KV heads x (key + value), scales included.

    Raises KvevalError when the format cannot store vectors of this head_dim, or does not go with the model's layers.
    """
    if fmt.rotate:
        rotation_block(geometry.head_dim)
    sides = [side for layer in layer_formats(geometry, fmt) for side in layer.fmt.sides]
    try:
        return geometry.kv_heads * sum(side.token_bytes(geometry.head_dim) for side in sides)
    except KvevalError as error:
        raise KvevalError(f"{fmt.name}: {error}") from error


def stream_bytes(geometry: Geometry, fmt: KVFormat, tokens: int) -> int:
    """Bytes of one stream after ``tokens`` were read: each layer holds what the format and its own window leave."""
    return sum(
        side.stored_bytes(layer.kept(tokens), geometry.kv_heads, geometry.head_dim)
        for layer in layer_formats(geometry, fmt)
        for side in layer.fmt.sides
    )
