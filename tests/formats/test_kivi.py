"""KIVI's keys: bytes, packing, the formula, and what it is for (outlier channels)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hard import HARD, HEAD_DIMS, decoded, normal, parts_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.errors import KvevalError
from kveval.formats.codec import Codec
from kveval.formats.integers import IntGroups
from kveval.formats.kivi import ChannelInt

CODECS = [ChannelInt(4), ChannelInt(2), ChannelInt(2, 128), ChannelInt(4, 2)]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.bits}bit-{codec.block_tokens}")


def by_the_book(codec: ChannelInt, x: np.ndarray) -> np.ndarray:
    """Liu et al. 2024 (arXiv:2402.02750), section 3.1, group by group in numpy, with scale and zero in fp16."""
    out, most = np.empty_like(x), np.float32(2**codec.bits - 1)
    for head, block, channel in np.ndindex(x.shape[0], x.shape[1] // codec.block_tokens, x.shape[2]):
        place = (head, slice(block * codec.block_tokens, (block + 1) * codec.block_tokens), channel)
        zero = np.float32(np.float16(x[place].min()))
        scale = np.float32(np.float16((x[place].max() - x[place].min()) / most))
        q = np.rint((x[place] - zero) / (scale or np.float32(1)))
        out[place] = zero + scale * np.clip(q, 0, most)
    return out


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@each_codec
def test_parts_take_the_bytes_of_the_formula(codec: ChannelInt, head_dim: int) -> None:
    for blocks in (1, 3):
        parts = codec.encode(normal(3, blocks * codec.block_tokens, head_dim))
        assert all(part.shape[:2] == (3, blocks) for part in parts)
        assert parts_bytes(parts) == 3 * blocks * codec.block_bytes(head_dim)


def test_bytes_of_a_block_of_32_tokens_of_128() -> None:
    assert ChannelInt(4).block_bytes(128) == 32 * 64 + 128 * 4
    assert ChannelInt(2).block_bytes(128) == 32 * 32 + 128 * 4


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(KvevalError, match="8 bits are not stored per channel; use 2 or 4"):
        ChannelInt(8)
    with pytest.raises(KvevalError, match="a block of 30 tokens cannot be stored in 2 bits: 4 tokens share a byte"):
        ChannelInt(2, 30)
    with pytest.raises(KvevalError, match="a block of 0 tokens"):
        ChannelInt(4, 0)


def test_packing_is_planar_along_tokens() -> None:
    """Four tokens of two channels: byte (t, c) holds token t (low half) and token t + 2 (high half)."""
    x = torch.tensor([[0, 30], [15, 0], [1, 2], [14, 28.0]]).unsqueeze(0)
    packed, scales, zeros = ChannelInt(4, 4).encode(x)
    assert bytes(packed.flatten().tolist()) == bytes.fromhex("101fefe0")
    assert scales.tolist() == [[[1.0, 2.0]]]
    assert zeros.tolist() == [[[0.0, 0.0]]]
    packed, _, _ = ChannelInt(2, 4).encode(torch.tensor([0, 1, 2, 3.0]).reshape(1, 4, 1))
    assert packed.item() == 0b11_10_01_00


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("kind", list(HARD))
@pytest.mark.parametrize("codec", CODECS[:2], ids=["4bit", "2bit"])
def test_equals_the_formula(codec: ChannelInt, kind: str, dtype: torch.dtype) -> None:
    x = HARD[kind](normal(2, 64, 16)).to(dtype)
    got = decoded(codec, x)
    np.testing.assert_array_equal(got.numpy(), by_the_book(codec, x.float().numpy()))
    if kind in ("zero", "constant"):
        assert torch.equal(got, x.float())


@pytest.mark.parametrize("number", [1e5, -1e5, 3e38], ids=str)
@each_codec
def test_beyond_fp16_saturates(codec: ChannelInt, number: float) -> None:
    got = decoded(codec, torch.full((1, codec.block_tokens, 8), number))
    assert torch.equal(got, torch.full_like(got, np.copysign(65504.0, number)))


@given(st.sampled_from(CODECS[:2]), st.lists(st.floats(-6e4, 6e4, width=32), min_size=64, max_size=64))
@settings(max_examples=150, deadline=None)
def test_error_is_bounded_by_half_a_step(codec: ChannelInt, values: list[float]) -> None:
    """|error| <= step / 2 and what fp16 rounds off the scale (times the largest q) and the zero."""
    x = torch.tensor(values).reshape(1, 32, 2)
    error = (decoded(codec, x) - x).abs().amax(dim=1)
    low, high, most = x.amin(dim=1), x.amax(dim=1), 2**codec.bits - 1
    rounding = 2**-11 * ((high - low) + low.abs()) + (most + 1) * 2**-24
    assert (error <= (high - low) / most / 2 + 2 * rounding).all()


@each_codec
def test_decodes_into_a_slice_in_bf16_rounding_once(codec: ChannelInt) -> None:
    tokens = 2 * codec.block_tokens
    x = normal(3, tokens, 64)
    buffer = torch.full((3, tokens + 10, 64), 7.0, dtype=torch.bfloat16)
    codec.decode(codec.encode(x), buffer[:, 4 : tokens + 4])
    assert torch.equal(buffer[:, 4 : tokens + 4], decoded(codec, x).to(torch.bfloat16))
    assert (buffer[:, :4] == 7).all()
    assert (buffer[:, tokens + 4 :] == 7).all()


@each_codec
def test_a_block_is_encoded_alone(codec: ChannelInt) -> None:
    x = normal(2, 3 * codec.block_tokens, 64)
    whole = codec.encode(x)
    for block in range(3):
        alone = codec.encode(x[:, block * codec.block_tokens : (block + 1) * codec.block_tokens])
        for part, one in zip(whole, alone, strict=True):
            assert torch.equal(part[:, block : block + 1], one)


@each_codec
def test_tokens_may_lie_in_memory_before_heads(codec: ChannelInt) -> None:
    x = normal(codec.block_tokens, 2, 64).transpose(0, 1)
    assert torch.equal(decoded(codec, x), decoded(codec, x.contiguous()))


def relative_error(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """Root mean square error of each channel over that channel's root mean square, (head_dim,)."""
    return ((decoded(codec, x) - x).square().mean(dim=(0, 1)) / x.square().mean(dim=(0, 1))).sqrt()


@pytest.mark.parametrize(("bits", "factor"), [(4, 30), (2, 7)])
def test_an_outlier_channel_does_not_hurt_the_channels_beside_it(bits: int, factor: float) -> None:
    """At equal bytes; channel 7 is 1e4 times larger, and a group along the token is channels 0..31.

    The step of a normal channel's 32 tokens is some 4 / (2^bits - 1) standard deviations, its error step / sqrt(12).
    """
    x = HARD["outlier"](normal(2, 96, 128))
    channels, tokens = ChannelInt(bits), IntGroups(bits, 32)
    assert channels.block_bytes(128) == 32 * tokens.block_bytes(128)
    by_channel, by_token = relative_error(channels, x), relative_error(tokens, x)
    beside = [channel for channel in range(32) if channel != 7]
    assert by_token[beside].mean() > factor * by_channel[beside].mean()
    assert by_channel.max() < 4.5 / (2**bits - 1) / 12**0.5 * 1.2  # no channel stands out
    away = slice(32, 128)  # groups without an outlier: neither layout is better
    torch.testing.assert_close(by_token[away].mean(), by_channel[away].mean(), rtol=0.05, atol=0)
