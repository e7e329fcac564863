"""Tiny random models for tests: real transformers architectures, a few thousand parameters, built in memory."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kveval.cache.attention import register
from kveval.cache.calibration import Scales
from kveval.engines.head import Head
from kveval.engines.stream import Stream
from kveval.engines.transformers import Loaded, calibrate
from kveval.formats.spec import KVFormat


def tiny_llama(
    *,
    attention: str = "kveval_split",
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> PreTrainedModel:
    """A Llama of 2 layers, head_dim 32, 101 words; weights large enough that attention is not flat.

    In float64 two ways to add up agree so well that no stored number falls on another side of its rounding.
    """
    register()
    torch.manual_seed(seed)
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "vocab_size": 101,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | config)).eval()
    model.set_attn_implementation(attention)
    return model.to(dtype)


def scales_for(model: PreTrainedModel, fmt: KVFormat, ids: np.ndarray) -> Scales | None:
    """Static scales found on ``ids`` themselves, where ``fmt`` has some."""
    return calibrate(Loaded(model, None, Head(model)), fmt, ids)  # no text is tokenised


def read_logits(
    model: PreTrainedModel, fmt: KVFormat, ids: np.ndarray, chunk: int, scales: Scales | None = None
) -> torch.Tensor:
    """Logits (tokens, vocabulary) of ``ids`` read through a cache in ``fmt``, ``chunk`` tokens at a time."""
    head = Head(model)
    got = torch.empty(len(ids), head.vocabulary)

    def record(first: int, hidden: torch.Tensor) -> None:
        got[first : first + len(hidden)] = head(hidden)

    with Stream(model, None, head, fmt, ids, chunk_tokens=chunk, scales=scales) as stream:
        for _ in stream.read_to(len(ids), record):
            pass
    return got
