"""int4 and int2 along the token: integers in groups of neighbouring numbers, with a 16-bit scale (and zero) a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.errors import KvevalError
from kveval.formats.codec import Codec

if TYPE_CHECKING:
    import torch

FP16_MAX = 65504.0


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Whole numbers 0 .. 2^bits - 1 in float32 (..., width) as uint8 (..., width * bits / 8), by planes.

    The vector is cut into 8 / bits planes of equal length; byte i holds number i of every plane, plane 0 in the
    lowest bits. Summed in float32, where it is exact, so that a byte is converted once instead of once a number.
    """
    import torch

    first, *others = codes.chunk(8 // bits, dim=-1)
    packed = first
    for plane, numbers in enumerate(others, start=1):
        packed = torch.add(packed, numbers, alpha=2.0 ** (bits * plane))
    return packed.to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor, offset: int = 0) -> None:
    """Write what ``pack`` was given, less ``offset``, into ``out`` (..., width), from uint8 (..., width * bits / 8)."""
    import torch

    planes = out.chunk(8 // bits, dim=-1)
    for plane, numbers in enumerate(planes):
        codes = packed >> bits * plane if plane else packed
        if plane < len(planes) - 1:  # the shift left nothing above the last plane
            codes = codes & (2**bits - 1)
        numbers.copy_(codes.sub_(offset).view(torch.int8) if offset else codes)


@dataclass(frozen=True)
class IntGroups(Codec):
    """Whole numbers of ``bits`` bits for groups of ``group`` neighbouring numbers of one token.

    Asymmetric: q = round((x - zero) / scale) in 0 .. 2^bits - 1 and x ~ zero + scale * q, with zero = min(group) and
    scale = (max(group) - min(group)) / (2^bits - 1), both rounded to fp16 before q is computed. This is also how KIVI
    stores values, in groups of 32 (Liu et al. 2024, arXiv:2402.02750).

    Symmetric: with L = 2^(bits - 1) - 1, q = round(x / scale) in -L .. L and x ~ scale * q, with scale = max|group| / L
    in fp16; stored as q + L. The range is the same on both sides of 0, so one of the 2^bits codes is never used.
    Two bits leave -1, 0 and 1.

    Rounding is to nearest even. Scales above 65,504 saturate there. A group whose scale is 0 in fp16 (constant, or
    within some 1e-7) reads back as its zero.
    """

    bits: int = 4
    group: int = 32
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (2, 4):
            raise KvevalError(f"{self.bits} bits are not stored in groups; use 2 or 4")
        if self.group < 1:
            raise KvevalError(f"a group of {self.group} numbers cannot be stored; use 1 or more, for instance 32")

    @property
    def name(self) -> str:
        """``int4-g32``, ``int4-g64``, ``int4-g32-sym``, ``int2-g32``."""
        return f"int{self.bits}-g{self.group}" + ("-sym" if self.symmetric else "")

    def block_bytes(self, head_dim: int) -> int:
        """bits / 8 bytes a number; a group takes 4 bytes (fp16 scale and zero), 2 when symmetric (fp16 scale).

        Raises KvevalError when the group does not divide ``head_dim``, or the numbers do not fill whole bytes.
        """
        groups = self._groups(head_dim)
        return head_dim * self.bits // 8 + (2 if self.symmetric else 4) * groups

    def _groups(self, head_dim: int) -> int:
        if head_dim % self.group:
            raise KvevalError(
                f"{self.name} cannot store a head_dim of {head_dim}: groups of {self.group} numbers do not divide it"
            )
        if head_dim * self.bits % 8:
            raise KvevalError(
                f"{self.name} cannot store a head_dim of {head_dim}: {8 // self.bits} numbers share a byte"
            )
        return head_dim // self.group

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes uint8 (heads, tokens, head_dim * bits / 8); fp16 scales (heads, tokens, groups) and as many fp16 zeros.

        No zeros when symmetric.
        """
        heads, tokens, head_dim = x.shape
        grouped = x.float().reshape(heads, tokens, self._groups(head_dim), self.group)
        low, high = grouped.amin(dim=-1, keepdim=True), grouped.amax(dim=-1, keepdim=True)
        if self.symmetric:
            most = 2 ** (self.bits - 1) - 1
            codes, scales = quantize(grouped, None, (-low).maximum(high) / most, most)
            return pack(codes.add_(most).view(x.shape), self.bits), scales.squeeze(-1)
        zeros = low.clamp(-FP16_MAX, FP16_MAX).half()
        codes, scales = quantize(grouped, zeros, (high - low) / (2**self.bits - 1), 2**self.bits - 1)
        return pack(codes.view(x.shape), self.bits), scales.squeeze(-1), zeros.squeeze(-1)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Computed in float32 and rounded once to ``out``'s dtype."""
        import torch

        packed, scales, *zeros = parts
        work = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        unpack(packed, self.bits, work, offset=2 ** (self.bits - 1) - 1 if self.symmetric else 0)
        grouped = work.view(*scales.shape, self.group)
        grouped.mul_(scales.float().unsqueeze(-1))
        if zeros:
            grouped.add_(zeros[0].float().unsqueeze(-1))
        if work is not out:
            out.copy_(work)


def quantize(
    x: torch.Tensor, zeros: torch.Tensor | None, steps: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales): round((x - zeros) / scales) in float32, 0 .. most, and ``steps`` float32 as fp16 scales.

    ``steps`` and the fp16 ``zeros`` broadcast against ``x`` float32. Without ``zeros`` the codes are -most .. most.
    """
    import torch

    scales = steps.clamp(max=FP16_MAX).half()
    # A constant group has scale 0, and a tiny one underflows to it in fp16: every number then reads back as the zero.
    divisor = torch.where(scales == 0, 1.0, scales.float())
    codes = (x / divisor) if zeros is None else (x - zeros.float()).div_(divisor)
    return codes.round_().clamp_(-most if zeros is None else 0, most), scales
