"""A transformers cache layer that stores a KV format: what attention reads is what was written, in prefill as in decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kveval.cache.pruning import OBSERVED, kept_tokens
from kveval.cache.store import Store
from kveval.errors import EngineError
from kveval.formats.half import Bf16
from kveval.formats.rotation import rotate
from kveval.formats.side import Side
from kveval.formats.spec import KVFormat
from kveval.formats.window import Window

STORED_AS_IS = Side(Bf16())


class Scratch:
    """Decoded keys and values of one layer at a time; the next layer's decode overwrites them."""

    def __init__(self) -> None:
        self._rooms: dict[str, torch.Tensor] = {}

    def view(self, name: str, like: torch.Tensor, tokens: int) -> torch.Tensor:
        """(heads, tokens, head_dim) in the dtype and on the device of ``like`` (1, heads, any, head_dim)."""
        _, heads, _, width = like.shape
        room = self._rooms.get(name)
        fits = room is not None and room.shape[1] >= tokens and (room.shape[0], room.shape[2]) == (heads, width)
        if room is None or not fits or room.dtype != like.dtype:
            self._rooms.pop(name, None)
            room = self._rooms[name] = like.new_empty((heads, tokens, width))
        return room[:, :tokens]


@dataclass(frozen=True)
class Waiting:
    """Keys (or values) as they were before the chunk at hand was encoded: (heads, tokens, head_dim) from ``first`` on."""

    side: Side
    first: int
    numbers: torch.Tensor | None  # None where nothing waits: every token is read encoded, its own too


class FormatLayer(CacheLayerMixin):
    """One layer of one stream. Tokens are read (kept, evicted by the window) or asked (kept apart, dropped without a trace)."""

    is_sliding = False
    is_croppable = False

    def __init__(
        self,
        index: int,
        fmt: KVFormat,
        sides: tuple[Side, Side],
        *,
        window: Window | None,
        capacity: int,
        scratch: Scratch,
    ) -> None:
        """``fmt`` is this layer's (``KVFormat.of_layer``); ``sides`` are its own with their static scales found."""
        super().__init__()
        self.index, self.window, self.scratch = index, window, scratch
        self.rotated, self.pruning = fmt.rotate, fmt.pruning
        room = capacity if window is None else min(capacity, window.size)
        self.read = tuple(Store(side, room) for side in sides)
        # While questions are asked nothing that waits is encoded, and neither are the questions.
        self.asked = tuple(Store(STORED_AS_IS if side.residual else side, 0) for side in sides)
        self.pruned: tuple[Store, ...] | None = None
        self.waiting: tuple[Waiting, ...] | None = None  # keys, values of the chunk being read
        self._observed: torch.Tensor | None = None  # (heads, tokens, head_dim): the latest queries
        self._scale = 1.0  # of the attention scores
        self.seen = 0
        self.asking = False
        # Of the keys returned last, how many at the end belong to the tokens being computed or asked.
        self.own_tokens = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: stores are made with their first token."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values (1, heads, new, head_dim); return what attention may read, (1, heads, kept + new, head_dim).

        With a window, tokens leave the store once the chunk has been returned: every query of the chunk still
        finds its own window. Raises EngineError for more than one stream and for numbers that cannot be stored (NaN,
        infinity, beyond the format), naming layer and position.
        """
        if key_states.shape[0] != 1:
            raise EngineError(f"a kveval cache holds one stream, but a batch of {key_states.shape[0]} came")
        self.is_initialized = True
        if self.rotated:
            key_states, value_states = rotate(key_states), rotate(value_states)
        for name, states, store in zip(("keys", "values"), (key_states, value_states), self.read, strict=True):
            self._refuse_unstorable(name, states, store.side.codec.largest)
        if self.asking:
            self._append(self.asked, key_states, value_states)
        else:
            self.pruned = None
            self.waiting = self._append(self.read, key_states, value_states)
        keys, values = self._decoded("keys", 0, key_states), self._decoded("values", 1, value_states)
        self.own_tokens = self.asked[0].tokens if self.asking else key_states.shape[2]
        if not self.asking:
            self.seen += key_states.shape[2]
            if self.window is not None:
                for store in self.read:
                    store.keep(self.window.sinks, self.window.recent)
        return keys, values

    def _append(self, stores: tuple[Store, ...], *states: torch.Tensor) -> tuple[Waiting, ...] | None:
        before = [store.encoded for store in stores]
        fresh = [store.append(one[0]) for store, one in zip(stores, states, strict=True)]
        if all(one is None for one in fresh):
            return None
        return tuple(Waiting(store.side, at, one) for store, at, one in zip(stores, before, fresh, strict=True))

    def _decoded(self, name: str, which: int, like: torch.Tensor) -> torch.Tensor:
        read, asked = (self.read if self.pruned is None else self.pruned)[which], self.asked[which]
        out = self.scratch.view(name, like, read.tokens + asked.tokens)
        read.decode(out[:, : read.tokens])
        asked.decode(out[:, read.tokens :])
        return out.unsqueeze(0)

    def _refuse_unstorable(self, name: str, states: torch.Tensor, largest: float) -> None:
        if torch.isfinite(states.sum()) and (largest == torch.inf or states.abs().amax() <= largest):
            return
        bad = ~(torch.isfinite(states[0]) & (states[0].abs() <= largest))
        at = bad.any(dim=-1).any(dim=0).nonzero()
        position = self.get_seq_length() + (int(at[0]) if len(at) else 0)
        place = f"layer {self.index} at position {position}"
        if not torch.isfinite(states[0]).all():
            raise EngineError(f"the model wrote NaN or infinity into the {name} of {place}")
        if len(at):
            raise EngineError(f"the {name} of {place} hold numbers beyond {largest:g}, the format's largest")

    def observe(self, query: torch.Tensor, scale: float) -> None:
        """Remember the latest queries (1, heads, tokens, head_dim) of what is read: pruning asks what they attend to."""
        latest = query[0, :, -OBSERVED:]
        if self._observed is not None and latest.shape[1] < OBSERVED:
            latest = torch.cat([self._observed, latest], dim=1)[:, -OBSERVED:]
        self._observed, self._scale = latest.clone(), scale

    def prune(self) -> None:
        """From here on questions see what the pruning keeps of the tokens read, until reading goes on."""
        assert self.pruning is not None
        assert self._observed is not None
        keys = self.scratch.view("keys", self._observed[None, : self._kv_heads], self.read[0].tokens)
        self.read[0].decode(keys)
        kept = kept_tokens(self.pruning, keys, self._observed, self._scale)
        self.pruned = tuple(store.selected(kept) for store in self.read)

    @property
    def _kv_heads(self) -> int:
        return self.read[0].parts()[0].shape[0]

    def drop_asked(self) -> None:
        """Forget the asked tokens; what was read is untouched."""
        for store in self.asked:
            store.clear()
        self.asking = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens kept (after pruning: of what is left), with the static scales."""
        return self._scale_bytes + sum(store.stored_bytes for store in (*(self.pruned or self.read), *self.asked))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all buffers, with the static scales."""
        stores = (*self.read, *(self.pruned or ()), *self.asked)
        return self._scale_bytes + sum(store.reserved_bytes for store in stores)

    @property
    def _scale_bytes(self) -> int:
        scales = (part for store in self.read for part in store.side.codec.constants)
        return sum(part.numel() * part.element_size() for part in scales)

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included."""
        return self.seen + self.asked[0].tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(kept + new, position of the first kept): an offset of 0 with evicted tokens would lose causality inside a chunk."""
        kept = self.read[0].tokens + self.asked[0].tokens
        return kept + query_length, self.get_seq_length() - kept

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.24
