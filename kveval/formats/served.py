"""Which servers store a whole format as kveval does, its options included; most variants nobody serves."""

from __future__ import annotations

from dataclasses import replace

from kveval.formats.registry import STORAGES
from kveval.formats.spec import KVFormat

_LLAMA_CPP = {"bf16": "bf16", "fp16": "f16", "q8_0": "q8_0", "q5_1": "q5_1", "q4_0": "q4_0"}
_VLLM_DTYPES = {"fp8": "fp8", "fp8-tensor": "fp8", "fp8-e5m2": "fp8_e5m2"}  # pages stay a whole part of a BF16 layer's
_PRESSES = {"snapkv": "SnapKVPress", "tova": "TOVAPress", "knorm": "KnormPress", "streaming": "StreamingLLMPress"}


def served_by(fmt: KVFormat) -> tuple[str, ...]:
    """Which engines store the whole format so, options included; none for most variants."""
    plain = fmt.keys == fmt.values == "bf16"
    if fmt.pruning:
        return (f"near to it: kvpress's {_PRESSES[fmt.pruning.method]} on transformers",) if plain else ()
    if fmt.window:
        return ("the authors' code (mit-han-lab/streaming-llm)",) if plain and fmt.window.sinks else ()
    if fmt.rotate:
        vllm = replace(fmt, rotate=False).name == "int4-token-head"
        return ("vLLM --kv-cache-dtype int4_per_token_head (with random signs before the rotation)",) if vllm else ()
    if fmt.keys != fmt.values:
        names = [_LLAMA_CPP.get(name) for name in (fmt.keys, fmt.values)]
        served = f"llama.cpp -ctk {names[0]} -ctv {names[1]} -fa on (on CUDA built with GGML_CUDA_FA_ALL_QUANTS)"
        return () if None in names or fmt.skip_layers else (served,)
    if fmt.skip_layers:
        dtype = _VLLM_DTYPES.get(fmt.keys)
        scales = ", scales in the checkpoint" if fmt.keys == "fp8-tensor" else ""
        return (f"vLLM --kv-cache-dtype {dtype} --kv-cache-dtype-skip-layers LAYER ...{scales}",) if dtype else ()
    return STORAGES[fmt.keys].engines
