"""The storage formats by name: how keys and values become bytes, where that comes from, who serves it."""

from __future__ import annotations

from dataclasses import dataclass

from kveval.formats.fp8 import Fp8, Fp8E5m2, Fp8TokenHead
from kveval.formats.ggml import Q4_0, Q5_1, Q8_0
from kveval.formats.half import Bf16, Fp16
from kveval.formats.integers import IntGroups
from kveval.formats.kivi import ChannelInt
from kveval.formats.nvfp4 import Nvfp4
from kveval.formats.side import Side
from kveval.formats.token_head import Int4TokenHead, Int8TokenHead

KIVI_RESIDUAL = 128  # tokens, the paper's choice


@dataclass(frozen=True)
class Storage:
    """How the numbers of a token are kept. ``engines``: which servers store it so, with their name for it."""

    keys: Side
    values: Side
    summary: str
    layout: str
    source: str
    engines: tuple[str, ...] = ()

    @property
    def lossy(self) -> bool:
        """Whether a BF16 vector can come back changed."""
        return self.keys.codec.lossy or self.values.codec.lossy


def _both(side: Side, summary: str, layout: str, source: str, *engines: str) -> Storage:
    return Storage(side, side, summary, layout, source, engines)


_OCP = "OCP 8-bit floating point specification (2023); Micikevicius et al. 2022, arXiv 2209.05433"
_STATIC = (
    "E4M3, saturating at 448 times the scale; a float32 scale (largest magnitude / 448) for {each}, fixed before the "
    "first token from a calibration text, as checkpoints with calibrated scales bring it. Nothing is added per token."
)
_GROUPS = (
    "{bits}-bit integers, {packed} a byte, in groups of {group} neighbouring numbers of one token. {zero} "
    "Rotary position is applied before storing."
)
_ASYMMETRIC = "x ~ zero + scale * q with an fp16 scale and an fp16 zero (the minimum) a group."
_SYMMETRIC = "x ~ scale * q with one fp16 scale a group."
_GGML = "ggml-quants.c of llama.cpp, block_{name}; the same bytes"
_KIVI = "KIVI, Liu et al. 2024, arXiv 2402.02750"


def _groups(bits: int, group: int, *, symmetric: bool = False) -> Storage:
    codec = IntGroups(bits, group, symmetric=symmetric)
    layout = _GROUPS.format(
        bits=bits, packed={2: "four", 4: "two"}[bits], group=group, zero=_SYMMETRIC if symmetric else _ASYMMETRIC
    )
    kind = "symmetric" if symmetric else "asymmetric"
    return _both(
        Side(codec),
        f"{bits}-bit {kind} integers in groups of {group} along a token",
        layout,
        "round-to-nearest group quantisation, as FlexGen's (Sheng et al. 2023, arXiv 2303.06865)",
    )


def _static(scale: str, each: str, *engines: str) -> Storage:
    return _both(
        Side(Fp8(static_scale=scale)),  # type: ignore[arg-type]
        f"float8 E4M3 with a calibrated scale for {each}",
        _STATIC.format(each=each),
        _OCP,
        *engines,
    )


def _kivi(bits: int) -> Storage:
    return Storage(
        Side(ChannelInt(bits), KIVI_RESIDUAL),
        Side(IntGroups(bits, 32), KIVI_RESIDUAL),
        f"KIVI: {bits}-bit keys per channel, {bits}-bit values per token, the newest tokens in BF16",
        f"Keys: {bits}-bit integers with an fp16 scale and zero for 32 consecutive tokens of a channel. Values: "
        f"the same for 32 neighbouring numbers of a token. The newest tokens wait in BF16: keys until {KIVI_RESIDUAL} "
        f"have gathered, the latest {KIVI_RESIDUAL} values always (residual=N sets another number).",
        _KIVI,
        ("the authors' code for Llama and Mistral", "near to it: transformers' QuantizedCache"),
    )


STORAGES: dict[str, Storage] = {
    "bf16": _both(
        Side(Bf16()), "bfloat16: the baseline", "2 bytes a number, round to nearest even.", "bfloat16", "all"
    ),
    "fp16": _both(
        Side(Fp16()),
        "float16: the other 16-bit baseline",
        "2 bytes a number: 3 bits more precision than bfloat16, and nothing beyond 65,504, which is an error.",
        "IEEE 754-2019 binary16",
        "all, for models run in float16",
        "llama.cpp -ctk f16 -ctv f16",
    ),
    "fp8": _both(
        Side(Fp8()),
        "float8 E4M3 with scale 1.0",
        "1 byte a number, saturating at 448, no scale: what servers do when a checkpoint brings no scales.",
        _OCP,
        "vLLM --kv-cache-dtype fp8 (without scales in the checkpoint)",
        "SGLang --kv-cache-dtype fp8_e4m3 (likewise)",
    ),
    "fp8-tensor": _static(
        "tensor",
        "each layer's keys and one for its values",
        "vLLM --kv-cache-dtype fp8 with k_scale and v_scale in the checkpoint",
        "TensorRT-LLM's FP8 KV cache",
    ),
    "fp8-head": _static("head", "each KV head of a layer, keys and values apart", "vLLM with per-head scales (Hopper)"),
    "fp8-channel": _static("channel", "each channel of each KV head of a layer, keys and values apart"),
    "fp8-token-head": _both(
        Side(Fp8TokenHead()),
        "float8 E4M3 with a scale for each token and KV head",
        "1 byte a number and a float32 scale (largest magnitude / 448) for each vector of a token and KV head.",
        _OCP,
        "vLLM --kv-cache-dtype fp8_per_token_head",
    ),
    "fp8-e5m2": _both(
        Side(Fp8E5m2()),
        "float8 E5M2 with scale 1.0",
        "1 byte a number, saturating at 57,344, no scale: the range of float16 with 2 bits after the point.",
        _OCP,
        "vLLM --kv-cache-dtype fp8_e5m2",
        "SGLang --kv-cache-dtype fp8_e5m2",
    ),
    "int8-token-head": _both(
        Side(Int8TokenHead()),
        "8-bit integers with a scale for each token and KV head",
        "1 byte a number and a float32 scale for each vector of a token and KV head, symmetric.",
        "vLLM's per-token-head KV cache quantisation",
        "vLLM --kv-cache-dtype int8_per_token_head",
    ),
    "int4-g32": _groups(4, 32),
    "int4-g64": _groups(4, 64),
    "int4-g32-sym": _groups(4, 32, symmetric=True),
    "int4-g64-sym": _groups(4, 64, symmetric=True),
    "int2-g32": _groups(2, 32),
    "int4-token-head": _both(
        Side(Int4TokenHead()),
        "4-bit integers with a scale for each token and KV head, as vLLM packs them",
        "Half a byte a number and 4 bytes for each vector of a token and KV head: a float32 scale with a 4-bit zero point "
        "in its lowest bits. Numbers of a vector that are all of one sign read back as nothing: vLLM turns vectors by a "
        "Hadamard matrix (and random signs) before, so what it serves is nearer to int4-token-head,rotate=hadamard.",
        "vLLM's per-token-head KV cache quantisation",
    ),
    "kivi4": _kivi(4),
    "kivi2": _kivi(2),
    "nvfp4": _both(
        Side(Nvfp4()),
        "4-bit floats E2M1 in blocks of 16 with an E4M3 scale",
        "Half a byte a number and one E4M3 byte (largest magnitude / 6) for 16 neighbouring numbers; global scale 1.0.",
        "NVIDIA, Introducing NVFP4 (2025); OCP microscaling formats (2023) for E2M1",
        "vLLM --kv-cache-dtype nvfp4 (Blackwell)",
        "TensorRT-LLM's NVFP4 KV cache",
    ),
    "q8_0": _both(
        Side(Q8_0()),
        "llama.cpp's q8_0",
        "34 bytes for 32 neighbouring numbers: an fp16 scale and 32 signed bytes.",
        _GGML.format(name="q8_0"),
        "llama.cpp -ctk q8_0 -ctv q8_0 -fa on",
    ),
    "q5_1": _both(
        Side(Q5_1()),
        "llama.cpp's q5_1",
        "24 bytes for 32 neighbouring numbers: an fp16 scale and minimum, 5 bits a number.",
        _GGML.format(name="q5_1"),
        "llama.cpp -ctk q5_1 -ctv q5_1 -fa on",
    ),
    "q4_0": _both(
        Side(Q4_0()),
        "llama.cpp's q4_0",
        "18 bytes for 32 neighbouring numbers: an fp16 scale and 4 bits a number.",
        _GGML.format(name="q4_0"),
        "llama.cpp -ctk q4_0 -ctv q4_0 -fa on",
    ),
}

ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "f16": "fp16",
    "fp8-e4m3": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8-e5m2",
    "fp8_per_token_head": "fp8-token-head",
    "int8_per_token_head": "int8-token-head",
    "int4_per_token_head": "int4-token-head",
}
