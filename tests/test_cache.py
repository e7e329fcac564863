"""The cache that stores a format for real, and attention over it, against independent computations."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny import read_logits, tiny_llama
from transformers import DynamicCache, PreTrainedModel

from kveval.cache.cache import StreamCache
from kveval.engines.base import Prompt
from kveval.engines.head import Head
from kveval.engines.stream import Stream, make_cache
from kveval.errors import EngineError, KvevalError
from kveval.formats.bf16 import Bf16
from kveval.formats.spec import CODECS, parse_format
from kveval.memory.geometry import from_config
from kveval.memory.predict import stream_bytes

FORMATS = ["bf16", "fp8", "int4-g32", "window:64", "window:64,sinks=0", "window:40,store=fp8"]
IDS = np.random.default_rng(0).integers(0, 101, 300)


class Words:
    """A tokenizer whose tokens are their numbers."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: object) -> str:
        """Numbers with spaces between."""
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def stream(model: PreTrainedModel, name: str, ids: np.ndarray = IDS, chunk: int = 64) -> Stream:
    return Stream(model, Words(), Head(model), parse_format(name), ids, chunk_tokens=chunk)


class Exact(Bf16):
    """Float32 storage: nothing is rounded."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As it came."""
        return (x.float(),)


class RoundedCache(DynamicCache):
    """transformers' own cache, given each key and value as the codec brings it back: the format without kveval's cache."""

    def __init__(self, storage: str, config: object) -> None:
        super().__init__(config=config)
        self.codec = CODECS[storage]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: object, **kwargs: object) -> tuple:
        """Encode, decode, and store that."""
        rounded = []
        for states in (keys, values):
            out = torch.empty(states.shape[1:])
            self.codec.decode(self.codec.encode(states[0]), out)
            rounded.append(out[None])
        return super().update(*rounded, layer)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("storage", list(CODECS))
def test_logits_equal_stock_attention_over_the_same_numbers(storage: str, kv_heads: int) -> None:
    """Against transformers' sdpa attention and DynamicCache, for MQA, GQA and MHA."""
    ours, stock = tiny_llama(kv_heads=kv_heads), tiny_llama(kv_heads=kv_heads, attention="sdpa")
    cache = RoundedCache(storage, stock.config)
    expected = stock(torch.tensor(IDS)[None], past_key_values=cache).logits[0]
    got = read_logits(ours, parse_format(storage), IDS, 300)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


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
    monkeypatch.setitem(CODECS, "exact", Exact())
    expected = streaming_llm(model, IDS[:160], size, sinks)
    got = read_logits(model, parse_format(f"window:{size},sinks={sinks},store=exact"), IDS[:160], 50)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    wrong = read_logits(model, parse_format(f"window:{size + 1},sinks={sinks},store=exact"), IDS[:160], 50)
    assert (wrong - expected).abs().max() > 0.5  # a window of one token more is seen at once


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_do_not_change_the_logits(model: PreTrainedModel, name: str) -> None:
    """To the rounding of BF16 storage: a last-bit difference in a key can flip its rounding."""
    whole = read_logits(model, parse_format(name), IDS, 300)
    for chunk in (1, 7, 256):
        torch.testing.assert_close(read_logits(model, parse_format(name), IDS, chunk), whole, rtol=0, atol=0.03)


@pytest.mark.parametrize("name", FORMATS)
def test_stored_bytes_are_the_formula(model: PreTrainedModel, name: str) -> None:
    geometry = from_config(model.config.to_dict())
    with stream(model, name) as reading:
        for end in (1, 31, 32, 33, 65, 300):
            list(reading.read_to(end))
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
        before = [part.clone() for layer in reading.cache.layers for store in layer.read for part in store.parts()]
        together = reading.ask(prompts(32, 200))
        alone = [reading.ask([prompt])[0] for prompt in prompts(32, 200)]
        after = [part for layer in reading.cache.layers for store in layer.read for part in store.parts()]
        assert together == alone
        assert len({answer.text for answer in together}) > 16  # they are different questions with different answers
        for one, two in zip(before, after, strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        for answer, prompt in zip(together, prompts(32, 200), strict=True):
            assert answer.read_tokens == answer.prompt_tokens == prompt.tokens
        list(reading.read_to(300))
        asked_then_read = reading.ask(prompts(4, 300))
    with stream(model, name) as reading:
        list(reading.read_to(200))
        list(reading.read_to(300))
        assert reading.ask(prompts(4, 300)) == asked_then_read


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_is_what_reading_the_whole_prompt_predicts(model: PreTrainedModel, name: str) -> None:
    """An answer's every token is the greedy choice after prompt and answer so far, read as one context."""
    with stream(model, name) as reading:
        list(reading.read_to(200))
        answers = reading.ask(prompts(6, 200))
    for prompt, answer in zip(prompts(6, 200), answers, strict=True):
        generated = [int(word) for word in answer.text.split()]
        whole = np.concatenate([IDS[:200], prompt.tail, generated])
        logits = read_logits(model, parse_format(name), whole, 50)[prompt.tokens - 1 : -1]
        margin = logits.max(dim=-1).values - logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
        assert margin.max() < 0.03


def test_nan_in_the_cache_is_an_error_that_names_layer_and_position(model: PreTrainedModel) -> None:
    cache = StreamCache(parse_format("fp8"), layers=2, capacity=8)
    states = torch.ones(1, 2, 3, 32)
    cache.update(states, states, 1)
    bad = states.clone()
    bad[0, 1, 2, 5] = torch.nan
    with pytest.raises(EngineError, match="values of layer 1 at position 5"):
        cache.update(states, bad, 1)


def test_more_than_one_stream_is_refused(model: PreTrainedModel) -> None:
    states = torch.ones(2, 2, 3, 32)
    with pytest.raises(EngineError, match="batch of 2"):
        StreamCache(parse_format("fp8"), layers=2, capacity=8).update(states, states, 0)


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
