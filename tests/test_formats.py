"""KV formats: names, bytes, and codecs against outside references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.errors import KvevalError
from kveval.formats.fp8 import Fp8
from kveval.formats.int4 import Int4
from kveval.formats.spec import CODECS, KVFormat, parse_format
from kveval.formats.window import Window


def decoded(name: str, x: torch.Tensor) -> torch.Tensor:
    """``x`` (heads, tokens, head_dim) written and read back."""
    out = torch.empty_like(x, dtype=torch.float32)
    CODECS[name].decode(CODECS[name].encode(x), out)
    return out


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("bf16", "bf16"),
        ("FP8", "fp8"),
        ("fp8-e4m3", "fp8"),
        ("int4-g32", "int4-g32"),
        ("window:4k", "window:4k"),
        ("window:4096", "window:4k"),
        ("window:4k,sinks=4", "window:4k"),
        ("window:1k,sinks=0", "window:1k,sinks=0"),
        ("window:1000", "window:1000"),
        ("window:4k,store=fp8", "window:4k,store=fp8"),
    ],
)
def test_names_are_canonical_and_round_trip(text: str, name: str) -> None:
    fmt = parse_format(text)
    assert fmt.name == name
    assert parse_format(fmt.name) == fmt
    assert hash(parse_format(fmt.name)) == hash(fmt)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fp9", "did you mean fp8"),
        ("", "use one of bf16"),
        ("int4-g33", "int4-g32"),
        ("fp8:3", "takes no argument"),
        ("window", "needs its size"),
        ("window:4", "at least 5"),
        ("window:4k,sink=2", "takes sinks="),
        ("window:4k,sinks=-1", "sinks=-1"),
        ("window:4k,sinks", "key=value"),
        ("window:4k,store=fp9", "store=fp9"),
        ("window:lots", "'lots' is not a number of tokens"),
    ],
)
def test_bad_names_are_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(KvevalError, match=told):
        parse_format(text)


@given(st.text(max_size=30))
@settings(max_examples=300)
def test_any_text_is_a_format_or_one_clear_error(text: str) -> None:
    try:
        fmt = parse_format(text)
    except KvevalError as error:
        assert str(error)  # noqa: PT017  # either outcome is right, each with its own claim
    else:
        assert parse_format(fmt.name) == fmt


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", list(CODECS))
def test_vector_bytes_are_the_bytes_of_the_parts(name: str, head_dim: int) -> None:
    codec = CODECS[name]
    for tokens in (1, 31, 32, 33):
        parts = codec.encode(torch.randn(3, tokens, head_dim))
        stored = sum(part.numel() * part.element_size() for part in parts)
        assert stored == 3 * tokens * codec.vector_bytes(head_dim)


def test_case_2_int4_bytes_per_token() -> None:
    """80 layers, 8 KV heads, head_dim 128: fp16 scale and zero a group of 32 make 102,400 B, 3.2 x smaller than BF16."""
    layers, kv_heads, head_dim = 80, 8, 128
    assert layers * parse_format("bf16").token_bytes(head_dim, kv_heads) == 327_680
    assert layers * parse_format("fp8").token_bytes(head_dim, kv_heads) == 163_840
    assert layers * parse_format("int4-g32").token_bytes(head_dim, kv_heads) == 102_400


def test_case_15_window_keeps_a_thirty_second() -> None:
    window = parse_format("window:4k").window
    assert window == Window(4096, 4)
    assert window.recent == 4092
    assert window.kept(131_072) / 131_072 == 0.03125
    assert 80 * KVFormat(window=window).token_bytes(128, 8) * window.kept(131_072) == 1_342_177_280


def test_int4_refuses_a_head_dim_that_groups_do_not_divide() -> None:
    with pytest.raises(KvevalError, match="head_dim of 80"):
        Int4(32).vector_bytes(80)


def every_e4m3() -> torch.Tensor:
    """The 254 finite E4M3 numbers, decoded by torch's own cast."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes[torch.isfinite(codes)]


def test_fp8_decodes_every_code_as_torch_does() -> None:
    values = every_e4m3()
    assert len(values) == 254
    x = values.reshape(1, -1, 2)
    assert torch.equal(decoded("fp8", x), x)


def test_fp8_is_torchs_cast_and_saturates() -> None:
    edges = torch.tensor([500.0, -1e6, 448.0, 464.0] * 16).reshape(1, 1, 64)
    x = torch.cat([torch.randn(1, 64, 64) * 100, edges], dim=1)
    (stored,) = Fp8().encode(x)
    assert torch.equal(stored.float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert decoded("fp8", x)[0, -1, :4].tolist() == [448.0, -448.0, 448.0, 448.0]
    for dtype in (torch.bfloat16, torch.float32):  # exact in the dtypes that attention computes in
        out = torch.empty_like(x, dtype=dtype)
        Fp8().decode((stored,), out)
        assert torch.equal(out.float(), stored.float())


def int4_by_the_book(x: np.ndarray) -> np.ndarray:
    """The formula of ``Int4``, value by value in numpy."""
    out = np.empty_like(x)
    for index in np.ndindex(x.shape[0], x.shape[1], x.shape[2] // 32):
        place = (*index[:2], slice(32 * index[2], 32 * index[2] + 32))
        group = x[place]
        zero, scale = np.float16(group.min()), np.float16((group.max() - group.min()) / np.float32(15))
        for offset, value in enumerate(group):
            step = np.float32(1) if scale == 0 else np.float32(scale)
            q = np.clip(np.rint((value - np.float32(zero)) / step), 0, 15)
            out[(*index[:2], 32 * index[2] + offset)] = np.float32(zero) + np.float32(scale) * np.float32(q)
    return out


HARD = {
    "random": lambda x: x,
    "outlier": lambda x: x * torch.where(torch.arange(64) == 7, 1e4, 1.0),
    "tiny": lambda x: x * 1e-9,
    "zero": lambda x: x * 0,
    "constant": lambda x: x * 0 + 3.140625,
}


@pytest.mark.parametrize("kind", list(HARD))
def test_int4_equals_the_formula(kind: str) -> None:
    x = HARD[kind](torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3)))
    got = decoded("int4-g32", x)
    assert torch.isfinite(got).all()
    np.testing.assert_allclose(got.numpy(), int4_by_the_book(x.numpy()), rtol=1e-6, atol=0)
    if kind in ("zero", "constant"):
        assert torch.equal(got, x)


@given(st.lists(st.floats(-6e4, 6e4, width=32), min_size=64, max_size=64))
@settings(max_examples=200)
def test_int4_error_is_bounded_by_half_a_step(values: list[float]) -> None:
    """|error| <= scale / 2 and what fp16 rounds off the scale (x 15) and the zero."""
    x = torch.tensor(values).reshape(1, 1, 64)
    error = (decoded("int4-g32", x) - x).abs().reshape(2, 32).amax(dim=-1)
    low, high = (f(x.reshape(2, 32), dim=-1) for f in (torch.amin, torch.amax))
    rounding = 2**-11 * ((high - low) + low.abs()) + 16 * 2**-24
    assert (error <= (high - low) / 30 + 2 * rounding).all()


@pytest.mark.parametrize("name", list(CODECS))
def test_a_token_is_encoded_alone(name: str) -> None:
    """What is stored for a token does not depend on the tokens beside it: chunks do not change a cache."""
    x = torch.randn(2, 9, 64)
    whole = CODECS[name].encode(x)
    for token in range(9):
        for part, alone in zip(whole, CODECS[name].encode(x[:, token : token + 1]), strict=True):
            assert torch.equal(part[:, token : token + 1].view(torch.uint8), alone.view(torch.uint8))
