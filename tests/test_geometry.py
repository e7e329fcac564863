"""Geometry and predicted bytes. Known values: the shared cases 1, 2, 3, 5 and 15, and what transformers stores."""

from __future__ import annotations

from typing import Any

import pytest

from kveval.errors import KvevalError
from kveval.formats.parse import parse_format
from kveval.memory.geometry import Geometry, from_config
from kveval.memory.predict import stream_bytes, token_bytes
from kveval.units import GIB

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
GPT_OSS_20B_LIKE = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "max_position_embeddings": 131_072,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}


def test_case_1_a_70b_model_takes_320_kib_a_token_and_40_gib_at_128k() -> None:
    geometry = from_config(LLAMA_70B)
    assert geometry == Geometry(("full",) * 80, kv_heads=8, head_dim=128, positions=131_072)
    bf16 = parse_format("bf16")
    assert geometry.elements_per_token * 2 == token_bytes(geometry, bf16) == 327_680
    assert stream_bytes(geometry, bf16, 131_072) == 42_949_672_960 == 40 * GIB


def test_case_2_int4_with_scale_and_zero_is_3_2_times_smaller_and_never_4() -> None:
    geometry = from_config(LLAMA_70B)
    assert token_bytes(geometry, parse_format("int4-g32")) == 102_400
    assert token_bytes(geometry, parse_format("fp8")) == 163_840


def test_case_3_128000_tokens_are_not_128k() -> None:
    assert stream_bytes(from_config(LLAMA_70B), parse_format("bf16"), 128_000) / GIB == 39.0625


def test_case_5_sliding_layers_hold_their_window_and_no_more() -> None:
    geometry = from_config(GPT_OSS_20B_LIKE)
    assert (geometry.kinds.count("full"), geometry.kinds.count("sliding"), geometry.sliding_window) == (18, 18, 128)
    assert stream_bytes(geometry, parse_format("bf16"), 131_072) == 4_836_556_800
    assert geometry.layers * geometry.elements_per_token_layer * 2 * 131_072 == 9_663_676_416, (
        "full pages in every layer"
    )
    assert stream_bytes(geometry, parse_format("bf16"), 100) == 100 * token_bytes(geometry, parse_format("bf16"))


def test_case_15_a_window_format_keeps_its_window_in_every_layer() -> None:
    geometry = from_config(LLAMA_70B)
    window = parse_format("window:4k")
    assert stream_bytes(geometry, window, 131_072) == 1_342_177_280
    assert stream_bytes(geometry, window, 1_000) == 1_000 * 327_680


def test_defaults_are_those_of_transformers() -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "max_position_embeddings": 64}
    assert from_config(small) == Geometry(("full", "full"), kv_heads=4, head_dim=24, positions=64)
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    assert from_config(gpt2) == Geometry(("full",) * 12, kv_heads=12, head_dim=64, positions=1024)
    assert from_config({"model_type": "gemma3", "text_config": small}) == from_config(small)
    assert from_config(small | {"sliding_window": 16}).kinds == ("sliding", "sliding")
    assert from_config(small | {"sliding_window": 16, "use_sliding_window": False}).kinds == ("full", "full")


def test_yarn_stretches_the_positions() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    assert from_config(LLAMA_70B | {"max_position_embeddings": 32_768, "rope_scaling": rope}).positions == 131_072
    llama3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8_192}
    assert from_config(LLAMA_70B | {"rope_parameters": llama3}).positions == 131_072


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers = '80'"),
        ({"num_attention_heads": True}, "num_attention_heads = True"),
        ({"num_key_value_heads": 7}, "num_key_value_heads = 7"),
        ({"hidden_size": 8190}, "hidden_size = 8190"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"sliding_window": -1}, "sliding_window = -1"),
        ({"layer_types": ["full_attention"] * 79}, "layer_types names 79"),
        ({"layer_types": ["linear_attention"] * 80}, "linear_attention"),
        ({"layer_types": ["chunked_attention"] * 80}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 80}, "sliding_window is not set"),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, "sliding_window_pattern"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"mamba_d_state": 16}, "Mamba"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_kv_shared_layers": 10}, "share another layer's cache"),
        ({"v_head_dim": 64}, "v_head_dim = 64"),
        ({"num_key_value_heads": None, "multi_query": True}, "multi_query"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(KvevalError) as caught:
        from_config(LLAMA_70B | change)
    assert named in str(caught.value)


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50}


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("qwen2", {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
        ("mistral", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}),
        ("gemma2", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8}),
        ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 32, "sliding_window": 8}),
        (
            "gpt_oss",
            {
                "num_key_value_heads": 2,
                "head_dim": 32,
                "sliding_window": 8,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
            },
        ),
        ("gpt_neox", {}),
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4}),
    ],
)
def test_the_numbers_that_transformers_stores_are_the_numbers_predicted(
    model_type: str, settings: dict[str, Any]
) -> None:
    """A tiny model of each architecture reads 20 tokens; every tensor in its cache is counted."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = CONFIG_MAPPING[model_type](**(SIZES | special | settings))
    geometry = from_config(config.to_dict())
    with torch.random.fork_rng(), torch.no_grad():
        output = AutoModelForCausalLM.from_config(config)(torch.arange(20)[None] % 50, use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    assert len(cache.layers) == geometry.layers == 4
    for kind, stored in zip(geometry.kinds, cache.layers, strict=True):
        # A sliding layer of transformers drops the token that leaves the window with the next one.
        held = geometry.layer_tokens(kind, 20) - (kind == "sliding")
        assert stored.keys.numel() + stored.values.numel() == held * geometry.elements_per_token_layer
