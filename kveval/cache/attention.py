"""Attention over a stream in two parts, what was read before and the step's own tokens, merged by log-sum-exp in float32.

No mask over the whole context is ever built, keys are not repeated for grouped queries, and asked questions share
one pass over the prefix. The merge is the one of FlashAttention's split-K (Dao et al. 2022, arXiv 2205.14135,
section 3.1): with parts that cover disjoint keys, o = sum_i o_i exp(l_i - l), l = log sum_i exp(l_i).
"""

from __future__ import annotations

from typing import Any

import torch

from kveval.cache.cache import StreamCache
from kveval.cache.layer import FormatLayer, Waiting
from kveval.errors import EngineError, KvevalError
from kveval.formats.rotation import rotate
from kveval.formats.side import Side
from kveval.formats.window import Window

NAME = "kveval_split"  # under which the attention function is registered with transformers
ROWS = 512  # queries at a time where a mask is needed

Part = tuple[torch.Tensor, torch.Tensor]  # output (1, heads, queries, head_dim), log-sum-exp (1, heads, queries)


def register() -> None:
    """Make ``attn_implementation="kveval_split"`` known. Its name is in no mask registry, so transformers builds no mask."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, split_attention)


def split_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    stream: StreamCache | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query`` (1, heads, queries, head_dim) over ``key``/``value`` (1, KV heads, keys, head_dim).

    Returns (1, queries, heads, head_dim). Raises EngineError for what it would compute wrongly (soft caps).
    """
    if stream is None or stream.step is None or attention_mask is not None:
        raise EngineError(
            "kveval's attention needs kveval's cache and no mask: this model does not hand the cache through"
        )
    if options.get("softcap") is not None:
        raise KvevalError(f"{type(module).__name__} uses 'softcap', which kveval's attention does not know yet")
    layer = stream.layers[int(module.layer_idx)]  # type: ignore[arg-type]  # set by every attention module
    turned = rotate(query) if layer.rotated else query  # keys and values come back rotated
    if layer.window is not None:
        from_sinks = _seen_from_cache(query, layer.window, stream)
        part = _windowed(
            turned, rotate(from_sinks) if layer.rotated else from_sinks, key, value, scaling, stream, layer
        )
    elif layer.waiting is not None and not layer.asking:
        part = _residual(turned, key, value, scaling, stream.step.positions, layer.waiting)
    else:
        part = _full(turned, key, value, scaling, layer.own_tokens, stream.step.own)
    if layer.pruning is not None and not layer.asking:
        if options.get("s_aux") is not None:
            raise KvevalError(
                f"{type(module).__name__} has learned attention sinks: what {layer.pruning.name} would keep under them is "
                "not defined; use a window or a quantised format"
            )
        layer.observe(turned, scaling)
    out = _with_sinks(part, options.get("s_aux"))
    return (rotate(out) if layer.rotated else out).to(query.dtype).transpose(1, 2), None


def _with_sinks(part: Part, sinks: torch.Tensor | None) -> torch.Tensor:
    """The output (1, heads, queries, head_dim) when each head has a learned sink of score ``sinks`` (heads,) and value 0."""
    if sinks is None:
        return part[0]
    return _wide(part[0]) * torch.sigmoid(_wide(part[1]) - _wide(sinks)[None, :, None]).unsqueeze(-1)


def _full(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, own: int, mask: torch.Tensor | None
) -> Part:
    """All of the prefix is visible to every query; of the step's own tokens, those before it (or ``mask``)."""
    split = key.shape[2] - own
    if mask is None:
        part = flash(query, *_repeat(query, key[:, :, split:], value[:, :, split:]), scale, causal=True)
    else:
        part = _masked(query, key[:, :, split:], value[:, :, split:], scale, mask)
    if split == 0:
        return part
    prefix = flash(_fold(query, key.shape[1]), key[:, :, :split], value[:, :, :split], scale, causal=False)
    return _merge(_unfold(prefix, query), part)


def _residual(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    positions: torch.Tensor,
    waiting: tuple[Waiting, ...],
) -> Part:
    """A chunk of a format that keeps the newest tokens apart: each query reads what was encoded when its own turn came.

    ``key`` and ``value`` hold all tokens up to the chunk's end as they are stored after it.
    """
    parts: list[Part] = []
    for first in range(0, query.shape[2], ROWS):
        rows, at = query[:, :, first : first + ROWS], positions[first : first + ROWS]
        end = int(at[-1]) + 1
        encoded = min(one.side.read_encoded(int(at[0])) for one in waiting)  # for all rows, of keys and values both
        split = min(encoded, int(at[0]))
        band = _band(rows, at, split, key[:, :, split:end], value[:, :, split:end], scale, waiting)
        if split:
            prefix = flash(_fold(rows, key.shape[1]), key[:, :, :split], value[:, :, :split], scale, causal=False)
            band = _merge(_unfold(prefix, rows), band)
        parts.append(band)
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _band(
    query: torch.Tensor,
    at: torch.Tensor,
    first: int,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    waiting: tuple[Waiting, ...],
) -> Part:
    """The keys from position ``first`` on, each in the version that the query at ``at`` (queries,) finds."""
    places = torch.arange(first, first + key.shape[2], device=key.device)
    group = query.shape[1] // key.shape[1]
    folded = _wide(_fold(query, key.shape[1]))
    visible = (places <= at[:, None]).repeat(group, 1)
    keys_encoded, values_encoded = ((places < _read_encoded(one.side, at)[:, None]).repeat(group, 1) for one in waiting)
    scores = torch.matmul(folded, _wide(key).transpose(2, 3))
    scores = torch.where(keys_encoded, scores, torch.matmul(folded, _as_came(waiting[0], first, key).transpose(2, 3)))
    scores = scores.mul_(scale).masked_fill_(~visible, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    out = torch.matmul(weights * values_encoded, _wide(value))
    out += torch.matmul(weights * ~values_encoded, _as_came(waiting[1], first, value))
    return _unfold((out, lse), query)


def _read_encoded(side: Side, at: torch.Tensor) -> torch.Tensor:
    return torch.tensor([side.read_encoded(position) for position in at.tolist()], device=at.device)


def _as_came(waiting: Waiting, first: int, stored: torch.Tensor) -> torch.Tensor:
    """``stored`` (1, KV heads, tokens, head_dim), whose first token is ``first``, with the waiting tokens unencoded."""
    numbers = _wide(stored).clone()
    if waiting.numbers is not None:
        start = max(first, waiting.first)
        end = first + stored.shape[2]
        numbers[0, :, start - first :] = waiting.numbers[:, start - waiting.first : end - waiting.first]
    return numbers


def _windowed(
    query: torch.Tensor,
    from_sinks: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    stream: StreamCache,
    layer: FormatLayer,
) -> Part:
    """The band of recent keys at their true distances, and the sinks as seen from place size - 1 of the cache."""
    assert stream.step is not None
    assert layer.window is not None
    window = layer.window
    positions, keys_at = stream.step.positions, stream.key_positions(layer, key.shape[2])
    sinks = min(window.sinks, key.shape[2])
    parts: list[Part] = []
    for rows in torch.arange(len(positions), device=positions.device).split(ROWS):
        first, last = int(rows[0]), int(rows[-1]) + 1
        at = positions[first:last, None]  # (rows, 1)
        full = at < window.size  # nothing evicted yet: the sinks are ordinary tokens
        visible = (keys_at <= at) & ((keys_at > at - window.recent) | full)  # (rows, keys)
        visible &= full | (keys_at >= window.sinks)
        if stream.step.own is not None:
            visible[:, len(keys_at) - layer.own_tokens :] &= stream.step.own[first:last]
        start, end = _extent(visible)
        part = _masked(
            query[:, :, first:last], key[:, :, start:end], value[:, :, start:end], scale, visible[:, start:end]
        )
        if sinks and not bool(full.all()):
            out, lse = _masked(from_sinks[:, :, first:last], key[:, :, :sinks], value[:, :, :sinks], scale, None)
            part = _merge((out, lse.masked_fill(full.squeeze(1), -torch.inf)), part)
        parts.append(part)
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _extent(visible: torch.Tensor) -> tuple[int, int]:
    """First and last + 1 key that any of the rows sees."""
    seen = visible.any(dim=0).nonzero()
    return int(seen[0]), int(seen[-1]) + 1


def _seen_from_cache(query: torch.Tensor, window: Window, stream: StreamCache) -> torch.Tensor:
    """Queries turned back by t - (size - 1), so that they meet the sinks at their distance within the cache.

    Turning a rotary query back by n positions is turning the key forward by n (RoFormer, arXiv 2104.09864, eq. 16).
    """
    assert stream.step is not None
    if window.sinks == 0:
        return query
    if stream.rotary is None:
        raise EngineError(
            "a window with sinks needs rotary position embeddings, and this model has none that kveval knows"
        )
    cos, sin = stream.rotary((stream.step.positions - (window.size - 1)).clamp(min=0))  # (queries, rotated)
    rotated = cos.shape[-1]
    x = _wide(query[..., :rotated])
    half = torch.cat([-x[..., rotated // 2 :], x[..., : rotated // 2]], dim=-1)
    turned = x * cos - half * sin
    return torch.cat([turned.to(query.dtype), query[..., rotated:]], dim=-1)


def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool) -> Part:
    """The fused kernel of the device, with its log-sum-exp: query (1, h, q, d), key and value (1, h, k, d).

    Raises EngineError on a device without one.
    """
    if query.device.type == "cpu":
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(query, key, value, 0.0, causal, scale=scale)
    if query.device.type == "cuda":
        if query.dtype == torch.float32:
            op = torch.ops.aten._scaled_dot_product_efficient_attention
            out, lse, *_ = op(query, key, value, None, True, 0.0, causal, scale=scale)
            return out, lse[..., : query.shape[2]]  # its log-sum-exp is padded to a multiple of 32 queries
        op = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = op(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse
    raise EngineError(f"no attention kernel for device '{query.device}': use cpu or cuda")


def _masked(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> Part:
    """Attention where a mask is needed, ROWS queries at a time; ``mask`` (queries, keys) bool, True where a key is seen."""
    parts: list[Part] = []
    for first in range(0, query.shape[2], ROWS):
        rows = query[:, :, first : first + ROWS]
        folded = _fold(rows, key.shape[1])
        seen = None if mask is None else mask[first : first + ROWS].repeat(query.shape[1] // key.shape[1], 1)
        parts.append(_unfold(_biased(folded, key, value, scale, seen), rows))
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _biased(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor | None
) -> Part:
    """The fused kernel where it takes a mask (the CPU's), plain products in float32 elsewhere."""
    if query.device.type == "cpu":
        bias = None
        if seen is not None:
            bias = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)[None, None]
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    scores = torch.matmul(_wide(query), _wide(key).transpose(2, 3)).mul_(scale)
    if seen is not None:
        scores.masked_fill_(~seen, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return torch.matmul(scores.sub_(lse.unsqueeze(-1)).exp_(), _wide(value)), lse


def _fold(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(1, heads, q, d) -> (1, KV heads, group * q, d): the queries of a group share one pass over their KV head's keys."""
    _, heads, queries, width = query.shape
    if heads % kv_heads:
        raise EngineError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    return query.reshape(1, kv_heads, heads // kv_heads * queries, width)


def _unfold(part: Part, like: torch.Tensor) -> Part:
    _, heads, queries, _ = like.shape
    return part[0].reshape(1, heads, queries, -1), part[1].reshape(1, heads, queries)


def _repeat(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the step's own tokens for every query head (a causal mask does not fold)."""
    group = query.shape[1] // key.shape[1]
    return (key, value) if group == 1 else (key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))


def _merge(first: Part, second: Part) -> Part:
    """Two parts over disjoint keys as one, float32."""
    lse = torch.logaddexp(_wide(first[1]), _wide(second[1]))
    one, two = ((_wide(part[1]) - lse).exp().unsqueeze(-1) for part in (first, second))
    return _wide(first[0]).mul(one).addcmul_(_wide(second[0]), two), lse


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
