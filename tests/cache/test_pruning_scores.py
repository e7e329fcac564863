"""Pruning: each method against loops over its definition in float64, and prompts whose answer is plain to see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kveval.cache.pruning import CHOOSE, OBSERVED, kept_tokens
from kveval.errors import KvevalError
from kveval.formats.pruning import METHODS, Pruning

HEADS, KV_HEADS, WIDTH = 4, 2, 16
GROUP = HEADS // KV_HEADS
SCALE = WIDTH**-0.5


def prompt(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys (KV_HEADS, tokens, WIDTH) and the last queries (HEADS, w, WIDTH); attention is not flat."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randn(KV_HEADS, tokens, WIDTH, generator=random)
    return keys, 2 * torch.randn(HEADS, min(tokens, OBSERVED), WIDTH, generator=random)


def quiet(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt in which nothing attends to anything in particular: keys of norm 1 along dimension 0, queries of zero."""
    keys = torch.zeros(KV_HEADS, tokens, WIDTH)
    keys[:, :, 0] = 1.0
    return keys, torch.zeros(HEADS, min(tokens, OBSERVED), WIDTH)


def chosen(
    method: str, fraction: float, keys: torch.Tensor, queries: torch.Tensor, scale: float = SCALE
) -> list[list[int]]:
    return kept_tokens(Pruning(method, fraction), keys, queries, scale).tolist()


# The definitions, one number at a time.


def weight(keys: np.ndarray, query: np.ndarray, at: int) -> list[float]:
    """Attention of one query at position ``at`` over ``keys`` (tokens, WIDTH); what comes after it has weight 0."""
    seen = [math.exp(SCALE * sum(a * b for a, b in zip(key, query, strict=True))) for key in keys[: at + 1].tolist()]
    return [value / sum(seen) for value in seen] + [0.0] * (len(keys) - at - 1)


def best(scores: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:count])


def slow_knorm(keys: np.ndarray, queries: np.ndarray, kept: int) -> list[list[int]]:
    return [best([-math.sqrt(sum(x * x for x in key)) for key in head.tolist()], kept) for head in keys]


def slow_tova(keys: np.ndarray, queries: np.ndarray, kept: int) -> list[list[int]]:
    last = keys.shape[1] - 1
    rows = [weight(keys[head // GROUP], queries[head, -1], last) for head in range(HEADS)]
    means = [sum(row[token] for row in rows) / HEADS for token in range(last)]
    return [[*best(means, kept - 1), last]] * KV_HEADS


def slow_snapkv(keys: np.ndarray, queries: np.ndarray, kept: int) -> list[list[int]]:
    tokens, window = keys.shape[1], queries.shape[1]
    recent = list(range(tokens - min(window, kept), tokens))
    prefix = tokens - window
    out = []
    for kv_head in range(KV_HEADS):
        votes = [0.0] * prefix
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            for row in range(window):
                for token, share in enumerate(weight(keys[kv_head], queries[head, row], prefix + row)[:prefix]):
                    votes[token] += share / window / GROUP
        pooled = [sum(votes[max(token - 2, 0) : token + 3]) / 5 for token in range(prefix)]
        out.append(best(pooled, kept - len(recent)) + recent)
    return out


def slow_streaming(keys: np.ndarray, queries: np.ndarray, kept: int) -> list[list[int]]:
    tokens = keys.shape[1]
    return [[t for t in range(tokens) if t < min(4, kept) or t >= tokens - (kept - 4)]] * KV_HEADS


SLOW: dict[str, Callable[[np.ndarray, np.ndarray, int], list[list[int]]]] = {
    "snapkv": slow_snapkv,
    "tova": slow_tova,
    "knorm": slow_knorm,
    "streaming": slow_streaming,
}


def test_every_method_that_can_be_named_is_here() -> None:
    assert set(CHOOSE) == set(METHODS) == set(SLOW)


@pytest.mark.parametrize(
    ("tokens", "fraction"), [(150, 0.5), (150, 0.9), (150, 0.1), (100, 0.66), (40, 0.25), (66, 0.98)]
)
@pytest.mark.parametrize("method", list(SLOW))
def test_a_method_keeps_what_its_definition_says(method: str, tokens: int, fraction: float) -> None:
    keys, queries = prompt(tokens, seed=tokens)
    slow = SLOW[method](keys.double().numpy(), queries.double().numpy(), int(tokens * fraction))
    assert chosen(method, fraction, keys, queries) == slow


@given(st.sampled_from(list(SLOW)), st.integers(1, 200), st.floats(0.001, 0.999))
@settings(max_examples=150, deadline=None)
def test_as_many_tokens_as_asked_ascending_and_each_once(method: str, tokens: int, fraction: float) -> None:
    pruning = Pruning(method, fraction)
    kept = kept_tokens(pruning, *prompt(tokens), SCALE)
    assert kept.dtype == torch.int64
    assert kept.shape == (KV_HEADS, pruning.kept(tokens))
    assert 0 <= int(kept.min()) <= int(kept.max()) < tokens
    assert bool((kept.diff(dim=1) > 0).all())


def test_a_key_that_the_last_token_attends_to() -> None:
    keys, queries = quiet(200)
    keys[:, 30] = 0.0
    keys[:, 30, 1] = 20.0
    queries[:, -1, 1] = 20.0
    for method, there in {"tova": True, "snapkv": True, "streaming": False, "knorm": False}.items():
        for head in chosen(method, 0.4, keys, queries):
            assert (30 in head) is there, method


def test_snapkv_sees_what_an_earlier_query_of_the_window_attends_to_and_tova_does_not() -> None:
    keys, queries = quiet(200)
    keys[:, 120, 1], queries[:, 10, 1] = 20.0, 20.0
    keys[:, 110, 2], queries[:, -1, 2] = -1.0, 20.0  # all others weigh the same for the last token: the earliest stay
    assert all(120 in head for head in chosen("snapkv", 0.36, keys, queries))
    assert all(120 not in head for head in chosen("tova", 0.36, keys, queries))


def test_a_query_of_the_window_does_not_see_what_comes_after_it() -> None:
    keys, queries = quiet(200)
    keys[:, 100, 1], keys[:, 150, 1], queries[:, 0, 1] = 10.0, 20.0, 20.0  # the query at 136 prefers 150, and may not
    assert all(100 in head for head in chosen("snapkv", 0.36, keys, queries))


def test_snapkv_keeps_the_neighbours_of_what_is_attended_to() -> None:
    keys, queries = quiet(200)
    keys[:, 80, 1] = queries[:, -1, 1] = 20.0
    expected = [78, 79, 80, 81, 82, *range(136, 200)]
    assert chosen("snapkv", 0.345, keys, queries) == [expected, expected]


def test_a_kv_head_chooses_for_its_own_queries_with_snapkv_and_all_heads_alike_with_tova() -> None:
    keys, queries = quiet(200)
    keys[:, 20, 1] = keys[:, 60, 2] = 20.0
    queries[:GROUP, -1, 1] = 20.0  # the first group looks at token 20,
    queries[GROUP:, -1, 2] = 20.0  # the second at token 60
    first, second = chosen("snapkv", 0.345, keys, queries)  # 69: the window and one neighbourhood of five
    assert first[:5] == [18, 19, 20, 21, 22]
    assert second[:5] == [58, 59, 60, 61, 62]
    assert chosen("tova", 0.015, keys, queries) == [[20, 60, 199]] * KV_HEADS


def test_every_head_of_a_group_has_a_vote() -> None:
    keys, queries = quiet(200)
    for head in range(HEADS):
        keys[head // GROUP, 20 + 20 * head, head + 1] = queries[head, -1, head + 1] = 20.0
    first, second = chosen("snapkv", 0.37, keys, queries)  # 74: the window and two neighbourhoods of five
    assert first[:10] == [*range(18, 23), *range(38, 43)]
    assert second[:10] == [*range(58, 63), *range(78, 83)]


def test_knorm_keeps_the_shortest_keys_of_each_head() -> None:
    keys, queries = quiet(100)
    keys[0, 7] *= 0.5
    keys[1, [3, 90]] *= -0.5
    assert chosen("knorm", 0.02, keys, queries) == [[0, 7], [3, 90]]  # and of equal ones the earliest


def test_of_equal_weights_the_earliest_stay_and_the_last_token_always() -> None:
    keys, queries = quiet(100)
    assert chosen("tova", 0.05, keys, queries) == [[0, 1, 2, 3, 99]] * KV_HEADS
    queries[:, -1, 0] = 20.0
    keys[:, -1, 0] = -1.0  # the last token does not attend to itself at all
    assert chosen("tova", 0.05, keys, queries) == [[0, 1, 2, 3, 99]] * KV_HEADS


@pytest.mark.parametrize(
    ("method", "fraction", "expected"),
    [
        ("streaming", 0.001, [0]),
        ("streaming", 0.03, [0, 1, 2]),
        ("streaming", 0.04, [0, 1, 2, 3]),
        ("streaming", 0.05, [0, 1, 2, 3, 99]),
        ("tova", 0.001, [99]),
        ("snapkv", 0.001, [99]),
        ("snapkv", 0.03, [97, 98, 99]),
        ("snapkv", 0.64, [*range(36, 100)]),  # exactly the window
    ],
)
def test_room_for_a_few_only(method: str, fraction: float, expected: list[int]) -> None:
    assert chosen(method, fraction, *prompt(100)) == [expected] * KV_HEADS


def test_a_prompt_shorter_than_the_window_keeps_its_latest_tokens_with_snapkv() -> None:
    assert chosen("snapkv", 0.5, *prompt(20)) == [[*range(10, 20)]] * KV_HEADS


@pytest.mark.parametrize("method", list(SLOW))
def test_a_single_token_stays(method: str) -> None:
    assert chosen(method, 0.5, *prompt(1)) == [[0]] * KV_HEADS


@pytest.mark.parametrize("method", list(SLOW))
def test_scores_are_float32_whatever_the_keys_are(method: str) -> None:
    keys, queries = (x.bfloat16() for x in prompt(150))
    assert chosen(method, 0.5, keys, queries) == chosen(method, 0.5, keys.float(), queries.float())


def test_the_scale_is_used() -> None:
    keys, queries = prompt(150)
    assert chosen("snapkv", 0.5, keys, 4 * queries, SCALE / 4) == chosen("snapkv", 0.5, keys, queries)
    assert chosen("snapkv", 0.5, keys, queries, 1.0) != chosen("snapkv", 0.5, keys, queries)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.numbers = max(self.numbers, tensor.numel())
        return made

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}


@pytest.mark.parametrize("method", list(SLOW))
def test_no_more_than_one_head_is_worked_on_at_a_time(method: str) -> None:
    keys, queries = (x.bfloat16() for x in prompt(4096))
    with Largest(keys, queries) as largest:
        kept_tokens(Pruning(method, 0.5), keys, queries, SCALE)
    assert 0 < largest.numbers <= OBSERVED * 4096


def test_snapkv_refuses_to_observe_less_than_its_window() -> None:
    keys, queries = prompt(100)
    with pytest.raises(AssertionError, match="3 queries for 100 tokens"):
        chosen("snapkv", 0.5, keys, queries[:, -3:])


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(KvevalError, match=r"'h2o': use one of snapkv, tova, knorm, streaming"):
        kept_tokens(Pruning("h2o", 0.5), *prompt(10), SCALE)
