"""nvfp4: E2M1 numbers in blocks of 16 with an E4M3 scale each, as Blackwell GPUs and vLLM's ``nvfp4`` KV cache keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.errors import KvevalError
from kveval.formats.codec import Codec

if TYPE_CHECKING:
    import torch

BLOCK = 16
E2M1_MAX = 6.0  # of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats specification 1.0, table 5)
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Nvfp4(Codec):
    """x ~ scale * e2m1, scale = amax of the block / 6 rounded to E4M3; the scale of the whole tensor is 1.0.

    1.0 is what a server uses without calibrated scales. Blocks beyond 448 * 6 = 2,688 saturate; blocks whose scale
    rounds to 0 (amax up to 6 * 2^-10) read back as zeros. x is multiplied by the reciprocal of the stored scale and
    rounded to the nearest E2M1 number, ties to the even code. CUDA kernels take an approximate reciprocal
    (rcp.approx.ftz, off by up to one unit in its last place), so a number at a tie may fall to the other side there.

    Byte i of a vector holds number 2i in the low four bits and number 2i + 1 in the high four. Servers may shuffle
    the scales among the tokens of a page, for their kernels; here a token's scales stand together.
    """

    def block_bytes(self, head_dim: int) -> int:
        """Half a byte a number and 1 byte a block of 16: 72 bytes at head_dim 128.

        Raises KvevalError when blocks of 16 do not divide ``head_dim``.
        """
        if head_dim < BLOCK or head_dim % BLOCK:
            raise KvevalError(
                f"nvfp4 cannot store a head_dim of {head_dim}: blocks of {BLOCK} numbers do not divide it; "
                "choose a format without blocks, such as fp8"
            )
        return head_dim // 2 + head_dim // BLOCK

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Packed numbers uint8 (heads, tokens, head_dim / 2), scales float8_e4m3fn (heads, tokens, head_dim / 16)."""
        import torch

        self.block_bytes(x.shape[2])
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        magnitudes = blocks.abs()
        amax = magnitudes.amax(dim=-1)
        # By a tensor: on a GPU torch divides by a Python number through its reciprocal, which rounds twice.
        scales = (amax / amax.new_full((), E2M1_MAX)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
        inverse = 1 / scales.float()
        inverse.masked_fill_(inverse.isinf(), 0)
        scaled = torch.mul(blocks, inverse.unsqueeze(-1), out=magnitudes)  # fresh memory costs more than the arithmetic
        pairs = _codes(scaled).flatten(-2).view(torch.int16)  # low byte: the even number
        return (pairs >> 4).bitwise_or_(pairs).to(torch.uint8), scales

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Exact in bfloat16 and wider: an E2M1 number times an E4M3 scale has six significant bits at most."""
        import torch

        packed, scales = parts
        numbers = out if out.dtype == torch.float32 else torch.empty(out.shape, device=out.device)
        numbers.copy_(_fp16_by_2_to_14(packed))
        numbers.unflatten(-1, (-1, BLOCK)).mul_(_times_2_to_14(scales).unsqueeze(-1))
        if numbers is not out:
            out.copy_(numbers)


def _codes(x: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 codes (sign, two exponent bits, one of mantissa), int8, of the float32 numbers ``x``, which are overwritten.

    The code of a magnitude y is 2y up to 2, y + 2 up to 4 and y/2 + 4 from there: the least of the three, rounded.
    Each is rounded before the addition, which is then exact; even codes stay even.
    """
    import torch

    y = x.abs().clamp_(max=E2M1_MAX)
    rounded = y * 0.5
    code = rounded.round_().to(torch.int8).add_(4)
    torch.minimum(code, torch.mul(y, 2, out=rounded).round_().to(torch.int8), out=code)
    torch.minimum(code, y.round_().to(torch.int8).add_(2), out=code)
    signs = x.view(torch.int32).bitwise_right_shift_(28).to(torch.int8).bitwise_and_(8)
    return code.bitwise_or_(signs)


def _fp16_by_2_to_14(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of ``packed`` (..., n) uint8, each / 2^14, fp16 (..., 2n).

    sign, exponent and mantissa are moved to where fp16 has its sign and the lowest exponent bits and highest mantissa
    bit, for both numbers of a byte at once (an int32 each byte); subnormals come out right by themselves.
    """
    import torch

    both = packed.to(torch.int32).mul_((1 << 9) + (1 << 21))
    signs = (both << 3).bitwise_and_(0x80008000 - 2**32)
    return both.bitwise_and_(0x0E000E00).bitwise_or_(signs).view(torch.float16)


def _times_2_to_14(scales: torch.Tensor) -> torch.Tensor:
    """E4M3 scales, which have no sign, times 2^14, float32: their bits, where fp16 has its own, are the scale / 2^8."""
    import torch

    bits = scales.view(torch.uint8).to(torch.int16).bitwise_left_shift_(7)
    return bits.view(torch.float16).float().mul_(2.0**22)
