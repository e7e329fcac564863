"""vLLM's int8_per_token_head and int4_per_token_head: one scale for each vector, made when the token is written.

Formulas and bytes are those of vLLM 0.32.0: ``vllm/v1/attention/ops/triton_reshape_and_cache_flash.py``
(``_reshape_cache_per_token_head``) and ``vllm/v1/attention/ops/int4_per_token_head.py``
(``_reshape_cache_int4_kernel``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.errors import KvevalError
from kveval.formats.codec import Codec

if TYPE_CHECKING:
    import torch

LEAST_SCALE = 1e-6  # vLLM's: a vector whose scale would be smaller is stored with this one
ZERO_POINT_BITS = 0xF  # of the float32 scale's mantissa


@dataclass(frozen=True)
class Int8TokenHead(Codec):
    """q = round(x / scale) in -127 .. 127 and x ~ scale * q, with scale = max(max|x| / 127, 1e-6) in float32.

    Halves are rounded away from zero, and x is multiplied by the scale's reciprocal, as vLLM does.
    """

    def block_bytes(self, head_dim: int) -> int:
        """1 byte a number and 4 bytes (float32 scale) a vector."""
        return head_dim + 4

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q int8 (heads, tokens, head_dim), scales float32 (heads, tokens, 1)."""
        import torch

        numbers = x.float()
        most = numbers.amax(dim=-1, keepdim=True).maximum(-numbers.amin(dim=-1, keepdim=True))
        scales = (most / 127).clamp_(min=LEAST_SCALE)
        q = numbers * scales.reciprocal()
        q.add_(torch.copysign(torch.tensor(0.5, device=x.device), q)).clamp_(-128, 127)
        return q.to(torch.int8), scales  # the conversion truncates

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """scale * q in float32, rounded once to ``out``'s dtype."""
        import torch

        q, scales = parts
        work = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        work.copy_(q).mul_(scales)
        if work is not out:
            out.copy_(work)


@dataclass(frozen=True)
class Int4TokenHead(Codec):
    """q = round(x / scale + zp) in 0 .. 15 and x ~ scale * (q - zp), with whole zp = round(-min(x) / scale) in 0 .. 15.

    scale = max((max(x) - min(x)) / 15, 1e-6) in float32; zp is hidden in the four lowest bits of its mantissa, and the
    scale is read back without them. Halves are rounded up. Byte i holds number 2 i (low half) and 2 i + 1 (high half).

    zp cannot leave 0 .. 15: a vector whose numbers all have one sign is clipped, to almost nothing when its spread is
    small beside its mean. vLLM meets few of those, because before this it multiplies each vector by random signs and an
    unnormalised Hadamard matrix (``single_rht``), and queries and outputs likewise. That rotation is not part of this
    codec; without one before it, this is not what vLLM computes.
    """

    largest = 2.0**126  # beyond it max - min may not be a finite float32

    def block_bytes(self, head_dim: int) -> int:
        """Half a byte a number and 4 bytes (float32 scale with its zero point) a vector.

        Raises KvevalError when ``head_dim`` is odd.
        """
        if head_dim % 2:
            raise KvevalError(f"int4-token-head cannot store a head_dim of {head_dim}: 2 numbers share a byte")
        return head_dim // 2 + 4

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes uint8 (heads, tokens, head_dim / 2), scales float32 with their zero points (heads, tokens, 1)."""
        import torch

        self.block_bytes(x.shape[-1])
        numbers = x.float()
        low, high = numbers.amin(dim=-1, keepdim=True), numbers.amax(dim=-1, keepdim=True)
        scales = ((high - low) / 15).clamp_(min=LEAST_SCALE)
        # Adding a half and truncating is vLLM's rounding; what is negative is clipped to 0 either way.
        zero_points = (-low / scales).add_(0.5).clamp_(0, 15).to(torch.int32)
        q = (numbers * scales.reciprocal()).add_(zero_points.float()).add_(0.5).clamp_(0, 15).to(torch.uint8)
        packed = q[..., 0::2] | (q[..., 1::2] << 4)
        bits = scales.view(torch.int32).bitwise_and_(~ZERO_POINT_BITS).bitwise_or_(zero_points)
        return packed, bits.view(torch.float32)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """scale * (q - zp) in float32, rounded once to ``out``'s dtype."""
        import torch

        packed, stored = parts
        bits = stored.view(torch.int32)
        zero_points = (bits & ZERO_POINT_BITS).float()
        scales = (bits & ~ZERO_POINT_BITS).view(torch.float32)
        work = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        pairs = work.view(*packed.shape, 2)
        pairs[..., 0].copy_(packed & 0xF)
        pairs[..., 1].copy_(packed >> 4)
        work.sub_(zero_points).mul_(scales)
        if work is not out:
            out.copy_(work)
