"""One reading on a transformers model: read a context once, chunk by chunk, and ask its questions on the way."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kveval.cache.cache import StreamCache
from kveval.cache.calibration import Scales
from kveval.cache.compat import cache_argument
from kveval.engines.base import Answer, Prompt, stop_at
from kveval.engines.head import Head
from kveval.errors import EngineError
from kveval.formats.spec import KVFormat
from kveval.memory.geometry import from_config
from kveval.memory.layers import layer_formats
from kveval.memory.predict import token_bytes

ASKED_TOKENS = 2048  # asked together in one forward pass at most; their scores are (rows, asked tokens)


@dataclass(frozen=True)
class Span:
    """A measured stretch of work: ``tokens`` computed in ``seconds``, with ``length`` tokens in the cache at its end."""

    phase: str  # prefill | record | ask | decode
    length: int
    tokens: int
    seconds: float


class Stream:
    """A model reading one context through a cache in one format. Owns the cache; use as a context manager."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        head: Head,
        fmt: KVFormat,
        ids: np.ndarray,
        *,
        chunk_tokens: int,
        spans: list[Span] | None = None,
        scales: Scales | None = None,
    ) -> None:
        self.model, self.tokenizer, self.head, self.fmt = model, tokenizer, head, fmt
        self.ids = torch.as_tensor(np.asarray(ids), dtype=torch.int64, device=model.device)
        self.chunk_tokens = chunk_tokens
        self.spans = spans if spans is not None else []
        self.cache = make_cache(model, fmt, len(ids), scales)
        self._argument = cache_argument(model.base_model)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        del self.cache

    @torch.inference_mode()
    def read_to(self, end: int, record: Callable[[int, torch.Tensor], None] | None = None) -> Iterator[int]:
        """Read on to ``end`` tokens. Yields after each chunk the tokens it held.

        ``record(first, hidden)`` gets the last hidden states
        (tokens, hidden size) of the positions from ``first`` on.
        """
        while self.cache.seen < end:
            start = self.cache.seen
            stop = min(end, start + self.chunk_tokens)
            begun = time.perf_counter()
            positions = torch.arange(start, stop, device=self.ids.device)
            self.cache.read(positions)
            hidden = self._forward(self.ids[start:stop], positions)
            self._span("prefill", stop - start, begun)
            if record is not None:
                begun = time.perf_counter()
                record(start, hidden)
                self._span("record", stop - start, begun)
            yield stop - start

    @torch.inference_mode()
    def ask(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """Answers to ``prompts``, whose prefix is what has been read, greedily, all in one forward pass a token; then dropped."""
        if any(prompt.prefix != self.cache.seen for prompt in prompts):
            raise EngineError(
                f"a question about {prompts[0].prefix} tokens was asked after {self.cache.seen} were read"
            )
        begun = time.perf_counter()
        self.cache.prune()
        try:
            pack = _Pack(self, prompts)
            while pack.active:
                pack.advance()
        finally:
            self.cache.drop_asked()
        self._span("ask", pack.computed, begun)
        return pack.answers()

    @torch.inference_mode()
    def look_on(self, end: int, record: Callable[[int, torch.Tensor], None]) -> None:
        """Compute the next tokens up to ``end`` as an answer's would be, after pruning; record them (``read_to``); drop them."""
        start = self.cache.seen
        positions = torch.arange(start, end, device=self.ids.device)
        begun = time.perf_counter()
        self.cache.prune()
        self.cache.ask(
            positions, torch.ones((end - start, end - start), dtype=torch.bool, device=positions.device).tril()
        )
        try:
            hidden = self._forward(self.ids[start:end], positions)
        finally:
            self.cache.drop_asked()
        self._span("ask", end - start, begun)
        record(start, hidden)

    @torch.inference_mode()
    def time_decode(self, tokens: int) -> None:
        """Measure ``tokens`` decode steps of one stream (batch 1) after what has been read; they are dropped."""
        device = self.ids.device
        begun = 0.0
        self.cache.prune()
        for i in range(tokens + 1):  # the first step warms up
            if i == 1:
                begun = time.perf_counter()
            own = torch.ones((1, i + 1), dtype=torch.bool, device=device)
            position = torch.tensor([self.cache.seen + i], device=device)
            self.cache.ask(position, own)
            self.head(self._forward(self.ids[:1], position)).argmax()
        self.cache.drop_asked()
        self._span("decode", tokens, begun)

    def cache_option(self) -> dict[str, StreamCache]:
        """The cache, as the keyword argument that this model's forward takes."""
        return {self._argument: self.cache}

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Last hidden states (tokens, hidden size) of ``ids`` (tokens,) at ``positions`` (tokens,)."""
        out = self.model.base_model(
            input_ids=ids[None], position_ids=positions[None], stream=self.cache, use_cache=True, **self.cache_option()
        )
        return out.last_hidden_state[0]

    def _span(self, phase: str, tokens: int, begun: float) -> None:
        if self.ids.device.type == "cuda":
            torch.cuda.synchronize(self.ids.device)
        self.spans.append(Span(phase, self.cache.seen, tokens, time.perf_counter() - begun))


class _Pack:
    """Questions asked together: their tokens lie side by side in one row, each sees the prefix and its own question only."""

    def __init__(self, stream: Stream, prompts: Sequence[Prompt]) -> None:
        self.stream, self.prompts = stream, prompts
        self.computed = 0
        self.generated: list[list[int]] = [[] for _ in prompts]
        self.finish: list[str] = ["" for _ in prompts]
        self.active = list(range(len(prompts)))
        self._owner = torch.empty(0, dtype=torch.int64, device=stream.ids.device)  # question of each asked token
        self._eos = _eos_ids(stream.model, stream.tokenizer)

    def advance(self) -> None:
        """One forward pass: the questions' tails the first time, then the token each active question generated last."""
        first = self.computed == 0
        pieces = [list(self.prompts[i].tail) if first else [self.generated[i][-1]] for i in self.active]
        starts = [0 if first else len(self.prompts[i].tail) + len(self.generated[i]) - 1 for i in self.active]
        device = self._owner.device
        lengths = torch.tensor([len(piece) for piece in pieces], device=device)
        rows = torch.tensor([token for piece in pieces for token in piece], device=device)
        offsets = [start + j for start, piece in zip(starts, pieces, strict=True) for j in range(len(piece))]
        owner = torch.tensor(self.active, device=device).repeat_interleave(lengths)
        self._owner = torch.cat([self._owner, owner])
        # A token sees those of its own question that came before it in the row: they lie in order.
        arrived = torch.arange(len(self._owner), device=device)
        own = (self._owner == owner[:, None]) & (arrived <= arrived[-len(rows) :, None])
        seen = self.stream.cache.seen
        positions = seen + torch.tensor(offsets, device=device)
        self.stream.cache.ask(positions, own)
        hidden = self.stream._forward(rows, positions)
        self.computed += len(rows)
        self._take(self.stream.head(hidden[lengths.cumsum(0) - 1]).argmax(dim=-1).tolist())

    def _take(self, tokens: list[int]) -> None:
        for i, token in zip(self.active, tokens, strict=True):
            if token in self._eos:
                self.finish[i] = "eos"
                continue
            self.generated[i].append(token)
            if stop_at(self._text(i), self.prompts[i].until)[1]:
                self.finish[i] = "stop"
            elif len(self.generated[i]) >= self.prompts[i].max_tokens:
                self.finish[i] = "length"
        self.active = [i for i in self.active if not self.finish[i]]

    def _text(self, i: int) -> str:
        return self.stream.tokenizer.decode(
            self.generated[i], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def answers(self) -> list[Answer]:
        """In the order of the prompts."""
        read = self.stream.cache.seen
        tails = torch.bincount(self._owner, minlength=len(self.prompts)).tolist()
        return [
            Answer(
                prompt_sha256=prompt.sha256,
                prompt_tokens=prompt.tokens,
                # Tokens of this question that went through the model, less those it generated and was fed back.
                read_tokens=read + tails[i] - max(0, len(self.generated[i]) - (self.finish[i] != "eos")),
                text=stop_at(self._text(i), prompt.until)[0],
                finish_reason=self.finish[i],
            )
            for i, prompt in enumerate(self.prompts)
        ]


def packs(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts in order, in groups whose tails and answers stay within ASKED_TOKENS."""
    pack: list[Prompt] = []
    tokens = 0
    for prompt in prompts:
        more = len(prompt.tail) + prompt.max_tokens
        if pack and tokens + more > ASKED_TOKENS:
            yield pack
            pack, tokens = [], 0
        pack.append(prompt)
        tokens += more
    if pack:
        yield pack


def make_cache(model: PreTrainedModel, fmt: KVFormat, capacity: int, scales: Scales | None = None) -> StreamCache:
    """A cache for ``capacity`` tokens of ``model`` in ``fmt``. Raises KvevalError for layer types that it cannot store."""
    geometry = from_config(model.config.to_dict())
    token_bytes(geometry, fmt)  # refuses a head_dim that the format cannot store
    return StreamCache(layer_formats(geometry, fmt), capacity=capacity, rotary=rotary_of(model), scales=scales)


def rotary_of(model: PreTrainedModel) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    """The model's rotary embedding as a function of positions, without the scaling some put on top; None where it has none."""
    embedding = getattr(model.base_model, "rotary_emb", None)
    if embedding is None:
        return None
    # Gemma 3 turns its sliding layers by other angles; a window with sinks is for the layers that do not slide.
    kind = "full_attention" if "layer_type" in inspect.signature(inspect.unwrap(embedding.forward)).parameters else None
    options = {} if kind is None else {"layer_type": kind}
    scaling = float(getattr(embedding, "attention_scaling" if kind is None else f"{kind}_attention_scaling", 1.0))

    def rotary(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        cos, sin = embedding(like, position_ids=positions[None], **options)
        return cos[0] / scaling, sin[0] / scaling

    return rotary


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return {int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None}
