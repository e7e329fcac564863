"""What a codec is: how the keys or values of consecutive tokens of one KV head become bytes, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

StaticScale = Literal["tensor", "head", "channel"]


class Codec:
    """A frozen value that encodes blocks of ``block_tokens`` consecutive vectors; a block is encoded once and stays as it is.

    Subclasses are frozen dataclasses, so that formats compare and hash; what is common stands here.
    """

    lossy: bool = True  # whether a BF16 vector comes back changed
    block_tokens: int = 1  # vectors encoded together; 1: each token alone
    static_scale: StaticScale | None = None  # scales fixed before the first token, from a calibration text
    largest: float = float("inf")  # a number beyond this can be neither stored nor saturated

    def block_bytes(self, head_dim: int) -> int:
        """Bytes of ``block_tokens`` vectors of ``head_dim`` numbers of one KV head, their scales included.

        Raises KvevalError when the format cannot store vectors of this size.
        """
        raise NotImplementedError

    def constant_bytes(self, kv_heads: int, head_dim: int) -> int:
        """Bytes that one layer's keys (or values) take whatever the number of tokens: static scales, float32."""
        numbers = {None: 0, "tensor": 1, "head": kv_heads, "channel": kv_heads * head_dim}
        return 4 * numbers[self.static_scale]

    @property
    def constants(self) -> tuple[torch.Tensor, ...]:
        """What ``constant_bytes`` counts."""
        return ()

    def calibrated(self, amax: torch.Tensor) -> Codec:
        """This codec with static scales for the largest magnitudes ``amax`` (heads, head_dim) float32 of a calibration text."""
        return self

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Parts that are stored for ``x`` (heads, tokens, head_dim), each (heads, tokens / block_tokens, width).

        ``tokens`` is a multiple of ``block_tokens``; ``x`` is finite.
        """
        raise NotImplementedError

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Write the numbers that ``parts`` stand for into ``out`` (heads, tokens, head_dim), in ``out``'s dtype."""
        raise NotImplementedError
