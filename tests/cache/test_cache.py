"""The cache that stores a format for real, and attention over it, against independent computations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import read_logits, scales_for, tiny_llama
from transformers import DynamicCache, PreTrainedModel

from kveval.cache.cache import StreamCache
from kveval.cache.calibration import Scales
from kveval.engines.base import Prompt
from kveval.engines.head import Head
from kveval.engines.stream import Stream, make_cache
from kveval.errors import EngineError, KvevalError
from kveval.formats.half import Bf16
from kveval.formats.parse import parse_format
from kveval.formats.registry import STORAGES, Storage
from kveval.formats.rotation import rotate
from kveval.formats.side import Side
from kveval.formats.spec import KVFormat
from kveval.memory.geometry import Geometry, from_config
from kveval.memory.layers import layer_formats
from kveval.memory.predict import stream_bytes

# Every storage, and every way to keep fewer tokens or to put formats together.
FORMATS = [
    *STORAGES,
    "kivi4,residual=32",
    "fp8,values=kivi4,residual=32",
    "kivi2,values=q8_0",
    "int4-g32,rotate=hadamard",
    "kivi4,rotate=hadamard",
    "fp8-channel,rotate=hadamard",
    "int2-g32,skip_layers=1",
    "window:64",
    "swa:64",
    "window:40,store=fp8",
    "window:40,store=int4-g32,rotate=hadamard",
    "snapkv:0.5",
    "tova:0.5",
    "knorm:0.5,store=fp8-channel",
    "streaming:0.25,store=q4_0",
]
LAYERS = 3  # int2-g32,skip_layers=1 leaves one in the middle
GEOMETRY = Geometry(("full", "full"), kv_heads=2, head_dim=32, positions=4096)
IDS = np.random.default_rng(0).integers(0, 101, 300)


class Words:
    """A tokenizer whose tokens are their numbers."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: object) -> str:
        """Numbers with spaces between."""
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(num_hidden_layers=LAYERS, head_dim=64)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def stream(model: PreTrainedModel, name: str, ids: np.ndarray = IDS, chunk: int = 64) -> Stream:
    fmt = parse_format(name)
    return Stream(model, Words(), Head(model), fmt, ids, chunk_tokens=chunk, scales=scales_for(model, fmt, ids))


def stored(reading: Stream) -> list[torch.Tensor]:
    """Copies of all that a cache has read, as bytes."""
    stores = [store for layer in reading.cache.layers for store in layer.read]
    parts = [part for store in stores for part in store.parts()]
    return [part.clone().view(torch.uint8) for part in parts + [s.waiting for s in stores if s.waiting is not None]]


class Exact(Bf16):
    """Float32 storage: nothing is rounded."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As it came."""
        return (x.float(),)


def exact() -> Storage:
    """A storage that rounds nothing."""
    return Storage(Side(Exact()), Side(Exact()), "", "", "")


class AsStored(DynamicCache):
    """transformers' own cache, token by token, given each key and value as the format has it when that token reads: kveval's
    formats without kveval's cache. Static scales are the codec's business (test_fp8)."""

    def __init__(self, fmt: KVFormat, model: PreTrainedModel, scales: Scales | None) -> None:
        super().__init__(config=model.config)
        self.layer_formats = layer_formats(from_config(model.config.to_dict()), fmt)
        self.scales = scales or [(torch.ones(()), torch.ones(()))] * LAYERS

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: object, **kwargs: object) -> tuple:
        """Keep what came; hand out what the newest token would find stored."""
        whole = super().update(keys, values, layer)
        fmt = self.layer_formats[layer].fmt
        turn = rotate if fmt.rotate else (lambda x: x)
        read = []
        for side, amax, states in zip(fmt.sides, self.scales[layer], whole, strict=True):
            tokens = states.shape[2]
            codec = side.codec.calibrated(amax)
            seen = turn(states[0])
            encoded = tokens
            if side.residual:  # KIVI's own rule, the newest token not yet counted
                before = tokens - 1
                r = side.residual
                encoded = before // r * r if codec.block_tokens > 1 else max(0, before - r)
                seen = seen.to(torch.bfloat16).to(states.dtype)
            out = seen.clone()
            if encoded:
                codec.decode(codec.encode(seen[:, :encoded]), out[:, :encoded])
            read.append(turn(out)[None])
        return tuple(read)


def by_the_book(model: PreTrainedModel, fmt: KVFormat, ids: np.ndarray, scales: Scales | None = None) -> torch.Tensor:
    """Logits (tokens, vocabulary) of a stock model, one token at a time, over the numbers that ``fmt`` would give it."""
    cache = AsStored(fmt, model, scales)
    return torch.cat([model(torch.tensor([[int(token)]]), past_key_values=cache).logits[0] for token in ids])


STORING = [name for name in FORMATS if not (parse_format(name).window or parse_format(name).pruning)]


DOUBLE: dict[str, Any] = {"num_hidden_layers": LAYERS, "head_dim": 64, "dtype": torch.float64}


@pytest.fixture(scope="module")
def stock() -> tuple[PreTrainedModel, torch.Tensor]:
    """A model with transformers' own attention, and its logits over BF16 keys and values."""
    with torch.inference_mode():
        model = tiny_llama(attention="eager", **DOUBLE)
        return model, by_the_book(model, KVFormat(), IDS[:150])


@pytest.mark.parametrize("name", STORING)
def test_logits_equal_stock_attention_over_the_same_numbers(
    name: str, stock: tuple[PreTrainedModel, torch.Tensor]
) -> None:
    """Against transformers' eager attention and DynamicCache, token by token; kveval reads in chunks of 1, 50 and all."""
    ids, ours, fmt = IDS[:150], tiny_llama(**DOUBLE), parse_format(name)
    scales = scales_for(ours, fmt, IDS)
    expected = by_the_book(stock[0], fmt, ids, scales)
    for chunk in (1, 50, 150):
        moved = (read_logits(ours, fmt, ids, chunk, scales) - expected).abs()
        # A last-bit difference between two ways to add up can put a number on the other side of a rounding.
        assert (moved < 3e-3).float().mean() > 0.98
        assert moved.max() < 0.1
    if fmt.lossy:
        assert (stock[1] - expected).abs().mean() > 20 * moved.mean()


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("name", ["fp8", "kivi4,residual=32", "int4-g32,rotate=hadamard"])
def test_one_kv_head_for_all_queries_and_one_for_each(name: str, kv_heads: int) -> None:
    fmt = parse_format(name)
    stock, ours = (
        tiny_llama(kv_heads=kv_heads, attention=how, dtype=torch.float64) for how in ("eager", "kveval_split")
    )
    got, expected = read_logits(ours, fmt, IDS[:100], 33), by_the_book(stock, fmt, IDS[:100])
    assert ((got - expected).abs() < 3e-3).float().mean() > 0.98


def streaming_llm(model: PreTrainedModel, ids: np.ndarray, size: int, sinks: int) -> torch.Tensor:
    """Logits (tokens, vocabulary) by the paper's recipe, token by token: keys kept before rotation; what is evicted is gone;
    keys and query are rotated by their place in the cache."""
    rows = []
    base, dim = model.model, model.config.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in base.layers]

    def rotated(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        cos, sin = base.rotary_emb(x, position_ids=places[None])
        half = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        return x * cos[0] + half * sin[0]

    for token in ids:
        h = base.embed_tokens(torch.tensor([[int(token)]]))
        for layer, cache in zip(base.layers, kept, strict=True):
            x = layer.input_layernorm(h)
            q, k, v = (
                getattr(layer.self_attn, f"{name}_proj")(x).view(-1, dim) for name in ("q", "k", "v")
            )  # (heads, head_dim)
            cache.append((k, v))
            if len(cache) > size:
                del cache[sinks]
            places = torch.arange(len(cache))
            keys = rotated(torch.stack([k for k, _ in cache], dim=1), places).repeat_interleave(group, 0)
            values = torch.stack([v for _, v in cache], dim=1).repeat_interleave(group, 0)
            query = rotated(q[:, None], places[-1:])
            weights = (query @ keys.transpose(1, 2) * dim**-0.5).softmax(-1)
            h = h + layer.self_attn.o_proj((weights @ values).reshape(1, 1, -1))
            h = h + layer.mlp(layer.post_attention_layernorm(h))
        rows.append(model.lm_head(base.norm(h))[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(("size", "sinks"), [(64, 4), (64, 0), (20, 1), (9, 8)])
def test_a_window_equals_the_papers_recipe_token_by_token(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, size: int, sinks: int
) -> None:
    """Stored without rounding, so that only the arithmetic is compared: the paper rotates after the cache, kveval before."""
    monkeypatch.setitem(STORAGES, "exact", exact())
    expected = streaming_llm(model, IDS[:160], size, sinks)
    got = read_logits(model, parse_format(f"window:{size},sinks={sinks},store=exact"), IDS[:160], 50)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    wrong = read_logits(model, parse_format(f"window:{size + 1},sinks={sinks},store=exact"), IDS[:160], 50)
    assert (wrong - expected).abs().max() > 0.5  # a window of one token more is seen at once


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_do_not_change_the_logits(name: str) -> None:
    """But for roundings: a last-bit difference in a number can put it on the other side of one."""
    model, fmt = tiny_llama(**DOUBLE), parse_format(name)
    scales = scales_for(model, fmt, IDS)
    for tokens, chunks in ((140, (1, 7)), (300, (256,))):
        whole = read_logits(model, fmt, IDS[:tokens], tokens, scales)
        for chunk in chunks:
            moved = (read_logits(model, fmt, IDS[:tokens], chunk, scales) - whole).abs()
            assert (moved < 1e-3).float().mean() > 0.98
            assert moved.max() < 0.1


@pytest.mark.parametrize("name", FORMATS)
def test_stored_bytes_are_the_formula(model: PreTrainedModel, name: str) -> None:
    geometry = from_config(model.config.to_dict())
    with stream(model, name) as reading:
        for end in (1, 31, 32, 33, 65, 300):
            list(reading.read_to(end))
            reading.cache.prune()
            assert reading.cache.stored_bytes == stream_bytes(geometry, parse_format(name), end)
            assert reading.cache.stored_bytes <= reading.cache.reserved_bytes


def prompts(count: int, prefix: int) -> list[Prompt]:
    random = np.random.default_rng(1)
    return [
        Prompt(IDS, prefix, tuple(int(t) for t in random.integers(0, 101, 3 + i % 5)), max_tokens=6)
        for i in range(count)
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_asked_together_or_one_by_one_the_answers_are_the_same_and_leave_no_trace(
    model: PreTrainedModel, name: str
) -> None:
    with stream(model, name) as reading:
        list(reading.read_to(200))
        before = stored(reading)
        together = reading.ask(prompts(32, 200))
        alone = [reading.ask([prompt])[0] for prompt in prompts(32, 200)]
        after = stored(reading)
        assert together == alone
        assert len({answer.text for answer in together}) > 16  # they are different questions with different answers
        for one, two in zip(before, after, strict=True):
            assert torch.equal(one, two)
        for answer, prompt in zip(together, prompts(32, 200), strict=True):
            assert answer.read_tokens == answer.prompt_tokens == prompt.tokens
        list(reading.read_to(300))
        asked_then_read = reading.ask(prompts(4, 300))
    with stream(model, name) as reading:
        list(reading.read_to(200))
        list(reading.read_to(300))
        assert reading.ask(prompts(4, 300)) == asked_then_read


PARTED = [name for name in FORMATS if "kivi" in name or parse_format(name).pruning]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in PARTED])
def test_an_answer_is_what_reading_the_whole_prompt_predicts(name: str) -> None:
    """An answer's every token is the greedy choice after prompt and answer so far, read as one context."""
    model, fmt = tiny_llama(**DOUBLE), parse_format(name)
    with stream(model, name) as reading:
        list(reading.read_to(200))
        answers = reading.ask(prompts(6, 200))
    for prompt, answer in zip(prompts(6, 200), answers, strict=True):
        generated = [int(word) for word in answer.text.split()]
        whole = np.concatenate([IDS[:200], prompt.tail, generated])
        logits = read_logits(model, fmt, whole, 50, scales_for(model, fmt, IDS))[prompt.tokens - 1 : -1]
        assert margin(logits, generated) < 0.03


def margin(logits: torch.Tensor, chosen: list[int]) -> float:
    """How far ``chosen`` falls short of the greedy choice at worst, in nats."""
    return float((logits.max(dim=-1).values - logits.gather(1, torch.tensor(chosen)[:, None])[:, 0]).max())


class Prefixed(DynamicCache):
    """transformers' own cache over a given prefix of keys and values (heads, tokens, head_dim); what comes is rounded as stored."""

    def __init__(self, prefix: list[tuple[torch.Tensor, ...]], fmt: KVFormat, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.prefix, self.fmt, self.scales = prefix, fmt, scales_for(model, fmt, IDS)
        for layer, (keys, values) in enumerate(prefix):
            super().update(keys[None], values[None], layer)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: object, **kwargs: object) -> tuple:
        """Round, append."""
        rounded = []
        for which, states in enumerate((keys, values)):
            side = self.fmt.sides[which]
            codec = Bf16() if side.residual else side.codec
            codec = codec.calibrated(self.scales[layer][which]) if self.scales else codec
            x = rotate(states[0]) if self.fmt.rotate else states[0]
            out = torch.empty_like(x)
            codec.decode(codec.encode(x), out)
            rounded.append((rotate(out) if self.fmt.rotate else out)[None])
        return super().update(*rounded, layer)


@pytest.mark.parametrize("name", PARTED)
def test_questions_see_what_is_stored_and_nothing_else(name: str) -> None:
    """Against transformers' own attention over the kept keys at their own positions."""
    model, other, fmt = tiny_llama(**DOUBLE), tiny_llama(attention="eager", **DOUBLE), parse_format(name)
    with stream(model, name) as reading:
        list(reading.read_to(200))
        answers = reading.ask(prompts(6, 200))
        prefix = []
        for layer in reading.cache.layers:
            stores = layer.read if layer.pruned is None else layer.pruned
            outs = [torch.empty(2, store.tokens, 64, dtype=torch.float64) for store in stores]
            for store, out in zip(stores, outs, strict=True):
                store.decode(out)
            prefix.append(tuple(rotate(out) if fmt.rotate else out for out in outs))
    assert prefix[0][0].shape[1] == fmt.kept(200)
    for prompt, answer in zip(prompts(6, 200), answers, strict=True):
        generated = [int(word) for word in answer.text.split()]
        tail = torch.tensor([*prompt.tail, *generated])[None]
        places = 200 + torch.arange(tail.shape[1])[None]
        cache = Prefixed(prefix, fmt, model)
        logits = other(tail, past_key_values=cache, position_ids=places).logits[0, len(prompt.tail) - 1 : -1]
        assert margin(logits, generated) < 0.03


def test_pruning_keeps_the_very_bytes_of_the_chosen_tokens(model: PreTrainedModel) -> None:
    """The chosen tokens themselves are checked in test_pruning_scores; here, by norm, that they are the ones kept."""
    with stream(model, "knorm:0.25,store=int4-g32") as reading:
        list(reading.read_to(200))
        reading.cache.prune()
        for layer in reading.cache.layers:
            assert layer.pruned is not None
            keys = torch.empty(2, 200, 64)
            layer.read[0].decode(keys)
            chosen = keys.norm(dim=-1).argsort(dim=-1)[:, :50].sort(dim=-1).values
            for whole, kept in zip(layer.read, layer.pruned, strict=True):
                for part, left in zip(whole.parts(), kept.parts(), strict=True):
                    for head in range(2):
                        assert torch.equal(part[head, chosen[head]], left[head])
        list(reading.read_to(250))
        assert all(layer.pruned is None for layer in reading.cache.layers)  # reading goes on with all tokens


def test_nan_in_the_cache_is_an_error_that_names_layer_and_position(model: PreTrainedModel) -> None:
    cache = StreamCache(layer_formats(GEOMETRY, parse_format("fp8")), capacity=8)
    states = torch.ones(1, 2, 3, 32)
    cache.update(states, states, 1)
    bad = states.clone()
    bad[0, 1, 2, 5] = torch.nan
    with pytest.raises(EngineError, match="values of layer 1 at position 5"):
        cache.update(states, bad, 1)


def test_more_than_one_stream_is_refused(model: PreTrainedModel) -> None:
    states = torch.ones(2, 2, 3, 32)
    with pytest.raises(EngineError, match="batch of 2"):
        StreamCache(layer_formats(GEOMETRY, parse_format("fp8")), capacity=8).update(states, states, 0)


def test_layer_types_that_cannot_be_stored_are_refused(model: PreTrainedModel) -> None:
    other = tiny_llama()
    other.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(KvevalError, match="linear_attention"):
        make_cache(other, parse_format("fp8"), 8)


def test_a_question_about_another_length_is_refused(model: PreTrainedModel) -> None:
    with stream(model, "bf16") as reading:
        list(reading.read_to(100))
        with pytest.raises(EngineError, match="200 tokens was asked after 100"):
            reading.ask(prompts(1, 200))


def test_attention_refuses_a_model_that_does_not_hand_the_cache_through(model: PreTrainedModel) -> None:
    with pytest.raises(EngineError, match="does not hand the cache through"):
        model(torch.tensor(IDS)[None])


@pytest.mark.parametrize("name", ["snapkv:0.5", "tova:0.25", "knorm:0.5,store=int4-g32", "streaming:0.3"])
def test_chunks_do_not_change_what_pruning_keeps(name: str) -> None:
    """The latest queries are gathered over chunks shorter than the window that asks."""
    model = tiny_llama(**DOUBLE)
    kept = []
    for chunk in (1, 7, 256):
        with stream(model, name, chunk=chunk) as reading:
            list(reading.read_to(200))
            reading.cache.prune()
            stores = [store for layer in reading.cache.layers for store in layer.pruned or ()]
            kept.append([part.clone().view(torch.uint8) for store in stores for part in store.parts()])
    for other in kept[1:]:
        for one, two in zip(kept[0], other, strict=True):
            assert one.shape == two.shape
            assert (one == two).float().mean() > 0.99  # but for a number on the other side of a rounding
