"""Inputs that break codecs, and what comes back from one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kveval.formats.codec import Codec

HEAD_DIMS = (64, 80, 96, 128, 256)

HARD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda x: x,
    "outlier": lambda x: x * torch.where(torch.arange(x.shape[-1]) == 7, 1e4, 1.0),
    "tiny": lambda x: x * 1e-9,
    "zero": lambda x: x * 0,
    "constant": lambda x: x * 0 + 3.140625,
}


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    """Standard normal numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decoded(codec: Codec, x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``x`` (heads, tokens, head_dim) written and read back."""
    out = torch.full(x.shape, float("nan"), dtype=dtype)
    codec.decode(codec.encode(x), out)
    return out


def parts_bytes(parts: Sequence[torch.Tensor]) -> int:
    """Bytes of all parts."""
    return sum(part.numel() * part.element_size() for part in parts)
