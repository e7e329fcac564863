"""Room for encoded tokens: one buffer for each part of a codec, grown ahead, read as views."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kveval.formats.side import Side

# Numbers that a codec is given at once: few enough that what lies between input and output stays in the caches, enough
# that starting threads does not cost more than their work (benchmarks/formats.py).
CPU_NUMBERS = 1_048_576
OTHER_NUMBERS = 2**25  # on a GPU only the working memory matters


class Store:
    """The keys (or values) of one layer, in order of arrival: encoded blocks, then the newest tokens in BF16 where the
    format keeps them apart. Each part of a codec is (heads, blocks, width).
    """

    def __init__(self, side: Side, capacity: int) -> None:
        """``capacity``: tokens that there is room for; it grows where more come."""
        self.side = side
        self.encoded = 0  # tokens
        self.waiting: torch.Tensor | None = None  # (heads, tokens, head_dim) bfloat16
        self._capacity = -(-capacity // side.codec.block_tokens)  # blocks
        self._parts: tuple[torch.Tensor, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens stored."""
        return self.encoded + (0 if self.waiting is None else self.waiting.shape[1])

    def append(self, x: torch.Tensor) -> torch.Tensor | None:
        """Store ``x`` (heads, tokens, head_dim) behind what is there; each number is encoded once.

        Returns the tokens that were not encoded before, in BF16 (heads, tokens, head_dim), where some wait; else None.
        """
        if self.side.residual == 0:
            self._write(x)
            return None
        new = x.to(torch.bfloat16)
        fresh = new if self.waiting is None else torch.cat([self.waiting, new], dim=1)
        leave = self.side.encoded(self.tokens + x.shape[1]) - self.encoded
        if leave:
            self._write(fresh[:, :leave])
        self.waiting = fresh[:, leave:].clone()
        return fresh

    def _write(self, x: torch.Tensor) -> None:
        block = self.side.codec.block_tokens
        for first, last in _slabs(x.shape, block, x.device):
            parts = self.side.codec.encode(x[:, first:last])
            start, end = self.encoded // block, (self.encoded + last - first) // block
            # Room for all that comes in this call at once: growing copies what is there.
            self._make_room(parts, end + (x.shape[1] - last) // block)
            for room, part in zip(self._parts, parts, strict=True):
                room[:, start:end] = part
            self.encoded += last - first

    def _make_room(self, parts: tuple[torch.Tensor, ...], blocks: int) -> None:
        if self._parts and blocks <= self._capacity:
            return
        capacity = max(blocks, self._capacity + (self._capacity // 2 if self._parts else 0))
        grown = tuple(part.new_empty((part.shape[0], capacity, part.shape[2])) for part in parts)
        for new, old in zip(grown, self.parts(), strict=bool(self._parts)):
            new[:, : old.shape[1]] = old
        self._parts, self._capacity = grown, capacity

    def decode(self, out: torch.Tensor) -> None:
        """Write all stored vectors into ``out`` (heads, tokens, head_dim)."""
        block, parts = self.side.codec.block_tokens, self.parts()
        for first, last in _slabs(out[:, : self.encoded].shape, block, out.device):
            self.side.codec.decode([part[:, first // block : last // block] for part in parts], out[:, first:last])
        if self.waiting is not None:
            out[:, self.encoded :] = self.waiting

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Views of the encoded blocks, without the room for growth."""
        blocks = self.encoded // self.side.codec.block_tokens
        return tuple(part[:, :blocks] for part in self._parts)

    def keep(self, first: int, last: int) -> None:
        """Keep the ``first`` oldest and the ``last`` newest vectors, bit for bit; drop those between."""
        assert self.side.residual == 0
        if first + last >= self.tokens:
            return
        for part in self._parts:
            part[:, first : first + last] = part[:, self.encoded - last : self.encoded].clone()
        self.encoded = first + last

    def selected(self, tokens: torch.Tensor) -> Store:
        """Another store with the vectors at ``tokens`` (heads, kept) int64 of each head, bit for bit."""
        assert self.side.residual == 0
        other = Store(self.side, tokens.shape[1])
        other._parts = tuple(
            part.view(torch.uint8)
            .gather(1, tokens[:, :, None].expand(-1, -1, part.shape[2] * part.element_size()))
            .view(part.dtype)
            for part in self.parts()
        )
        other.encoded = tokens.shape[1]
        return other

    def clear(self) -> None:
        """Drop everything, and the room with it."""
        self._parts, self.waiting, self.encoded = (), None, 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the stored vectors."""
        return _bytes(self.parts()) + self._waiting_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers, with their room for growth."""
        return _bytes(self._parts) + self._waiting_bytes

    @property
    def _waiting_bytes(self) -> int:
        return 0 if self.waiting is None else _bytes((self.waiting,))


def _bytes(tensors: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _slabs(shape: torch.Size, block: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """First and last + 1 token of the pieces, whole blocks each, in which a codec gets (heads, tokens, head_dim)."""
    heads, tokens, head_dim = shape
    numbers = CPU_NUMBERS if device.type == "cpu" else OTHER_NUMBERS
    step = max(1, numbers // (heads * head_dim * block)) * block
    for first in range(0, tokens, step):
        yield first, min(tokens, first + step)
