"""Other people's architectures: each reads right through kveval's cache, or is refused by a sentence that names why."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from tiny import read_logits, scales_for
from transformers import DynamicCache, PreTrainedModel

from kveval.cache.attention import register
from kveval.engines.head import Head
from kveval.engines.stream import Stream, make_cache
from kveval.engines.transformers import prepare
from kveval.errors import KvevalError
from kveval.formats.half import Bf16
from kveval.formats.parse import parse_format
from kveval.formats.registry import STORAGES, Storage
from kveval.formats.side import Side
from kveval.formats.spec import KVFormat
from kveval.memory.geometry import from_config
from kveval.memory.predict import stream_bytes, token_bytes

IDS = np.random.default_rng(0).integers(0, 101, 200)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
RIGHT: dict[str, dict] = {
    "Llama": {},
    "Mistral": {"sliding_window": 64},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma3": {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "Phi3": {},
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.5},
    "Olmo2": {},
    "GptOss": {"sliding_window": 64, "num_local_experts": 2, "num_experts_per_tok": 1},
}
REFUSED: dict[str, tuple[dict, str]] = {
    "Gemma2": ({"sliding_window": 64}, "softcap"),
}


class Exact(Bf16):
    """Float32 storage: nothing is rounded, so that only the arithmetic is compared."""

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As it came."""
        return (x.float(),)


def tiny(name: str, settings: dict, attention: str) -> PreTrainedModel:
    register()
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{suffix}")(**SMALL | settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # Qwen2's key bias is zero when new
            torch.nn.init.normal_(parameter, std=0.5)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("name", list(RIGHT))
def test_reads_as_transformers_own_attention_and_cache_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORAGES, "exact", Storage(Side(Exact()), Side(Exact()), "", "", ""))
    with torch.inference_mode():
        stock = tiny(name, RIGHT[name], "eager")
        expected = stock(torch.tensor(IDS)[None], past_key_values=DynamicCache(config=stock.config)).logits[0]
        model = tiny(name, RIGHT[name], "kveval_split")
        prepare(model, None)
        for chunk in (200, 33):
            got = read_logits(model, KVFormat("exact", "exact"), IDS, chunk)
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_a_sentence_that_names_the_option(name: str) -> None:
    settings, told = REFUSED[name]
    with pytest.raises(KvevalError, match=told) as refused:
        prepare(tiny(name, settings, "kveval_split"), None)
    assert refused.value.exit_code == 2


def test_a_window_where_all_layers_slide_is_refused() -> None:
    with pytest.raises(KvevalError, match="all layers of this model slide"):
        make_cache(tiny("Mistral", RIGHT["Mistral"], "kveval_split"), parse_format("window:32"), 100)


@pytest.mark.parametrize(
    "storage",
    [
        "fp8",
        "fp8-channel",
        "int4-g32",
        "nvfp4",
        "q8_0",
        "int4-g32,rotate=hadamard,skip_layers=1",
        "window:128,store=fp8",
    ],
)
@pytest.mark.parametrize("name", ["Qwen2", "Gemma3", "GptOss"])
def test_every_layer_stores_the_format_with_the_bytes_of_the_formula(name: str, storage: str) -> None:
    """Sliding layers, biases on keys, learned sinks: no layer is left in BF16 but those that the format skips."""
    model, fmt = tiny(name, RIGHT[name], "kveval_split"), parse_format(storage)
    geometry = from_config(model.config.to_dict())
    with (
        torch.inference_mode(),
        Stream(model, None, Head(model), fmt, IDS, chunk_tokens=64, scales=scales_for(model, fmt, IDS)) as reading,
    ):
        for end in (1, 65, 200):
            list(reading.read_to(end))
            assert reading.cache.stored_bytes == stream_bytes(geometry, fmt, end)
        stored = [layer.read[0].side.codec.lossy for layer in reading.cache.layers]
        assert stored == [storage.endswith("fp8") or 0 < i < 3 or fmt.skip_layers == 0 for i in range(4)]


def test_pruning_under_learned_sinks_is_refused() -> None:
    model = tiny("GptOss", RIGHT["GptOss"], "kveval_split")
    with torch.inference_mode(), pytest.raises(KvevalError, match="learned attention sinks"):
        read_logits(model, parse_format("snapkv:0.5"), IDS, 64)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Mamba", "num_attention_heads|state"),
        ("DeepseekV2", "latent"),
        ("DeepseekV3", "latent"),
        ("Qwen3Next", "linear"),
        ("Jamba", "Mamba"),
        ("FalconH1", "Mamba"),
        ("Bamba", "Mamba"),
        ("RecurrentGemma", "block_types|mixed kinds"),
        ("MiniMax", "linear_attention"),
        ("Llama4Text", "chunked"),
    ],
)
def test_other_kinds_of_cache_are_refused(name: str, told: str) -> None:
    config = getattr(transformers, f"{name}Config")()
    with pytest.raises(KvevalError, match=told):
        token_bytes(from_config(config.to_dict()), parse_format("fp8"))


def test_a_hybrid_of_convolutions_and_attention_is_refused_by_the_layer_type() -> None:
    config = transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    with pytest.raises(KvevalError, match="layer_types holds 'conv'"):
        from_config(config.to_dict())
