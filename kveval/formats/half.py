"""bf16 and fp16: two bytes a number, as models compute. The baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kveval.formats.codec import Codec

if TYPE_CHECKING:
    import torch

FP16_MAX = 65504.0  # largest finite binary16 number, (2 - 2**-10) * 2**15 (IEEE 754-2019, table 3.5)


@dataclass(frozen=True)
class Bf16(Codec):
    """bfloat16, rounded to the nearest, ties to even."""

    lossy = False

    def block_bytes(self, head_dim: int) -> int:
        """2 bytes a number."""
        return 2 * head_dim

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(heads, tokens, head_dim) bfloat16."""
        import torch

        return (x.to(torch.bfloat16),)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Exact in bfloat16 and float32."""
        out.copy_(parts[0])


@dataclass(frozen=True)
class Fp16(Codec):
    """IEEE binary16, rounded to the nearest, ties to even.

    Three more bits than bfloat16 after the point, so a BF16 number from 2**-17 to 65,280 comes back as it was, and a
    smaller one within 2**-25; that is why it counts as a baseline. It ends at 65,504: the next BF16 number, 65,536,
    would be stored as infinity. An engine that keeps its cache in fp16 does not saturate there but computes NaN from
    it, so such a key is an error here, not a number.
    """

    lossy = False
    largest = FP16_MAX

    def block_bytes(self, head_dim: int) -> int:
        """2 bytes a number."""
        return 2 * head_dim

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(heads, tokens, head_dim) float16."""
        import torch

        return (x.to(torch.float16),)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Exact in float32; rounded once more in bfloat16."""
        import torch

        (stored,) = parts
        if out.dtype == torch.bfloat16 and out.device.type == "cpu":
            stored = stored.float()  # torch's cast from half to bfloat16 is scalar code: two vectorised ones are faster
        out.copy_(stored)
