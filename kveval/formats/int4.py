"""int4-g32: asymmetric four-bit integers in groups of 32 neighbouring numbers of one token, fp16 scale and zero a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.errors import KvevalError

if TYPE_CHECKING:
    import torch

LEVELS = 15  # 0..15
FP16_MAX = 65504.0


@dataclass(frozen=True)
class Int4:
    """x is stored as q in 0..15 with x ~ zero + scale * q, zero = min(group), scale = (max - min) / 15.

    Two values share a byte: byte i of a vector holds number i (low four bits) and number i + head_dim/2 (high four
    bits).
    """

    group: int = 32
    lossy = True

    def vector_bytes(self, head_dim: int) -> int:
        """Half a byte a number and 4 bytes (fp16 scale, fp16 zero) a group.

        Raises KvevalError when the group does not divide ``head_dim``.
        """
        self._groups(head_dim)
        return head_dim // 2 + 4 * self._groups(head_dim)

    def _groups(self, head_dim: int) -> int:
        if head_dim % self.group or head_dim % 2:
            raise KvevalError(
                f"int4-g{self.group} cannot store a head_dim of {head_dim}: groups of {self.group} numbers do not divide it"
            )
        return head_dim // self.group

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Packed values uint8 (heads, tokens, head_dim/2), scales and zeros fp16 (heads, tokens, groups)."""
        import torch

        heads, tokens, head_dim = x.shape
        grouped = x.float().reshape(heads, tokens, self._groups(head_dim), self.group)
        low, high = torch.aminmax(grouped, dim=-1)
        zeros = low.clamp(-FP16_MAX, FP16_MAX).half()
        scales = ((high - low) / LEVELS).clamp(max=FP16_MAX).half()
        # A constant group has scale 0, and a tiny one underflows to it in fp16: every value then reads back as zero
        # (the minimum).
        divisor = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
        q = ((grouped - zeros.float().unsqueeze(-1)) / divisor).round_().clamp_(0, LEVELS).to(torch.uint8)
        q = q.reshape(heads, tokens, head_dim)
        packed = q[..., : head_dim // 2] | (q[..., head_dim // 2 :] << 4)
        return packed, scales, zeros

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """zero + scale * q, computed in float32."""
        packed, scales, zeros = parts
        heads, tokens, half = packed.shape
        out[..., :half] = packed & 0xF
        out[..., half:] = packed >> 4
        grouped = out.view(heads, tokens, scales.shape[-1], self.group)
        grouped.mul_(scales.unsqueeze(-1)).add_(zeros.unsqueeze(-1))
