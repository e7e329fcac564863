"""What a storage codec is: how the keys or values of one token and one KV head become bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Codec(Protocol):
    """A frozen value that writes vectors of ``head_dim`` numbers one by one, so a token is encoded once and stays as it is."""

    @property
    def lossy(self) -> bool:
        """Whether a BF16 vector comes back changed."""

    def vector_bytes(self, head_dim: int) -> int:
        """Bytes that one vector of ``head_dim`` numbers takes, scales included.

        Raises KvevalError when the format cannot store vectors of this size.
        """

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Parts that are stored for ``x`` (heads, tokens, head_dim), each (heads, tokens, width)."""

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the numbers that ``parts`` stand for into ``out`` (heads, tokens, head_dim), in ``out``'s dtype."""
