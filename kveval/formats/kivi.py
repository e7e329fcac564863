"""KIVI's keys: integers in groups of consecutive tokens of one channel, so that outlier channels keep to themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.errors import KvevalError
from kveval.formats.codec import Codec
from kveval.formats.integers import FP16_MAX, pack, quantize, unpack

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ChannelInt(Codec):
    """Asymmetric whole numbers of ``bits`` bits; a group is one channel of ``block_tokens`` consecutive tokens.

    q = round((x - zero) / scale) in 0 .. 2^bits - 1 and x ~ zero + scale * q, with zero = min(group) and
    scale = (max(group) - min(group)) / (2^bits - 1), both rounded to fp16 before q is computed (Liu et al. 2024,
    "KIVI", arXiv:2402.02750: keys per channel, groups of 32, and the newest tokens kept in 16 bits until a
    block is full, which is the store's part). KIVI's values are ``IntGroups(bits, 32)``.

    A block's bytes run token by token as its numbers would: with four bits, byte (t, c) holds channel c of token t in
    its low half and of token t + block_tokens / 2 in its high half; with two bits, of four tokens block_tokens / 4
    apart.
    """

    bits: int = 4
    block_tokens: int = 32

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise KvevalError(f"{self.bits} bits are not stored per channel; use 2 or 4")
        if self.block_tokens < 1 or self.block_tokens * self.bits % 8:
            raise KvevalError(
                f"a block of {self.block_tokens} tokens cannot be stored in {self.bits} bits: {8 // self.bits} tokens "
                f"share a byte; use a multiple of {8 // self.bits}, for instance 32"
            )

    def block_bytes(self, head_dim: int) -> int:
        """bits / 8 bytes a number and 4 bytes (fp16 scale, fp16 zero) a channel. Every ``head_dim`` can be stored."""
        return self.block_tokens * head_dim * self.bits // 8 + 4 * head_dim

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """uint8 codes (heads, blocks, block_tokens * head_dim * bits / 8), fp16 scales, zeros (heads, blocks, head_dim)

        ``tokens`` is a multiple of ``block_tokens``.
        """
        heads, tokens, head_dim = x.shape
        assert tokens % self.block_tokens == 0, "a store encodes whole blocks"
        grouped = x.float().reshape(heads, tokens // self.block_tokens, self.block_tokens, head_dim)
        low, high = grouped.amin(dim=2, keepdim=True), grouped.amax(dim=2, keepdim=True)
        zeros = low.clamp(-FP16_MAX, FP16_MAX).half()
        codes, scales = quantize(grouped, zeros, (high - low) / (2**self.bits - 1), 2**self.bits - 1)
        return pack(codes.flatten(start_dim=2), self.bits), scales.squeeze(2), zeros.squeeze(2)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """zero + scale * q, computed in float32 and rounded once to ``out``'s dtype."""
        import torch

        packed, scales, zeros = parts
        work = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        heads, blocks, head_dim = scales.shape
        unpack(packed, self.bits, work.view(heads, blocks, self.block_tokens * head_dim))
        grouped = work.view(heads, blocks, self.block_tokens, head_dim)
        grouped.mul_(scales.float().unsqueeze(2)).add_(zeros.float().unsqueeze(2))
        if work is not out:
            out.copy_(work)
