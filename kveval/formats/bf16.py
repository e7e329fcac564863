"""bf16: two bytes a number, as the model was trained. The baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Bf16:
    """bfloat16, round to nearest even."""

    lossy = False

    def vector_bytes(self, head_dim: int) -> int:
        """2 bytes a number."""
        return 2 * head_dim

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(heads, tokens, head_dim) bfloat16."""
        import torch

        return (x.to(torch.bfloat16),)

    def decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Exact in any wider dtype."""
        out.copy_(parts[0])
