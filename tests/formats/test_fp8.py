"""fp8: torch's casts and a table of all codes as references, the five scales, and vLLM's formula for one of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hard import HARD, HEAD_DIMS, decoded, normal, parts_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.formats.codec import Codec, StaticScale
from kveval.formats.fp8 import E4M3_MAX, E5M2_MAX, CalibratedFp8, Fp8, Fp8E5m2, Fp8TokenHead

STATIC: tuple[StaticScale, ...] = ("tensor", "head", "channel")
PLAIN = [(Fp8(), torch.float8_e4m3fn, 448.0), (Fp8E5m2(), torch.float8_e5m2, 57344.0)]


def numbers_of(dtype: torch.dtype) -> torch.Tensor:
    """The finite numbers of an 8-bit dtype in the order of their codes, as torch reads them, float32."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return numbers[numbers.isfinite()]


def e4m3(code: int) -> float:
    """The number of an E4M3 code, from the formula of the specification's section 5."""
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """(heads, head_dim) largest magnitudes of ``x`` (heads, tokens, head_dim)."""
    return x.abs().amax(dim=1)


def every_codec(x: torch.Tensor) -> list[Codec]:
    """Each codec of the file, the static ones calibrated on ``x``."""
    return [Fp8(), Fp8E5m2(), Fp8TokenHead(), *(Fp8(scale).calibrated(amax_of(x)) for scale in STATIC)]


# --- what is stored


@pytest.mark.parametrize(("head_dim", "tokens"), [*itertools.product(HEAD_DIMS, [1, 31, 32, 33])])
def test_stored_bytes_are_what_the_formats_say(head_dim: int, tokens: int) -> None:
    x = normal(2, tokens, head_dim)
    for codec in every_codec(x):
        scale = 4 if isinstance(codec, Fp8TokenHead) else 0
        assert codec.block_bytes(head_dim) == head_dim + scale
        assert parts_bytes(codec.encode(x)) == 2 * tokens * codec.block_bytes(head_dim)
        assert all(part.shape[:2] == (2, tokens) for part in codec.encode(x))
        assert parts_bytes(codec.constants) == codec.constant_bytes(2, head_dim)


def test_static_scales_take_the_bytes_of_their_axis() -> None:
    assert [Fp8(scale).constant_bytes(8, 128) for scale in (None, *STATIC)] == [0, 4, 32, 4096]


@pytest.mark.parametrize("codec_dtype_largest", PLAIN)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_read_as_torch_reads_it(
    codec_dtype_largest: tuple[Codec, torch.dtype, float], out_dtype: torch.dtype
) -> None:
    codec, dtype, largest = codec_dtype_largest
    numbers = numbers_of(dtype)
    out = torch.empty((1, 1, len(numbers)), dtype=out_dtype)
    codec.decode(codec.encode(numbers[None, None]), out)
    assert torch.equal(out[0, 0].float(), numbers)
    assert torch.equal(out[0, 0].signbit(), numbers.signbit())  # -0.0 as well
    assert numbers.max() == largest
    assert len(numbers) == {torch.float8_e4m3fn: 254, torch.float8_e5m2: 248}[dtype]


def test_e4m3_is_the_formula_of_its_specification() -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]  # the rest is NaN
    assert numbers_of(torch.float8_e4m3fn).tolist() == [e4m3(code) for code in codes]


@pytest.mark.parametrize("codec_dtype_largest", PLAIN)
@pytest.mark.parametrize("name", HARD)
def test_a_number_is_stored_as_torch_casts_it_and_saturates(
    name: str, codec_dtype_largest: tuple[Codec, torch.dtype, float]
) -> None:
    codec, dtype, largest = codec_dtype_largest
    x = HARD[name](normal(2, 33, 96) * 20)
    back, inside = decoded(codec, x), x.abs() <= largest
    assert torch.equal(back[inside], x[inside].to(dtype).float())
    assert torch.equal(back[~inside], x[~inside].sign() * largest)


@pytest.mark.parametrize("codec_dtype_largest", PLAIN)
def test_a_number_is_the_nearest_there_is_with_ties_to_even(
    codec_dtype_largest: tuple[Codec, torch.dtype, float],
) -> None:
    codec, dtype, _ = codec_dtype_largest
    table = numbers_of(dtype).double()
    x = torch.cat([normal(2000) * 2.0**k for k in range(-18, 17)])
    distance = (decoded(codec, x[None, None])[0, 0].double() - x).abs()
    assert torch.equal(distance, (x[:, None] - table).abs().amin(dim=1))
    positive = table[~table.signbit()]
    middle = ((positive[:-1] + positive[1:]) / 2).float()
    evens = positive[:-1].where(torch.arange(len(middle)) % 2 == 0, positive[1:])
    assert torch.equal(decoded(codec, middle[None, None])[0, 0], evens.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nothing_becomes_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([500.0, -500.0, 464.0, 449.0, 65504.0, -65504.0, 1e-7, 0.0], dtype=dtype).view(1, 1, 8)
    assert decoded(Fp8(), x).flatten().tolist()[:6] == [448, -448, 448, 448, 448, -448]
    assert decoded(Fp8E5m2(), x).flatten().tolist()[4:6] == [E5M2_MAX, -E5M2_MAX]
    for codec in every_codec(x.float()):
        assert decoded(codec, x).isfinite().all()
    if dtype != torch.float16:
        huge = torch.full((1, 2, 64), 3e38, dtype=dtype)
        for codec in every_codec(huge.float()):
            assert decoded(codec, huge).isfinite().all()


# --- static scales


def test_scales_are_the_largest_magnitude_over_448_along_their_axis() -> None:
    x = normal(3, 40, 64) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)
    found = {scale: Fp8(scale).calibrated(amax_of(x)) for scale in STATIC}
    expected = {
        "tensor": x.abs().max().view(1, 1, 1),
        "head": x.abs().amax(dim=(1, 2)).view(3, 1, 1),
        "channel": x.abs().amax(dim=1).view(3, 1, 64),
    }
    for scale, codec in found.items():
        (scales,) = codec.constants
        assert scales.dtype == torch.float32
        assert torch.equal(scales, expected[scale] / 448)
        by_torch = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(codec.encode(x)[0].view(torch.uint8), by_torch.view(torch.uint8))
        assert torch.equal(decoded(codec, x), by_torch.float() * scales)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(STATIC), st.integers(-20, 20), st.integers(0, 2**31))
def test_the_error_is_half_a_step_of_the_scaled_number(scale: StaticScale, exponent: int, seed: int) -> None:
    x = normal(2, 8, 64, seed=seed) * 2.0**exponent
    codec = Fp8(scale).calibrated(amax_of(x))
    (scales,) = codec.constants
    bound = torch.maximum(x.abs() * 2.0**-4, scales * 2.0**-10) * (1 + 1e-6)
    assert ((decoded(codec, x) - x).abs() <= bound).all()


@pytest.mark.parametrize("scale", STATIC)
def test_beyond_the_calibrated_range_it_saturates(scale: StaticScale) -> None:
    amax = normal(2, 64).abs() + 0.5
    codec = Fp8(scale).calibrated(amax)
    top = {"tensor": amax.max(), "head": amax.amax(dim=1, keepdim=True)[:, None], "channel": amax[:, None]}[scale]
    x = torch.full((2, 3, 64), 1e4)
    torch.testing.assert_close(decoded(codec, x), top.expand(2, 3, 64), rtol=1e-6, atol=0)
    torch.testing.assert_close(decoded(codec, -x), -top.expand(2, 3, 64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", STATIC)
@pytest.mark.parametrize("level", [0.0, 1e-45, 1e-38])
def test_a_calibration_text_without_a_number_divides_nothing_by_zero(scale: StaticScale, level: float) -> None:
    codec = Fp8(scale).calibrated(torch.full((2, 64), level))
    assert isinstance(codec, CalibratedFp8)
    assert (codec.scales == 1.0).all()
    x = normal(2, 4, 64)
    assert torch.equal(decoded(codec, x), decoded(Fp8(), x))
    assert torch.equal(decoded(codec, x * 0), x * 0)


def test_one_dead_channel_leaves_the_others_their_scales() -> None:
    amax = normal(2, 64).abs()
    amax[1, 5] = 0
    (scales,) = Fp8("channel").calibrated(amax).constants
    assert scales[1, 0, 5] == 1
    alive = amax > 0
    assert torch.equal(scales[:, 0][alive], amax[alive] / 448)


def test_a_channel_a_thousand_times_the_others_costs_them_nothing_under_scales_per_channel() -> None:
    x = normal(2, 64, 64) * torch.where(torch.arange(64) == 7, 1e6, 1.0)
    others = torch.arange(64) != 7
    error = {}
    for scale in STATIC:
        codec = Fp8(scale).calibrated(amax_of(x))
        error[scale] = float((decoded(codec, x) - x)[..., others].norm() / x[..., others].norm())
    assert error["channel"] < 0.04  # half a step is at most 1/16 of a number
    assert error["tensor"] > 0.9
    assert error["head"] > 0.9


def test_scales_must_be_found_before_anything_is_stored() -> None:
    x = normal(1, 1, 64)
    for scale in STATIC:
        with pytest.raises(AssertionError, match="calibrated"):
            Fp8(scale).encode(x)
        with pytest.raises(AssertionError, match="calibrated"):
            Fp8(scale).decode(Fp8().encode(x), torch.empty(1, 1, 64))
    assert Fp8().calibrated(amax_of(x)) == Fp8()


def test_formats_compare_and_hash() -> None:
    codecs: list[Codec] = [Fp8(), *map(Fp8, STATIC), Fp8TokenHead(), Fp8E5m2()]
    again: list[Codec] = [Fp8(), *map(Fp8, STATIC), Fp8TokenHead(), Fp8E5m2()]
    assert codecs == again
    assert len({*codecs, *again}) == 6
    amax = torch.ones(2, 64)
    bound = Fp8("head").calibrated(amax)
    assert {bound: 1}[bound] == 1
    assert bound != Fp8("head").calibrated(amax)  # two measurements
    assert bound.static_scale == "head"
    assert bound.lossy


# --- a scale for each token and head


def vllm_per_token_head(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What vLLM's kernel computes for one (token, head), in float32: the number to be cast, and the scale."""
    scale = np.maximum(np.abs(x).max() / np.float32(448.0), np.float32(1e-6))
    return np.clip(x * (np.float32(1.0) / scale), np.float32(-448.0), np.float32(448.0)), scale


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_token_head_is_vllms_formula_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    x = HARD[name](normal(2, 33, 96)).to(dtype)
    stored, scales = Fp8TokenHead().encode(x)
    assert scales.dtype == torch.float32
    assert scales.shape == (2, 33, 1)
    for head, token in itertools.product(range(2), range(33)):
        number, scale = vllm_per_token_head(x[head, token].float().numpy())
        assert scales[head, token, 0] == scale
        cast = torch.from_numpy(number).to(torch.float8_e4m3fn)
        assert torch.equal(stored[head, token].view(torch.uint8), cast.view(torch.uint8))
    assert torch.equal(decoded(Fp8TokenHead(), x), stored.float() * scales)


@settings(max_examples=50, deadline=None)
@given(st.integers(-12, 60), st.integers(0, 2**31))
def test_per_token_head_loses_at_most_half_a_step(exponent: int, seed: int) -> None:
    x = normal(2, 8, 64, seed=seed) * 2.0**exponent
    back, scales = decoded(Fp8TokenHead(), x), Fp8TokenHead().encode(x)[1]
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, scales * 2.0**-10) * (1 + 1e-6)).all()
    torch.testing.assert_close(back.abs().amax(-1), x.abs().amax(-1), rtol=1e-6, atol=0)  # the largest is stored as 448


def test_a_token_does_not_feel_its_neighbours() -> None:
    x = normal(2, 6, 64)
    alone = decoded(Fp8TokenHead(), x[:1, 3:4])
    x[0, 2] *= 1e5
    x[1, 3] *= 1e5
    assert torch.equal(decoded(Fp8TokenHead(), x)[:1, 3:4], alone)


# --- decoding into the cache's buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_writes_into_a_part_of_a_buffer_in_its_dtype(dtype: torch.dtype) -> None:
    x = normal(3, 5, 64)
    for codec in every_codec(x):
        room = torch.full((3, 9, 64), 7.0, dtype=dtype)
        codec.decode(codec.encode(x), room[:, 2:7])
        assert torch.equal(room[:, 2:7], decoded(codec, x).to(dtype))  # rounded once
        assert (room[:, :2] == 7).all()
        assert (room[:, 7:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_reads_a_part_of_a_buffer(dtype: torch.dtype) -> None:
    x = normal(3, 9, 64)
    for codec in every_codec(x):
        whole = torch.empty((3, 9, 64), dtype=dtype)
        codec.decode(codec.encode(x), whole)
        some = torch.empty((3, 4, 64), dtype=dtype)
        codec.decode([part[:, 3:7] for part in codec.encode(x)], some)
        assert torch.equal(some, whole[:, 3:7])


def test_small_numbers_are_read_whatever_the_processor_does_with_denormals() -> None:
    x = numbers_of(torch.float8_e4m3fn)[None, None]
    assert x.max() == E4M3_MAX
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = decoded(Fp8(), x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed, x)
