"""nvfp4 against torchao's quantiser, gguf's decoder and the definition."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf.quants
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hard import HARD, HEAD_DIMS, decoded, normal, parts_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.errors import KvevalError
from kveval.formats.nvfp4 import Nvfp4

NVFP4 = Nvfp4()
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by code
TORCHAO_FLOOR = 2.0**-6  # torchao's least block scale; E4M3 goes on in subnormals down to 2^-9
KINDS = {
    **HARD,
    "steps": lambda x: (4 * x).round(),  # many ties
    "bf16": lambda x: x.bfloat16(),
    "huge": lambda x: x * 1e5,
}


class Torchao:
    """torchao's single-level quantiser, in a process of its own (torchao_worker)."""

    def __init__(self) -> None:
        worker = [sys.executable, str(Path(__file__).parent / "torchao_worker.py")]
        self.process = subprocess.Popen(
            worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Packed numbers and E4M3 scales as it stores ``x``, and what its tensor reads back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        pickle.dump(x.float().numpy(), self.process.stdin)
        self.process.stdin.flush()
        packed, scales, read = (torch.from_numpy(array) for array in pickle.load(self.process.stdout))
        return packed, scales.view(torch.float8_e4m3fn), read


@pytest.fixture(scope="module")
def torchao() -> Iterator[Torchao]:
    worker = Torchao()
    yield worker
    worker.process.stdin.close()  # type: ignore[union-attr]
    worker.process.wait(timeout=20)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_numbers_are_torchaos(kind: str, head_dim: int, torchao: Torchao) -> None:
    for tokens in (1, 31, 32, 33, 400):
        x = KINDS[kind](normal(3, tokens, head_dim, seed=tokens))
        before = x.clone()
        _, _, read = torchao(x)
        got = decoded(NVFP4, x)
        assert torch.equal(x, before)
        assert torch.isfinite(got).all()
        assert torch.equal(got.view(torch.int32), read.view(torch.int32))  # the sign of zeros, too


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("tiny", "zero")])
def test_bytes_are_torchaos(kind: str, torchao: Torchao) -> None:
    x = KINDS[kind](normal(3, 400, 128))
    packed, scales, _ = torchao(x)
    got_packed, got_scales = NVFP4.encode(x)
    assert torch.equal(got_packed, packed)
    assert torch.equal(got_scales.view(torch.uint8), scales.view(torch.uint8))


@given(values=st.lists(st.floats(-4e3, 4e3, width=32), min_size=16, max_size=16))
@settings(max_examples=300)
def test_any_block_above_torchaos_floor_is_torchaos(values: list[float], torchao: Torchao) -> None:
    x = torch.tensor([*values[:-1], max(values[-1], 6 * TORCHAO_FLOOR)]).reshape(1, 1, 16)
    packed, scales, _ = torchao(x)
    got_packed, got_scales = NVFP4.encode(x)
    assert torch.equal(got_packed, packed)
    assert got_scales.float().item() == scales.float().item() >= TORCHAO_FLOOR


def test_small_blocks_use_the_subnormal_scales_that_torchao_leaves_out(torchao: Torchao) -> None:
    """torchao stores 2^-6 for any smaller scale. NVFP4's scale is any E4M3 number, and vLLM's kernel stores what
    the conversion gives (csrc/quantization/fp4/nvfp4_utils.cuh, cvt_warp_fp16_to_fp4), subnormals and zero included.
    """
    x = normal(3, 400, 128) * 0.01
    _, torchao_scales, read = torchao(x)
    _, scales = NVFP4.encode(x)
    assert (torchao_scales.float() == TORCHAO_FLOOR).all()
    assert 2**-9 <= scales.float().min() < scales.float().max() < TORCHAO_FLOOR
    assert (decoded(NVFP4, x) - x).square().sum() < 0.5 * (read - x).square().sum()


def by_the_book(x: np.ndarray) -> np.ndarray:
    """The definition, number by number: the nearest E2M1 number (of two, the one of the even code) times the scale."""
    out = np.empty_like(x)
    numbers = E2M1.numpy()
    for index in np.ndindex(x.shape[0], x.shape[1], x.shape[2] // 16):
        place = (*index[:2], slice(16 * index[2], 16 * index[2] + 16))
        amax = np.abs(x[place]).max()
        scale = torch.tensor(min(amax / np.float32(6), np.float32(448))).to(torch.float8_e4m3fn).float().numpy()
        inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
        distances = np.abs(np.abs(x[place] * inverse)[:, None].astype(np.float64) - numbers)
        nearest = distances == distances.min(axis=-1, keepdims=True)
        code = np.where(
            nearest.sum(axis=-1) == 1, nearest.argmax(axis=-1), (nearest * (np.arange(8) % 2 == 0)).argmax(axis=-1)
        )
        out[place] = np.copysign(numbers[code], x[place]) * scale
    return out


@pytest.mark.parametrize("factor", [1e-9, 1e-4, 1e-3, 0.01, 0.05, 1.0, 300.0, 1e5])
def test_numbers_are_the_definition_at_every_magnitude(factor: float) -> None:
    x = torch.cat([normal(2, 20, 64), (4 * normal(2, 5, 64)).round()], dim=1) * factor
    np.testing.assert_array_equal(decoded(NVFP4, x).numpy(), by_the_book(x.numpy()))


def test_every_code_times_every_scale_is_ggufs() -> None:
    """gguf reads NVFP4 weights in blocks of 64: four scales, then 8 bytes a block of 16, numbers 0..7 and 8..15 in halves."""
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16)
    scales = torch.arange(127, dtype=torch.uint8)  # 127 itself is NaN
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    out = torch.empty(1, 127, 16)
    NVFP4.decode((packed.unsqueeze(0), scales.view(torch.float8_e4m3fn).reshape(1, 127, 1)), out)
    halves = codes[:, :8] | (codes[:, 8:] << 4)
    stored = torch.cat([scales[:, None].expand(127, 4), halves.repeat(1, 4)], dim=1).contiguous()
    reference = gguf.quants.dequantize(stored.numpy(), GGMLQuantizationType.NVFP4)[:, :16]
    np.testing.assert_array_equal(out[0].numpy(), reference)
    expected = torch.cat([E2M1, -E2M1]) * scales.view(torch.float8_e4m3fn).float()[:, None]
    assert torch.equal(out[0].view(torch.int32), expected.view(torch.int32))


def test_halfway_numbers_go_to_the_even_code() -> None:
    """amax 6 makes the scale 1. Halfway: 0.25 and 1.25 down, 0.75 and 1.75 up, 2.5 down, 3.5 up, 5 down."""
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    below, above = E2M1[:-1], E2M1[1:]
    for sign in (1, -1):
        for numbers, expected in (
            (halfway, even),
            (torch.nextafter(halfway, halfway * 0), below),
            (torch.nextafter(halfway, halfway * 2), above),
        ):
            x = torch.cat([sign * numbers, torch.full((9,), 6.0)]).reshape(1, 1, 16)
            assert torch.equal(decoded(NVFP4, x)[0, 0, :7], sign * expected)


def test_the_even_number_is_in_the_low_bits() -> None:
    packed, scales = NVFP4.encode(torch.tensor([0.5, -6.0, 1.0, 1.5, *[0.0] * 12]).reshape(1, 1, 16))
    assert scales.float().item() == 1.0
    assert packed[0, 0, :3].tolist() == [0xF1, 0x32, 0x00]


def test_scales_saturate_and_vanish() -> None:
    """2,688 = 448 x 6 is the largest number; a scale of 2^-10 is halfway between 0 and the least E4M3 number 2^-9."""
    x = torch.zeros(1, 4, 16)
    x[0, :, 3] = torch.tensor([1e5, -3e38, 6 * 2**-10, 6.01 * 2**-10])
    got = decoded(NVFP4, x)
    assert got[0, :, 3].tolist() == [2688.0, -2688.0, 0.0, 3 * 2**-9]
    assert NVFP4.encode(x)[1].float().flatten().tolist() == [448.0, 448.0, 0.0, 2**-9]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_are_the_formula(head_dim: int) -> None:
    for tokens in (1, 31, 32, 33):
        assert parts_bytes(NVFP4.encode(normal(3, tokens, head_dim))) == 3 * tokens * NVFP4.block_bytes(head_dim)
    assert NVFP4.block_bytes(head_dim) == head_dim * 9 // 16


def test_keys_and_values_take_vllms_144_bytes() -> None:
    """vLLM's nvfp4 cache: head_size / 2 bytes of numbers and head_size / 16 of scales for each of the two."""
    assert 2 * NVFP4.block_bytes(128) == 144


@pytest.mark.parametrize("head_dim", [72, 8, 0])
def test_a_head_dim_that_blocks_do_not_divide_is_refused(head_dim: int) -> None:
    with pytest.raises(KvevalError, match=f"nvfp4 cannot store a head_dim of {head_dim}: blocks of 16"):
        NVFP4.block_bytes(head_dim)
    with pytest.raises(KvevalError, match=f"head_dim of {head_dim}"):
        NVFP4.encode(torch.zeros(1, 1, head_dim))


def test_other_dtypes_and_strided_slabs_are_the_float32_numbers() -> None:
    x = normal(40, 3, 128).transpose(0, 1)  # as attention layers hand keys over
    expected = decoded(NVFP4, x.contiguous())
    stored = [torch.zeros(3, 64, part.shape[-1], dtype=part.dtype) for part in NVFP4.encode(x)]
    for kept, part in zip(stored, NVFP4.encode(x), strict=True):
        kept[:, 7:47] = part
    for dtype in (torch.float32, torch.bfloat16):
        slab = torch.full((5, 64, 128), 9.0, dtype=dtype)
        NVFP4.decode([kept[:, 7:47] for kept in stored], slab[1:4, 3:43])
        assert torch.equal(slab[1:4, 3:43].float(), expected)  # bfloat16 holds every one
        assert (slab[0] == 9).all()
        assert (slab[1:4, 43:] == 9).all()


@given(values=st.lists(st.floats(-6e4, 6e4, width=32), min_size=16, max_size=16), factor=st.sampled_from([1, 1e-5]))
@settings(max_examples=300)
def test_error_is_bounded_by_the_formats_steps(values: list[float], factor: float) -> None:
    """E2M1 is at most a fifth off (between 1 and 1.5, 2 and 3, 4 and 6), a quarter of the scale near 0; beyond 6, saturated."""
    x = torch.tensor(values).reshape(1, 1, 16) * factor
    scale = NVFP4.encode(x)[1].float().item()
    exact = min(x.abs().max().item() / 6, 448)
    assert abs(scale - exact) <= max(2**-4 * exact, 2**-10) * (1 + 1e-6)
    bound = torch.maximum((x.abs() / 5).clamp(min=scale / 4), x.abs() - 6 * scale)
    assert ((decoded(NVFP4, x) - x).abs() <= bound * (1 + 1e-6)).all()


def test_a_token_is_encoded_alone() -> None:
    x = normal(2, 9, 64)
    whole = NVFP4.encode(x)
    for token in range(9):
        for part, alone in zip(whole, NVFP4.encode(x[:, token : token + 1]), strict=True):
            assert torch.equal(part[:, token : token + 1].view(torch.uint8), alone.view(torch.uint8))
