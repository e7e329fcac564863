"""The cache of one reading: a FormatLayer for each attention layer, and what the attention function must know of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from kveval.cache.calibration import Scales, with_scales
from kveval.cache.layer import FormatLayer, Scratch
from kveval.memory.layers import LayerFormat

# positions (n,) int64 -> (cos, sin), each (n, rotated dims) float32: the model's own rotary embedding
Rotary = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass."""

    positions: torch.Tensor  # (queries,) int64
    # (queries, asked tokens) bool: which asked tokens each query sees; None: causal reading
    own: torch.Tensor | None = None


class StreamCache(Cache):
    """One stream's keys and values in one format. Reading appends; asking appends apart and is dropped without a trace."""

    layers: list[FormatLayer]

    def __init__(
        self,
        layers: Sequence[LayerFormat],
        *,
        capacity: int,
        rotary: Rotary | None = None,
        scales: Scales | None = None,
    ) -> None:
        """Room for a context of ``capacity`` tokens; it grows where more come. ``scales``: for formats that need them."""
        scratch = Scratch()
        super().__init__(
            layers=[
                FormatLayer(
                    i,
                    layer.fmt,
                    with_scales(layer.fmt, i, scales),
                    window=layer.window,
                    capacity=capacity,
                    scratch=scratch,
                )
                for i, layer in enumerate(layers)
            ]
        )
        self.rotary = rotary
        self.step: Step | None = None
        self._asked_positions: torch.Tensor | None = None

    def read(self, positions: torch.Tensor) -> None:
        """Announce a forward pass over the next tokens of the context."""
        self.step = Step(positions)

    def ask(self, positions: torch.Tensor, own: torch.Tensor) -> None:
        """Announce a forward pass over asked tokens: ``positions`` (new,), ``own`` (new, all asked tokens so far + new) bool."""
        before = self._asked_positions
        self._asked_positions = positions if before is None else torch.cat([before, positions])
        self.step = Step(positions, own)
        for layer in self.layers:
            layer.asking = True

    def prune(self) -> None:
        """Questions from here on see what the format's pruning keeps, until reading goes on. Once for all of them."""
        for layer in self.layers:
            if layer.pruning is not None and layer.pruned is None:
                layer.prune()

    def drop_asked(self) -> None:
        """Forget all asked tokens."""
        for layer in self.layers:
            layer.drop_asked()
        self.step = self._asked_positions = None

    def key_positions(self, layer: FormatLayer, keys: int) -> torch.Tensor:
        """Positions in the context of the ``keys`` keys that ``layer`` returned last, (keys,) int64."""
        assert self.step is not None
        positions = self.step.positions
        own = self._asked_positions if layer.asking else positions
        assert own is not None
        before = layer.seen if layer.asking else layer.seen - layer.own_tokens  # tokens read before the own ones
        kept = keys - layer.own_tokens
        sinks = min(layer.window.sinks if layer.window else 0, kept)
        recent = torch.arange(before - (kept - sinks), before, device=positions.device)
        return torch.cat([torch.arange(sinks, device=positions.device), recent, own])

    @property
    def seen(self) -> int:
        """Tokens of the context read so far."""
        return self.layers[0].seen

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens kept, over all layers."""
        return sum(layer.stored_bytes for layer in self.layers)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers, over all layers."""
        return sum(layer.reserved_bytes for layer in self.layers)
