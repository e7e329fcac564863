"""fp8: E4M3 with scale 1.0, what servers do for ``--kv-cache-dtype fp8`` when a checkpoint brings no scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

E4M3_MAX = 448.0  # largest finite E4M3 number (OCP 8-bit floating point specification, table 2)


@dataclass(frozen=True)
class Fp8:
    """float8 E4M3 (OCP, no infinities). Saturates at 448, as serving kernels do, whatever torch's own cast does beyond it."""

    lossy = True

    def vector_bytes(self, head_dim: int) -> int:
        """1 byte a number; the scale is the constant 1.0 and takes none."""
        return head_dim

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(heads, tokens, head_dim) float8_e4m3fn."""
        import torch

        return (x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn),)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Exact in bfloat16 and wider."""
        import torch

        (stored,) = parts
        if stored.device.type != "cpu":
            out.copy_(stored)
            return
        # torch's CPU cast is scalar code. The same bits, moved to where fp16 has its exponent, are the number / 256:
        # twice as fast.
        bits = stored.view(torch.int8).to(torch.int16)  # the sign fills the high byte
        bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(bits.view(torch.float16)).mul_(256.0)
