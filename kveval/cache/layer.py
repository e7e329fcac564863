"""A transformers cache layer that stores a KV format: what attention reads is what was written, in prefill as in decode."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kveval.cache.store import Store
from kveval.errors import EngineError
from kveval.formats.spec import KVFormat
from kveval.formats.window import Window


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


class FormatLayer(CacheLayerMixin):
    """One layer of one stream. Tokens are read (kept, evicted by the window) or asked (kept apart, dropped without a trace)."""

    is_sliding = False
    is_croppable = False

    def __init__(self, index: int, fmt: KVFormat, window: Window | None, capacity: int, scratch: Scratch) -> None:
        super().__init__()
        self.index, self.window, self.scratch = index, window, scratch
        room = capacity if window is None else min(capacity, window.size)
        self.read = (Store(fmt.codec, room), Store(fmt.codec, room))
        self.asked = (Store(fmt.codec, 0), Store(fmt.codec, 0))
        self.seen = 0
        self.asking = False
        self.own_tokens = (
            0  # of the keys returned last, how many at the end belong to the tokens being computed or asked
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: stores are made with their first token."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values (1, heads, new, head_dim); return what attention may read, (1, heads, kept + new, head_dim).

        With a window, tokens leave the store once the chunk has been returned: every query of the chunk still
        finds its own window. Raises EngineError for more than one stream and for NaN or infinity, naming layer and
        position.
        """
        if key_states.shape[0] != 1:
            raise EngineError(f"a kveval cache holds one stream, but a batch of {key_states.shape[0]} came")
        self.is_initialized = True
        for name, states in (("keys", key_states), ("values", value_states)):
            self._refuse_not_finite(name, states)
        stores = self.asked if self.asking else self.read
        for store, states in zip(stores, (key_states, value_states), strict=True):
            store.append(states[0])
        keys, values = (
            self._decoded(name, k, states) for name, k, states in (("keys", 0, key_states), ("values", 1, value_states))
        )
        self.own_tokens = self.asked[0].tokens if self.asking else key_states.shape[2]
        if not self.asking:
            self.seen += key_states.shape[2]
            if self.window is not None:
                for store in self.read:
                    store.keep(self.window.sinks, self.window.recent)
        return keys, values

    def _decoded(self, name: str, which: int, like: torch.Tensor) -> torch.Tensor:
        read, asked = self.read[which], self.asked[which]
        out = self.scratch.view(name, like, read.tokens + asked.tokens)
        read.decode(out[:, : read.tokens])
        asked.decode(out[:, read.tokens :])
        return out.unsqueeze(0)

    def _refuse_not_finite(self, name: str, states: torch.Tensor) -> None:
        if not torch.isfinite(states.sum()):
            bad = (~torch.isfinite(states[0])).any(dim=-1).any(dim=0).nonzero()
            place = (
                f"position {self.seen + int(bad[0])}"
                if len(bad)
                else f"positions from {self.seen} on (their sum overflows)"
            )
            raise EngineError(f"the model wrote NaN or infinity into the {name} of layer {self.index} at {place}")

    def drop_asked(self) -> None:
        """Forget the asked tokens; what was read is untouched."""
        for store in self.asked:
            store.clear()
        self.asking = False

    @property
    def stored_bytes(self) -> int:
        """Bytes of the tokens kept."""
        return sum(store.stored_bytes for store in (*self.read, *self.asked))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(store.reserved_bytes for store in (*self.read, *self.asked))

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
