"""q8_0, q5_1 and q4_0 against ``gguf``, llama.cpp's own Python package: the same bytes, the same numbers."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hard import HARD, HEAD_DIMS, decoded, normal, parts_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.errors import KvevalError
from kveval.formats.ggml import Q4_0, Q5_1, Q8_0, GgmlBlocks

CODECS: dict[str, GgmlBlocks] = {codec.name: codec for codec in (Q8_0(), Q5_1(), Q4_0())}
KINDS = {
    **HARD,
    "steps": lambda x: (4 * x).round(),  # many ties: of rounding, and of the largest magnitude
    "bf16": lambda x: x.bfloat16(),
    "fp16": lambda x: (100 * x).half(),
    "positive": lambda x: x.abs() + 100,
}
every_codec = pytest.mark.parametrize("name", list(CODECS))


def by_gguf(name: str, x: torch.Tensor) -> np.ndarray:
    """The bytes that gguf stores for ``x``.

    + 0.0 makes -0.0 positive: which of two zeros is the minimum (q5_1 keeps its sign) depends on numpy's vector unit.
    """
    numbers = x.float() + 0.0 if name == "q5_1" else x.float()
    return gguf.quants.quantize(numbers.numpy(), GGMLQuantizationType[name.upper()])


@every_codec
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("head_dim", [d for d in HEAD_DIMS if d % 32 == 0])
def test_bytes_and_numbers_are_ggufs(name: str, kind: str, head_dim: int) -> None:
    codec = CODECS[name]
    for tokens in (1, 31, 32, 33, 400):
        x = KINDS[kind](normal(3, tokens, head_dim, seed=tokens))
        (stored,) = codec.encode(x)
        np.testing.assert_array_equal(stored.numpy(), by_gguf(name, x))
        reference = gguf.quants.dequantize(stored.numpy(), GGMLQuantizationType[name.upper()])
        got = decoded(codec, x).numpy()
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got.view(np.int32), reference.view(np.int32))  # the sign of zeros, too


@every_codec
@given(values=st.lists(st.floats(-6e4, 6e4, width=32, allow_subnormal=False), min_size=32, max_size=32))
@settings(max_examples=200)
def test_any_block_is_ggufs(name: str, values: list[float]) -> None:
    # Below 1e-35 the reciprocal of the scale overflows; what C and numpy then cast to an integer is undefined.
    x = torch.tensor([value if abs(value) > 1e-35 else 0.0 for value in values]).reshape(1, 1, 32)
    np.testing.assert_array_equal(CODECS[name].encode(x)[0].numpy(), by_gguf(name, x))


@every_codec
@pytest.mark.parametrize("head_dim", [d for d in HEAD_DIMS if d % 32 == 0])
def test_bytes_are_the_formula(name: str, head_dim: int) -> None:
    """GGML_QUANT_SIZES holds ggml's own (numbers, bytes) of a block."""
    codec = CODECS[name]
    numbers, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
    assert codec.block_bytes(head_dim) == head_dim // numbers * size
    for tokens in (1, 31, 32, 33):
        assert parts_bytes(codec.encode(normal(3, tokens, head_dim))) == 3 * tokens * codec.block_bytes(head_dim)


@every_codec
@pytest.mark.parametrize("head_dim", [80, 16, 33, 0])
def test_a_head_dim_that_blocks_do_not_divide_is_refused(name: str, head_dim: int) -> None:
    with pytest.raises(KvevalError, match=rf"{name} cannot store a head_dim of {head_dim}: blocks of 32"):
        CODECS[name].block_bytes(head_dim)
    with pytest.raises(KvevalError, match=f"head_dim of {head_dim}"):
        CODECS[name].encode(torch.zeros(1, 1, head_dim))


def block(*numbers: float) -> torch.Tensor:
    """One vector of one block, filled up with zeros."""
    return torch.tensor([*numbers, *[0.0] * (32 - len(numbers))]).reshape(1, 1, 32)


def test_q8_0_rounds_halves_away_from_zero() -> None:
    """d = 127 / 127 = 1; 0.49999997 is the float32 below a half, for which adding a half and truncating gives 1."""
    (stored,) = Q8_0().encode(block(127, 0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 126.5))
    assert stored[0, 0, :2].view(torch.float16).item() == 1.0
    assert stored[0, 0, 2:10].view(torch.int8).tolist() == [127, 1, 2, 3, -1, -3, 0, 127]


def test_q5_1_lays_out_its_bits() -> None:
    """0..31 are their own codes: d = 1, min = 0; the fifth bit is set from number 16 on; i and i + 16 share a byte."""
    (stored,) = Q5_1().encode(block(*range(32)))
    assert stored[0, 0, :4].view(torch.float16).tolist() == [1.0, 0.0]
    assert stored[0, 0, 4:8].tolist() == [0, 0, 255, 255]
    assert stored[0, 0, 8:].tolist() == [17 * i for i in range(16)]
    (stored,) = Q5_1().encode(block(0, 0, 0, 16, 0, 0, 31))
    assert stored[0, 0, 4:8].tolist() == [0b1001000, 0, 0, 0]


@pytest.mark.parametrize(("first", "second"), [(8.0, -8.0), (-8.0, 8.0)])
def test_q4_0_takes_the_sign_of_the_first_of_equal_magnitudes(first: float, second: float) -> None:
    """The first becomes code 0, which is -8 d; its opposite would be code 16 and is clipped to 15: one step off."""
    x = block(first, second)
    (stored,) = Q4_0().encode(x)
    assert stored[0, 0, :2].view(torch.float16).item() == first / -8
    assert (stored[0, 0, 2:4] & 15).tolist() == [0, 15]
    assert decoded(Q4_0(), x)[0, 0, :3].tolist() == [first, second * 7 / 8, 0.0]


@every_codec
@pytest.mark.parametrize("magnitude", [1e-9, 1e-38, 1e-42, 1e-45])
def test_scales_that_underflow_give_zeros(name: str, magnitude: float) -> None:
    for x in (block(magnitude), block(-magnitude, magnitude), normal(1, 8, 64) * magnitude):
        got = decoded(CODECS[name], x)
        assert torch.isfinite(got).all()
        assert got.abs().max() <= 2e-7  # the smallest fp16 is 6e-8


@every_codec
def test_largest_is_where_the_scale_still_fits_fp16(name: str) -> None:
    codec = CODECS[name]
    x = block(*[-codec.largest] * 32)
    torch.testing.assert_close(decoded(codec, x), x, rtol=2**-11, atol=0)
    assert not torch.isfinite(decoded(codec, x * 1.001)).all()


@every_codec
def test_other_dtypes_and_strided_slabs_are_the_float32_numbers(name: str) -> None:
    codec = CODECS[name]
    x = normal(40, 3, 128).transpose(0, 1)  # as attention layers hand keys over
    expected = decoded(codec, x.contiguous())
    stored = torch.zeros(3, 64, codec.block_bytes(128), dtype=torch.uint8)
    stored[:, 7:47] = codec.encode(x)[0]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        slab = torch.full((5, 64, 128), 9.0, dtype=dtype)
        codec.decode((stored[:, 7:47],), slab[1:4, 3:43])
        assert torch.equal(slab[1:4, 3:43], expected.to(dtype))
        assert (slab[0] == 9).all()
        assert (slab[1:4, 43:] == 9).all()


@every_codec
@given(values=st.lists(st.floats(-6e4, 6e4, width=32), min_size=32, max_size=32))
@settings(max_examples=200)
def test_error_is_bounded_by_the_step(name: str, values: list[float]) -> None:
    """Half a step, and what rounding d (times the largest code) and the minimum to fp16 adds; q4_0 clips by one step."""
    x = block(*values)
    low, high, amax = x.min().item(), x.max().item(), x.abs().max().item()
    step, codes, steps_off = {
        "q8_0": (amax / 127, 127, 0.5),
        "q5_1": ((high - low) / 31, 31, 0.5),
        "q4_0": (amax / 8, 8, 1.0),
    }[name]
    fp16 = codes * (step * 2**-11 + 2**-25) + (abs(low) * 2**-11 + 2**-25 if name == "q5_1" else 0)
    error = (decoded(CODECS[name], x) - x).abs().max().item()
    assert error <= steps_off * step * (1 + 1e-5) + fp16 * (1 + 1e-5)


@every_codec
def test_a_token_is_encoded_alone(name: str) -> None:
    x = normal(2, 9, 64)
    (whole,) = CODECS[name].encode(x)
    for token in range(9):
        assert torch.equal(whole[:, token : token + 1], CODECS[name].encode(x[:, token : token + 1])[0])
