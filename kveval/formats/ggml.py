"""q8_0, q5_1, q4_0: the block formats of llama.cpp's KV cache (``--cache-type-k q8_0``), byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kveval.errors import KvevalError
from kveval.formats.codec import Codec

if TYPE_CHECKING:
    import torch

BLOCK = 32  # numbers a block (QK8_0, QK5_1 and QK4_0 of ggml-common.h)
FP16_MAX = 65504.0
# Eight numbers of a byte each are handled as one int64, little-endian: number i is byte i.
LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
LOW_BITS = 0x0101010101010101
BIT_I_OF_BYTE_I = 0x8040201008040201 - 2**64
CARRY_TO_BIT_7 = 0x00406070787C7E7F  # in byte i: 128 - 2^i
GATHER_LOW_BITS = 0x0102040810204080  # times the low bits of 8 bytes: bit i of the highest byte is that of byte i


@dataclass(frozen=True)
class GgmlBlocks(Codec):
    """Blocks of 32 neighbouring numbers of one vector, each block its fp16 scale ``d`` and then its numbers.

    One part is stored: the bytes of the blocks, in ggml's order (struct block_q8_0, block_q5_1, block_q4_0 of
    ggml-common.h), as ``gguf.quants.quantize`` writes them. ``d`` is rounded to fp16 for storing only: the numbers
    are scaled by the reciprocal of the float32 one.

    Where llama.cpp's C differs from that reference: its CPU kernels (quantize_row_q8_0 of AVX and NEON, not
    quantize_row_q8_0_ref) round ties to even, and on x86 take 127 / amax for the reciprocal, so a number close to
    halfway between two levels may lie one level off. The other two types are the same arithmetic, which a compiler
    may fuse (x * (1/d) + 8.5 rounded once). Where zeros have both signs C may store another of them than numpy (in d
    of q4_0, in d and the minimum of q5_1), which changes no number.
    """

    name: ClassVar[str]
    type_bytes: ClassVar[int]  # bytes of a block of 32 numbers

    def block_bytes(self, head_dim: int) -> int:
        """``type_bytes`` for every 32 numbers.

        Raises KvevalError when blocks of 32 do not divide ``head_dim``.
        """
        if head_dim < BLOCK or head_dim % BLOCK:
            raise KvevalError(
                f"{self.name} cannot store a head_dim of {head_dim}: blocks of {BLOCK} numbers do not divide it; "
                "llama.cpp refuses such a model too: choose a format without blocks, such as fp8"
            )
        return head_dim // BLOCK * self.type_bytes

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """uint8 (heads, tokens, head_dim / 32 * type_bytes)."""
        import torch

        stored = torch.empty(*x.shape[:2], self.block_bytes(x.shape[2]), dtype=torch.uint8, device=x.device)
        self._pack(x.float().unflatten(-1, (-1, BLOCK)), stored.unflatten(-1, (-1, self.type_bytes)))
        return (stored,)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """As ``gguf.quants.dequantize``, in float32; other dtypes of ``out`` are rounded from it."""
        import torch

        (stored,) = parts
        numbers = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
        self._unpack(stored.unflatten(-1, (-1, self.type_bytes)), numbers.unflatten(-1, (-1, BLOCK)))
        if numbers is not out:
            out.copy_(numbers)

    def _pack(self, x: torch.Tensor, stored: torch.Tensor) -> None:
        """Write blocks ``x`` (..., 32) float32 into ``stored`` (..., type_bytes) uint8."""
        raise NotImplementedError

    def _unpack(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Write what ``stored`` (..., type_bytes) uint8 stands for into ``out`` (..., 32) float32."""
        raise NotImplementedError


@dataclass(frozen=True)
class Q8_0(GgmlBlocks):
    """8.5 bits a number: d = amax / 127, q = x / d rounded half away from zero; 2 + 32 bytes."""

    name = "q8_0"
    type_bytes = 34
    largest = 127 * FP16_MAX

    def _pack(self, x: torch.Tensor, stored: torch.Tensor) -> None:
        import torch

        magnitudes = x.abs()
        d = _divided(magnitudes.amax(dim=-1, keepdim=True), 127)
        q = torch.mul(x, _reciprocal(d), out=magnitudes)  # fresh memory costs more than the arithmetic
        # C's roundf: the cast drops the fraction. The float below 0.5, since 0.5 would lift 0.49999997 to 1.
        q += torch.copysign(q.new_full((), 0.5 - 2**-25), q)
        stored.view(torch.float16)[..., :1] = d
        stored[..., 2:].view(torch.int8).copy_(q)

    def _unpack(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        out.copy_(stored[..., 2:].view(torch.int8))
        out.mul_(stored.view(torch.float16)[..., :1].float())


@dataclass(frozen=True)
class Q5_1(GgmlBlocks):
    """6 bits a number: d = (max - min) / 31, q = (x - min) / d rounded; fp16 d and min, 32 fifth bits, 16 bytes of nibbles.

    Number i has its low four bits in the low half of byte i, number i + 16 in the high half.
    """

    name = "q5_1"
    type_bytes = 24
    largest = FP16_MAX  # of the minimum

    def _pack(self, x: torch.Tensor, stored: torch.Tensor) -> None:
        import torch

        # Of zeros of both signs either may be the minimum or maximum; + 0.0 makes them positive.
        low, high = x.amin(dim=-1, keepdim=True).add_(0.0), x.amax(dim=-1, keepdim=True).add_(0.0)
        d = _divided(high - low, 31)
        q = (x - low).mul_(_reciprocal(d)).add_(0.5).clamp_(max=31).to(torch.int8).view(torch.int64)
        fifth = (q >> 4).bitwise_and_(LOW_BITS).mul_(GATHER_LOW_BITS).bitwise_right_shift_(56)
        stored.view(torch.float16)[..., :1] = d
        stored.view(torch.float16)[..., 1:2] = low
        stored[..., 4:8] = fifth
        stored.view(torch.int64)[..., 1:] = _nibbles_joined(q)

    def _unpack(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        bits = _copied(stored.view(torch.int32)[..., 1:2]).view(torch.uint8)
        eight = bits.to(torch.int64).mul_(LOW_BITS).bitwise_and_(BIT_I_OF_BYTE_I)  # byte i: 2^i if its fifth bit is set
        q = eight.add_(CARRY_TO_BIT_7).bitwise_right_shift_(3).bitwise_and_(LOW_BITS << 4)
        _nibbles_split(stored.view(torch.int64)[..., 1:], q)
        d, low = (stored.view(torch.float16)[..., i : i + 1].float() for i in (0, 1))
        out.copy_(q.view(torch.int8)).mul_(d).add_(low)


@dataclass(frozen=True)
class Q4_0(GgmlBlocks):
    """4.5 bits a number: d = m / -8 for the number m of the largest magnitude (the first one), q = x / d + 8; 2 + 16 bytes.

    Number i is the low half of byte i, number i + 16 the high half.
    """

    name = "q4_0"
    type_bytes = 18
    largest = 8 * FP16_MAX

    def _pack(self, x: torch.Tensor, stored: torch.Tensor) -> None:
        import torch

        low, high = x.amin(dim=-1, keepdim=True), x.amax(dim=-1, keepdim=True)
        m = torch.where(high > -low, high, low)
        tied = (high == -low).squeeze(-1)  # which of the two comes first; argmax is too slow for every block
        m[tied] = x[tied].gather(-1, x[tied].abs().argmax(dim=-1, keepdim=True))
        d = _divided(m, -8)
        q = (x * _reciprocal(d)).add_(8.5).clamp_(max=15).to(torch.int8)
        stored.view(torch.float16)[..., :1] = d
        stored[..., 2:] = _nibbles_joined(q.view(torch.int64)).view(torch.uint8)

    def _unpack(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        import torch

        q = torch.zeros(*stored.shape[:-1], 4, dtype=torch.int64, device=stored.device)
        _nibbles_split(_copied(stored[..., 2:]).view(torch.int64), q)
        out.copy_(q.view(torch.int8).sub_(8)).mul_(stored.view(torch.float16)[..., :1].float())


def _divided(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """``x / divisor``, rounded once. By a tensor: on a GPU torch divides by a Python number through its reciprocal."""
    return x / x.new_full((), divisor)


def _reciprocal(d: torch.Tensor) -> torch.Tensor:
    """``1 / d``, and 0 where that is no number: a block of zeros, or of numbers below 1e-38."""
    inverse = 1 / d
    return inverse.masked_fill_(inverse.isinf(), 0)


def _copied(x: torch.Tensor) -> torch.Tensor:
    """``x`` in aligned memory of its own; ``contiguous`` returns a single block as it lies, unaligned."""
    import torch

    return x.clone(memory_format=torch.contiguous_format)


def _nibbles_joined(q: torch.Tensor) -> torch.Tensor:
    """int64 (..., 4), 32 numbers of a byte each, to int64 (..., 2): number i and, above it, number i + 16."""
    high = (q[..., 2:] & LOW_NIBBLES).bitwise_left_shift_(4)
    return high.bitwise_or_(q[..., :2] & LOW_NIBBLES)


def _nibbles_split(packed: torch.Tensor, q: torch.Tensor) -> None:
    """Set the low four bits of ``q`` int64 (..., 4), 32 numbers of a byte each, to what ``packed`` int64 (..., 2) holds."""
    q[..., :2].bitwise_or_(packed & LOW_NIBBLES)
    q[..., 2:].bitwise_or_((packed >> 4).bitwise_and_(LOW_NIBBLES))
