"""Static scales: the largest magnitudes of keys and values on a calibration text, found before the first token is stored.

This is how checkpoints with calibrated scales come about (vLLM's k_scale and v_scale, llm-compressor's KV cache
observers): what is beyond them later saturates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kveval.cache.layer import FormatLayer
from kveval.errors import KvevalError
from kveval.formats.rotation import rotate
from kveval.formats.side import Side
from kveval.formats.spec import KVFormat

# Largest magnitudes (heads, head_dim) float32 of each layer's keys and values
Scales = Sequence[tuple[torch.Tensor, torch.Tensor]]


def observe(layers: Sequence[FormatLayer], *, rotated: bool) -> Scales:
    """The scales of what ``layers``, in BF16, have read: as it is, or after the rotation."""
    found = []
    for layer in layers:
        keys, values = (store.parts()[0].float() for store in layer.read)
        found.append((_amax(keys, rotated=rotated), _amax(values, rotated=rotated)))
    return found


def _amax(x: torch.Tensor, *, rotated: bool) -> torch.Tensor:
    return (rotate(x) if rotated else x).abs().amax(dim=1)


def with_scales(fmt: KVFormat, layer: int, scales: Scales | None) -> tuple[Side, Side]:
    """The sides of ``fmt``'s layer ``layer``, with their static scales where they have some.

    Raises KvevalError when such a format comes without a calibration.
    """
    if not fmt.calibrated:
        return fmt.sides
    if scales is None:
        raise KvevalError(
            f"{fmt.name} needs scales from a calibration text: give the engine calibration=token ids, or use fp8 (scale 1)"
        )
    keys, values = (
        side.with_codec(side.codec.calibrated(one)) for side, one in zip(fmt.sides, scales[layer], strict=True)
    )
    return keys, values
