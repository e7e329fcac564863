"""Room for encoded tokens: one buffer for each part of a codec, grown ahead, read as views."""

from __future__ import annotations

import torch

from kveval.formats.codec import Codec


class Store:
    """Encoded vectors of one layer's keys (or values), in order of arrival; each part is (heads, tokens, width)."""

    def __init__(self, codec: Codec, capacity: int) -> None:
        self.codec = codec
        self.capacity = capacity
        self.tokens = 0
        self._parts: tuple[torch.Tensor, ...] = ()

    def append(self, x: torch.Tensor) -> None:
        """Encode ``x`` (heads, tokens, head_dim) once, behind what is stored."""
        parts = self.codec.encode(x)
        end = self.tokens + x.shape[1]
        if not self._parts:
            self._parts = tuple(self._room(part, max(self.capacity, end)) for part in parts)
        elif end > self.capacity:
            self._grow(max(end, self.capacity + self.capacity // 2))
        self.capacity = self._parts[0].shape[1]
        for room, part in zip(self._parts, parts, strict=True):
            room[:, self.tokens : end] = part
        self.tokens = end

    def _room(self, part: torch.Tensor, capacity: int) -> torch.Tensor:
        return part.new_empty((part.shape[0], capacity, part.shape[2]))

    def _grow(self, capacity: int) -> None:
        grown = tuple(self._room(part, capacity) for part in self._parts)
        for new, old in zip(grown, self._parts, strict=True):
            new[:, : self.tokens] = old[:, : self.tokens]
        self._parts = grown

    def decode(self, out: torch.Tensor) -> None:
        """Write all stored vectors into ``out`` (heads, tokens, head_dim)."""
        if self.tokens:
            self.codec.decode(self.parts(), out)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Views of what is stored, without the room for growth."""
        return tuple(part[:, : self.tokens] for part in self._parts)

    def keep(self, first: int, last: int) -> None:
        """Keep the ``first`` oldest and the ``last`` newest vectors, bit for bit; drop those between."""
        if first + last >= self.tokens:
            return
        for part in self._parts:
            part[:, first : first + last] = part[:, self.tokens - last : self.tokens].clone()
        self.tokens = first + last

    def clear(self) -> None:
        """Drop everything, and the room with it."""
        self._parts, self.tokens = (), 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored vectors."""
        return sum(part.numel() * part.element_size() for part in self.parts())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers, with their room for growth."""
        return sum(part.numel() * part.element_size() for part in self._parts)
