"""The shape of a model's KV cache, read from a Hugging Face configuration; what is not understood is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kveval.errors import KvevalError

LayerKind = Literal["full", "sliding"]
_KINDS: dict[str, LayerKind] = {"full_attention": "full", "sliding_attention": "sliding"}

# The names that older configurations use for the same things.
_ALIASES = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"),
}

# A key that is set means a cache that is not one key and one value vector per layer, token and KV head.
_UNSUPPORTED = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "is_encoder_decoder": "encoder-decoder models with a cross-attention cache",
    "cross_attention_layers": "cross-attention layers",
    "num_kv_shared_layers": "layers that share another layer's cache",
    "attention_chunk_size": "chunked attention",
    "ssm_cfg": "state-space layers (Mamba)",
    "mamba_d_state": "state-space layers (Mamba)",
    "mamba_d_conv": "state-space layers (Mamba)",
    "state_size": "state-space layers (Mamba)",
    "ssm_state_size": "state-space layers (Mamba)",
    "linear_num_key_heads": "linear-attention layers",
    "layers_block_type": "layers of mixed kinds (layers_block_type)",
    "hybrid_override_pattern": "layers of mixed kinds (hybrid_override_pattern)",
    "block_types": "layers of mixed kinds (block_types)",
    "block_configs": "layers of different shapes (block_configs)",
    "global_head_dim": "layers with different head sizes (global_head_dim)",
    "swa_head_dim": "layers with different head sizes (swa_head_dim)",
    "swa_num_key_value_heads": "layers with different numbers of KV heads (swa_num_key_value_heads)",
    "num_global_key_value_heads": "layers with different numbers of KV heads (num_global_key_value_heads)",
    "index_head_dim": "a sparse-attention indexer with keys of its own (index_head_dim)",
    "attention_k_eq_v": "layers whose values are their keys (attention_k_eq_v)",
}
# Other ways to say how many KV heads there are; without num_key_value_heads a guess would be wrong.
_OTHER_KV_HEADS = ("multi_query", "multi_query_attention", "multi_query_group_num", "num_kv_heads", "n_head_kv")


@dataclass(frozen=True)
class Geometry:
    """A decoder's KV cache: ``kinds`` has one entry for each layer; each stores ``kv_heads`` keys and as many values of
    ``head_dim`` numbers for each token. ``positions`` is the longest sequence the model is made for, in tokens; a
    sliding layer attends to the last ``sliding_window`` tokens.
    """

    kinds: tuple[LayerKind, ...]
    kv_heads: int
    head_dim: int
    positions: int
    sliding_window: int | None = None

    @property
    def layers(self) -> int:
        """Number of layers that keep keys and values."""
        return len(self.kinds)

    @property
    def elements_per_token_layer(self) -> int:
        """Numbers that one layer stores for one token: keys and values of all KV heads."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def elements_per_token(self) -> int:
        """Numbers that all layers together store for one token."""
        return self.layers * self.elements_per_token_layer

    def layer_tokens(self, kind: LayerKind, tokens: int) -> int:
        """Tokens whose keys and values a layer of this kind still needs after ``tokens`` of them."""
        if kind == "sliding" and self.sliding_window is not None:
            return min(tokens, self.sliding_window)
        return tokens


def from_config(config: Mapping[str, Any]) -> Geometry:
    """Geometry of the model that ``config`` (a config.json, or a configuration's ``to_dict()``) describes.

    ``head_dim`` defaults to hidden size / attention heads, KV heads to attention heads, as in transformers.
    Raises KvevalError that names the key: one that is missing, out of range or contradicts another, and any that means
    a cache of another shape (MLA, Mamba, cross-attention, shared layers).
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    _refuse_unsupported(config)
    layers = _positive(config, "num_hidden_layers")
    heads = _positive(config, "num_attention_heads")
    kv_heads = _kv_heads(config, heads)
    window = _window(config)
    kinds = _kinds(config, layers, window)
    return Geometry(
        kinds=kinds,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, heads),
        positions=_positions(config),
        sliding_window=window if "sliding" in kinds else None,
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key, meaning in _UNSUPPORTED.items():
        if config.get(key):
            kind = config.get("model_type", "this model")
            raise KvevalError(
                f"'{kind}' has {meaning} ({key} = {_short(config[key])}): kveval knows caches of one key and one value "
                f"per layer, token and KV head, with full or sliding attention"
            )


def _kv_heads(config: Mapping[str, Any], heads: int) -> int:
    if config.get("num_key_value_heads") is None:
        for key in _OTHER_KV_HEADS:
            if config.get(key):
                raise KvevalError(
                    f"'{config.get('model_type', 'this model')}' says {key} and no num_key_value_heads: "
                    f"kveval does not know how many KV heads that makes"
                )
        return heads
    kv_heads = _positive(config, "num_key_value_heads")
    if heads % kv_heads:
        raise KvevalError(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}")
    return kv_heads


def _head_dim(config: Mapping[str, Any], heads: int) -> int:
    head_dim = _default_head_dim(config, heads)
    for key in ("v_head_dim", "kv_channels"):
        if config.get(key) not in (None, head_dim):
            raise KvevalError(
                f"{key} = {_short(config[key])} is not head_dim = {head_dim}: kveval needs keys and values of one size"
            )
    return head_dim


def _default_head_dim(config: Mapping[str, Any], heads: int) -> int:
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim")
    hidden = _positive(config, "hidden_size")
    if hidden % heads:
        raise KvevalError(
            f"hidden_size = {hidden} is no multiple of num_attention_heads = {heads}, and there is no head_dim"
        )
    return hidden // heads


def _positions(config: Mapping[str, Any]) -> int:
    """max_position_embeddings, or what YaRN stretches the original length to where that is more."""
    positions = _positive(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) == "yarn":
        original = rope.get("original_max_position_embeddings") or 0
        positions = max(positions, int(original * rope.get("factor", 1.0)))
    return positions


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False or config.get("sliding_window") is None:
        return None
    return _positive(config, "sliding_window")


def _kinds(config: Mapping[str, Any], layers: int, window: int | None) -> tuple[LayerKind, ...]:
    named = config.get("layer_types")
    if named is None:
        for key in ("sliding_window_pattern", "max_window_layers"):
            if window is not None and config.get(key) is not None:
                raise KvevalError(
                    f"{key} says which layers slide, but there is no layer_types: load the config.json "
                    f"with a current transformers, which fills it in"
                )
        return ("full" if window is None else "sliding",) * layers
    if len(named) != layers:
        raise KvevalError(f"layer_types names {len(named)} layers, but num_hidden_layers = {layers}")
    unknown = sorted(set(named) - set(_KINDS))
    if unknown:
        raise KvevalError(f"layer_types holds '{unknown[0]}': kveval knows {' and '.join(_KINDS)}")
    kinds = tuple(_KINDS[name] for name in named)
    if "sliding" in kinds and window is None:
        raise KvevalError("layer_types holds 'sliding_attention', but sliding_window is not set")
    return kinds


def _positive(config: Mapping[str, Any], name: str) -> int:
    """The positive whole number at ``name`` or at one of its older names."""
    for key in _ALIASES.get(name, (name,)):
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KvevalError(
                f"the model's configuration has {key} = {_short(value)}: expected a whole number, at least 1"
            )
        return value
    raise KvevalError(f"the model's configuration has no {name}: is this a decoder's config.json?")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
