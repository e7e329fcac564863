"""Integers in groups along the token: bytes, packing, the formula, its error bound."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hard import HARD, HEAD_DIMS, decoded, normal, parts_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.errors import KvevalError
from kveval.formats.integers import IntGroups

CODECS = [
    IntGroups(4, 32),
    IntGroups(4, 64),
    IntGroups(4, 32, symmetric=True),
    IntGroups(2, 32),
    IntGroups(2, 16, True),
]
NAMES = ["int4-g32", "int4-g64", "int4-g32-sym", "int2-g32", "int2-g16-sym"]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=NAMES)


def by_the_book(codec: IntGroups, x: np.ndarray) -> np.ndarray:
    """The formula of ``IntGroups``, number by number in numpy."""
    out, most = np.empty_like(x), np.float32(2 ** (codec.bits - 1) - 1 if codec.symmetric else 2**codec.bits - 1)
    for heads, token, start in np.ndindex(*x.shape[:2], x.shape[2] // codec.group):
        place = (heads, token, slice(codec.group * start, codec.group * (start + 1)))
        low, high = x[place].min(), x[place].max()
        zero = np.float32(0) if codec.symmetric else np.float32(np.float16(low))
        scale = np.float32(np.float16((max(-low, high) if codec.symmetric else high - low) / most))
        q = [np.rint((number - zero) / (scale or np.float32(1))) for number in x[place]]
        out[place] = [zero + scale * np.clip(step, -most if codec.symmetric else 0, most) for step in q]
    return out


@each_codec
def test_the_name_says_bits_group_and_symmetry(codec: IntGroups) -> None:
    assert codec.name == NAMES[CODECS.index(codec)]


@pytest.mark.parametrize(
    ("codec", "vector_bytes"),
    list(zip(CODECS, [64 + 16, 64 + 8, 64 + 8, 32 + 16, 32 + 16], strict=True)),
    ids=NAMES,
)
def test_bytes_of_a_vector_of_128(codec: IntGroups, vector_bytes: int) -> None:
    assert codec.block_bytes(128) == vector_bytes


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@each_codec
def test_parts_take_the_bytes_of_the_formula_or_the_head_dim_is_refused(codec: IntGroups, head_dim: int) -> None:
    if head_dim % codec.group:
        told = f"{codec.name} cannot store a head_dim of {head_dim}: groups of {codec.group} numbers do not divide it"
        with pytest.raises(KvevalError, match=told):
            codec.block_bytes(head_dim)
        with pytest.raises(KvevalError, match=told):
            codec.encode(normal(1, 1, head_dim))
        return
    for tokens in (1, 31, 32, 33):
        parts = codec.encode(normal(3, tokens, head_dim))
        assert all(part.shape[:2] == (3, tokens) for part in parts)
        assert parts_bytes(parts) == 3 * tokens * codec.block_bytes(head_dim)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(KvevalError, match="3 bits are not stored in groups; use 2 or 4"):
        IntGroups(3, 32)
    with pytest.raises(KvevalError, match="a group of 0 numbers"):
        IntGroups(4, 0)
    with pytest.raises(KvevalError, match="int2-g2 cannot store a head_dim of 6: 4 numbers share a byte"):
        IntGroups(2, 2).block_bytes(6)


def test_packing_is_planar() -> None:
    """Byte i holds number i of each half (quarter) of the vector, the first in the lowest bits."""
    x = torch.tensor([0, 15, 1, 14, 2, 13, 3, 12.0]).reshape(1, 1, 8)
    packed, scales, zeros = IntGroups(4, 8).encode(x)
    assert bytes(packed.flatten().tolist()) == bytes.fromhex("20df31ce")
    assert (scales.item(), zeros.item()) == (1.0, 0.0)
    packed, scales, zeros = IntGroups(2, 8).encode(torch.tensor([0, 1, 2, 3, 3, 2, 1, 0.0]).reshape(1, 1, 8))
    assert bytes(packed.flatten().tolist()) == bytes.fromhex("782d")
    assert (scales.item(), zeros.item()) == (1.0, 0.0)
    packed, scales = IntGroups(4, 4, symmetric=True).encode(torch.tensor([-7, 7, 0, 1.0]).reshape(1, 1, 4))
    assert bytes(packed.flatten().tolist()) == bytes.fromhex("708e")  # q + 7: 0, 14, 7, 8
    assert scales.item() == 1.0
    packed, scales = IntGroups(4, 4, symmetric=True).encode(torch.zeros(1, 1, 4))
    assert bytes(packed.flatten().tolist()) == bytes.fromhex("7777")  # a scale of 0 divides nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", list(HARD))
@each_codec
def test_equals_the_formula(codec: IntGroups, kind: str, dtype: torch.dtype) -> None:
    x = HARD[kind](normal(2, 5, 64)).to(dtype)
    got = decoded(codec, x)
    np.testing.assert_array_equal(got.numpy(), by_the_book(codec, x.float().numpy()))
    if kind == "zero" or (kind == "constant" and not codec.symmetric):
        assert torch.equal(got, x.float())


@pytest.mark.parametrize("x", [1e5, -1e5, 3e38], ids=str)
@each_codec
def test_beyond_fp16_saturates(codec: IntGroups, x: float) -> None:
    """A constant group of 1e5 needs a zero (or scale) that fp16 cannot hold."""
    got = decoded(codec, torch.full((1, 2, 64), x))
    assert torch.isfinite(got).all()
    most = 65504.0 if not codec.symmetric else min(abs(x), 65504.0 * (2 ** (codec.bits - 1) - 1))
    torch.testing.assert_close(got, torch.full_like(got, np.copysign(most, x)), rtol=2**-10, atol=0)


@given(st.sampled_from(CODECS), st.lists(st.floats(-6e4, 6e4, width=32), min_size=64, max_size=64))
@settings(max_examples=150, deadline=None)
def test_error_is_bounded_by_half_a_step(codec: IntGroups, values: list[float]) -> None:
    """|error| <= step / 2 and what fp16 rounds off the scale (times the largest q) and the zero."""
    x = torch.tensor(values).reshape(1, 1, 64)
    error = (decoded(codec, x) - x).abs().reshape(-1, codec.group).amax(dim=-1)
    low, high = (f(x.reshape(-1, codec.group), dim=-1) for f in (torch.amin, torch.amax))
    most = 2 ** (codec.bits - 1) - 1 if codec.symmetric else 2**codec.bits - 1
    reach = torch.maximum(-low, high) if codec.symmetric else high - low
    rounding = 2**-11 * (reach + (0 if codec.symmetric else low.abs())) + (most + 1) * 2**-24
    assert (error <= reach / most / 2 + 2 * rounding).all()


@each_codec
def test_decodes_into_a_slice_in_bf16_rounding_once(codec: IntGroups) -> None:
    x = normal(3, 40, 64)
    buffer = torch.full((3, 50, 64), 7.0, dtype=torch.bfloat16)
    codec.decode(codec.encode(x), buffer[:, 4:44])
    assert torch.equal(buffer[:, 4:44], decoded(codec, x).to(torch.bfloat16))
    assert (buffer[:, :4] == 7).all()
    assert (buffer[:, 44:] == 7).all()


@each_codec
def test_a_token_is_encoded_alone(codec: IntGroups) -> None:
    x = normal(2, 9, 64)
    whole = codec.encode(x)
    for token in range(9):
        for part, alone in zip(whole, codec.encode(x[:, token : token + 1]), strict=True):
            assert torch.equal(part[:, token : token + 1], alone)


@each_codec
def test_tokens_may_lie_in_memory_before_heads(codec: IntGroups) -> None:
    x = normal(9, 2, 64).transpose(0, 1)
    assert torch.equal(decoded(codec, x), decoded(codec, x.contiguous()))
