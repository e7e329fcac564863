"""Which tokens a pruned cache keeps, from the prompt's keys and its last queries. Written from the papers.

Every layer is pruned, each with one count of tokens. Of equal scores the earlier token's wins, on every device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kveval.errors import KvevalError
from kveval.formats.pruning import Pruning

OBSERVED = 64  # SnapKV's observation window: queries at the end of the prompt (default of its released code)
KERNEL = 5  # keys whose attention SnapKV pools into one score (same)
SINKS = 4  # first tokens that streaming keeps (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453)

# (keys, queries, scale, kept) -> tokens (kv_heads, kept) int64 ascending
Choose = Callable[[torch.Tensor, torch.Tensor, float, int], torch.Tensor]


def kept_tokens(pruning: Pruning, keys: torch.Tensor, queries: torch.Tensor, scale: float) -> torch.Tensor:
    """(kv_heads, kept) int64: the indices that ``pruning`` keeps of the prompt's tokens, ascending.

    ``keys`` (kv_heads, tokens, head_dim) as attention reads them, after the rotary embedding; ``queries``
    (heads, w, head_dim): the rotated queries of the last w = min(tokens, OBSERVED) tokens, those of a KV head's
    group side by side; ``scale``: what attention multiplies its scores with. Scores are float32 whatever the dtype.
    Raises KvevalError for a method that is not known.
    """
    if pruning.method not in CHOOSE:
        raise KvevalError(f"no pruning method '{pruning.method}': use one of {', '.join(CHOOSE)}")
    kv_heads, tokens, _ = keys.shape
    assert queries.shape[0] % kv_heads == 0, f"{queries.shape[0]} query heads are no multiple of {kv_heads} KV heads"
    kept = pruning.kept(tokens)
    if kept == tokens:
        return torch.arange(tokens, device=keys.device).repeat(kv_heads, 1)
    return CHOOSE[pruning.method](keys, queries, scale, kept)


def knorm(keys: torch.Tensor, queries: torch.Tensor, scale: float, kept: int) -> torch.Tensor:
    """The keys of lowest L2 norm, each KV head for itself (Devoto et al. 2024, arXiv 2406.11430). Queries play no part.

    In the first layer a token has one norm wherever it stands, up to the rounding of its rotation: where copies of one
    token lie on the edge, that rounding decides which of them stay.
    """
    norms = torch.stack([torch.linalg.vector_norm(head.float(), dim=-1) for head in keys])
    return _highest(norms.neg_(), kept)


def tova(keys: torch.Tensor, queries: torch.Tensor, scale: float, kept: int) -> torch.Tensor:
    """What the last token attends to, averaged over all heads of the layer: the same tokens for every KV head.

    Oren et al. 2024, arXiv 2401.06104, applied once, after the prompt. The last token itself stays, whatever its weight.
    """
    weights = _attention(keys, queries[:, -1:], scale).mean(dim=0, keepdim=True)
    return _with_latest(_highest(weights[:, :-1], kept - 1), keys, 1).repeat(keys.shape[0], 1)


def snapkv(keys: torch.Tensor, queries: torch.Tensor, scale: float, kept: int) -> torch.Tensor:
    """What the observation window attends to, pooled over neighbouring keys; the window itself stays.

    Li et al. 2024, arXiv 2404.14469. The pooling is the mean over KERNEL keys, those outside the prefix counting as
    zero: the default of the released code. Grouped queries are averaged, since a KV head keeps one set of tokens. With no
    room for more than the window (``kept <= w``), the latest ``kept`` tokens stay.
    """
    window = queries.shape[1]
    assert window == min(keys.shape[1], OBSERVED), f"{window} queries for {keys.shape[1]} tokens"
    if kept <= window:
        return _with_latest(keys.new_empty((keys.shape[0], 0), dtype=torch.int64), keys, kept)
    prefix = _attention(keys, queries, scale)[:, :-window]
    pooled = torch.nn.functional.avg_pool1d(prefix, KERNEL, stride=1, padding=KERNEL // 2)
    return _with_latest(_highest(pooled, kept - window), keys, window)


def streaming(keys: torch.Tensor, queries: torch.Tensor, scale: float, kept: int) -> torch.Tensor:
    """The first SINKS tokens and the latest ``kept - SINKS``; only the first ``kept`` where there is no room for more."""
    first = torch.arange(min(SINKS, kept), device=keys.device).repeat(keys.shape[0], 1)
    return _with_latest(first, keys, kept - first.shape[1])


CHOOSE: dict[str, Choose] = {"snapkv": snapkv, "tova": tova, "knorm": knorm, "streaming": streaming}


def _attention(keys: torch.Tensor, queries: torch.Tensor, scale: float) -> torch.Tensor:
    """(kv_heads, tokens) float32: attention weights, averaged over the queries and over the heads of each KV head's group.

    One query head at a time: at 131,072 tokens its (64, tokens) weights take 32 MiB, those of 64 heads 2 GiB.
    """
    kv_heads, tokens, _ = keys.shape
    group, window = queries.shape[0] // kv_heads, queries.shape[1]
    unseen = torch.ones((window, window), dtype=torch.bool, device=keys.device).triu_(diagonal=1)
    out = torch.zeros((kv_heads, tokens), device=keys.device)
    for i in range(kv_heads):
        head = keys[i].float()  # (tokens, head_dim)
        for query in queries[i * group : (i + 1) * group]:
            scores = (query.float() * scale) @ head.T  # (window, tokens)
            scores[:, tokens - window :].masked_fill_(unseen, -torch.inf)
            out[i] += scores.softmax(dim=-1).mean(dim=0)
    return out.div_(group)


def _highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """(heads, count) int64 ascending: where ``scores`` (heads, tokens) are highest; of equal ones the earliest."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices  # topk leaves open which of equal scores it takes
    return order[:, :count].sort(dim=-1).values


def _with_latest(chosen: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """``chosen`` (heads, n) followed by the latest ``count`` tokens."""
    tokens = keys.shape[1]
    latest = torch.arange(tokens - count, tokens, device=keys.device)
    return torch.cat([chosen, latest.expand(chosen.shape[0], -1)], dim=1)
