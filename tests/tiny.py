"""Tiny random models for tests: real transformers architectures, a few thousand parameters, built in memory."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kveval.cache.attention import register
from kveval.engines.head import Head
from kveval.engines.stream import Stream
from kveval.formats.spec import KVFormat


def tiny_llama(
    *, attention: str = "kveval_split", heads: int = 4, kv_heads: int = 2, seed: int = 0, **config: object
) -> PreTrainedModel:
    """A Llama of 2 layers, head_dim 32, 101 words; weights large enough that attention is not flat."""
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
    return model


def read_logits(model: PreTrainedModel, fmt: KVFormat, ids: np.ndarray, chunk: int) -> torch.Tensor:
    """Logits (tokens, vocabulary) of ``ids`` read through a cache in ``fmt``, ``chunk`` tokens at a time."""
    head = Head(model)
    got = torch.empty(len(ids), head.vocabulary)

    def record(first: int, hidden: torch.Tensor) -> None:
        got[first : first + len(hidden)] = head(hidden)

    with Stream(model, None, head, fmt, ids, chunk_tokens=chunk) as stream:
        for _ in stream.read_to(len(ids), record):
            pass
    return got
