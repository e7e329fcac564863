"""vLLM's per-token-head formats against vLLM's formulas.

The formulas below are written from vLLM 0.32.0: ``vllm/v1/attention/ops/int4_per_token_head.py``
(``_reshape_cache_int4_kernel``, ``_attn_packed``, ``reshape_and_cache_int4``) and
``vllm/v1/attention/ops/triton_reshape_and_cache_flash.py`` (``_reshape_cache_per_token_head``). The stored bytes in
``MADE_BY_VLLM`` were made by those kernels themselves, run by the CPU interpreter of triton 3.6.0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hard import HARD, HEAD_DIMS, decoded, normal, parts_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.errors import KvevalError
from kveval.formats.codec import Codec
from kveval.formats.token_head import Int4TokenHead, Int8TokenHead

CODECS: list[Codec] = [Int8TokenHead(), Int4TokenHead()]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=["int8", "int4"])
F = np.float32
Formula = Callable[[np.ndarray], tuple[bytes, np.float32]]

BOTH_SIGNS = [((i * 37) % 101 - 50) / 16 for i in range(64)]
ONE_SIGN = [3 + ((i * 37) % 101) / 64 for i in range(64)]  # int4's zero point would have to be negative: clipped
MADE_BY_VLLM = [  # codec, vector, stored bytes, bits of the stored scale
    (
        Int4TokenHead(),
        BOTH_SIGNS,
        "602cd8945f1bc7824efab5713de8a46f2bd7935e1ac6824df9b5713ce8a46f2b",
        1054168408,
    ),
    (Int4TokenHead(), ONE_SIGN, "ff" * 32, 1037391184),
    (
        Int8TokenHead(),
        BOTH_SIGNS,
        "81df3d9af856b41270cd2b89e745a2005ebb1977d53390ee4caa0866c3217fdc"
        "3a98f654b10f6dcb2986e4429ffd5bb91775d2308eec4aa70563c01e7cda3895",
        1019843366,
    ),
    (
        Int8TokenHead(),
        ONE_SIGN,
        "5464745868785c6c7c61715565755969795e6e7e62725666765a6b7b5f6f7f63"
        "735768785c6c7c60705464755969795d6d7d61725666765a6a7a5e6e7f637357",
        1024665165,
    ),
]


def half_away_from_zero(number: np.float32) -> int:
    """A half is added away from zero and the rest is cut off, both in float32."""
    return int(np.trunc(number + F(0.5) if number >= 0 else number - F(0.5)))


def int8_of(vector: np.ndarray) -> tuple[bytes, np.float32]:
    scale = max(np.abs(vector).max() / F(127), F(1e-6))
    inverse = F(1) / scale
    return bytes(min(max(half_away_from_zero(x * inverse), -128), 127) % 256 for x in vector), scale


def int4_of(vector: np.ndarray) -> tuple[bytes, np.float32]:
    scale = max((vector.max() - vector.min()) / F(15), F(1e-6))
    zero_point = min(max(half_away_from_zero(-vector.min() / scale), 0), 15)
    inverse = F(1) / scale
    q = [min(max(half_away_from_zero(x * inverse + F(zero_point)), 0), 15) for x in vector]
    word = (int(scale.view(np.uint32)) & ~0xF) | zero_point
    return bytes(even | odd << 4 for even, odd in zip(q[0::2], q[1::2], strict=True)), np.uint32(word).view(F)


def int4_read(stored: bytes, scale: np.float32) -> list[np.float32]:
    """What attention makes of them: (q . codes - zp * sum(q)) * scale, which is q . (codes - zp) * scale."""
    word = int(scale.view(np.uint32))
    step = np.uint32(word & ~0xF).view(F)
    return [F(code - (word & 0xF)) * step for byte in stored for code in (byte & 0xF, byte >> 4)]


def test_bytes_of_a_key_and_a_value_of_128() -> None:
    """vLLM's page holds data and one float32 scale a head and side (``TritonAttentionBackend.customize_spec``)."""
    assert 2 * Int4TokenHead().block_bytes(128) == 136
    assert 2 * Int8TokenHead().block_bytes(128) == 264


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@each_codec
def test_parts_take_the_bytes_of_the_formula(codec: Codec, head_dim: int) -> None:
    for tokens in (1, 31, 32, 33):
        parts = codec.encode(normal(3, tokens, head_dim))
        assert all(part.shape[:2] == (3, tokens) for part in parts)
        assert parts_bytes(parts) == 3 * tokens * codec.block_bytes(head_dim)


def test_int4_refuses_an_odd_head_dim() -> None:
    for refused in (Int4TokenHead().block_bytes, lambda head_dim: Int4TokenHead().encode(normal(1, 1, head_dim))):
        with pytest.raises(KvevalError, match="int4-token-head cannot store a head_dim of 65"):
            refused(65)


@pytest.mark.parametrize(("codec", "vector", "stored", "scale"), MADE_BY_VLLM)
def test_bytes_are_those_that_vllms_kernels_store(codec: Codec, vector: list[float], stored: str, scale: int) -> None:
    numbers, scales = codec.encode(torch.tensor(vector).reshape(1, 1, 64))
    assert numbers.numpy().tobytes().hex() == stored
    assert scales.view(torch.int32).item() == scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", [*HARD, "huge"])
@pytest.mark.parametrize(
    ("codec", "formula"), [(Int8TokenHead(), int8_of), (Int4TokenHead(), int4_of)], ids=["int8", "int4"]
)
def test_bytes_equal_the_formula(codec: Codec, formula: Formula, kind: str, dtype: torch.dtype) -> None:
    x = (HARD[kind](normal(1, 12, 80)) if kind in HARD else normal(1, 12, 80) * 1e5).to(dtype)
    numbers, scales = codec.encode(x)
    for token, vector in enumerate(x[0].float().numpy()):
        stored, scale = formula(vector)
        assert numbers[0, token].numpy().tobytes() == stored
        assert scales[0, token].view(torch.int32).item() == int(scale.view(np.int32))


@pytest.mark.parametrize("kind", list(HARD))
def test_int4_reads_back_as_vllms_attention_reads_it(kind: str) -> None:
    x = HARD[kind](normal(1, 6, 64))
    got = decoded(Int4TokenHead(), x)
    for token, vector in enumerate(x[0].numpy()):
        np.testing.assert_array_equal(got[0, token].numpy(), int4_read(*int4_of(vector)))


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=64, max_size=64))
@settings(max_examples=100, deadline=None)
def test_int8_error_is_bounded_by_half_a_step(values: list[float]) -> None:
    x = torch.tensor(values).reshape(1, 1, 64)
    step = max(x.abs().max().item() / 127, 1e-6)
    assert (decoded(Int8TokenHead(), x) - x).abs().max().item() <= step / 2 + 127 * step * 2**-21


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=63, max_size=63))
@settings(max_examples=100, deadline=None)
def test_int4_error_is_bounded_by_half_a_step_where_zero_is_inside(values: list[float]) -> None:
    """Rounding zp moves the grid by up to half a step, off whose end the extremes are clipped: half a step again.

    The four bits of the scale that zp takes are 15 of 2^23 units of at most 15 steps.
    """
    x = torch.tensor([*values, 0.0]).reshape(1, 1, 64)
    step = max((x.max() - x.min()).item() / 15, 1e-6)
    assert (decoded(Int4TokenHead(), x) - x).abs().max().item() <= step * (0.5 + 15 * 2**-19 + 2**-17)


def test_int4_loses_vectors_of_one_sign() -> None:
    """vLLM's zero point is clipped to 0..15, which its rotation hides: 3.14 everywhere reads back as 15 * 1e-6."""
    got = decoded(Int4TokenHead(), HARD["constant"](normal(1, 1, 64)))
    torch.testing.assert_close(got, torch.full_like(got, 15e-6), rtol=1e-5, atol=0)


@each_codec
def test_decodes_into_a_slice_in_bf16_rounding_once(codec: Codec) -> None:
    x = normal(3, 40, 64)
    buffer = torch.full((3, 50, 64), 7.0, dtype=torch.bfloat16)
    codec.decode(codec.encode(x), buffer[:, 4:44])
    assert torch.equal(buffer[:, 4:44], decoded(codec, x).to(torch.bfloat16))
    assert (buffer[:, :4] == 7).all()
    assert (buffer[:, 44:] == 7).all()


@each_codec
def test_a_token_is_encoded_alone(codec: Codec) -> None:
    x = normal(2, 9, 64)
    whole = codec.encode(x)
    for token in range(9):
        for part, alone in zip(whole, codec.encode(x[:, token : token + 1]), strict=True):
            assert torch.equal(part[:, token : token + 1].view(torch.uint8), alone.view(torch.uint8))


@each_codec
def test_tokens_may_lie_in_memory_before_heads(codec: Codec) -> None:
    x = normal(9, 2, 64).transpose(0, 1)
    assert torch.equal(decoded(codec, x), decoded(codec, x.contiguous()))
