"""bf16 and fp16: what comes back unchanged, what does not, and where fp16 ends."""

from __future__ import annotations

import pytest
import torch
from hard import HARD, HEAD_DIMS, decoded, normal, parts_bytes

from kveval.formats.half import Bf16, Fp16


def every_bf16() -> torch.Tensor:
    """All finite bfloat16 numbers, (1, 510, 128): 65,536 patterns without two exponents' worth of infinities and NaN."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    return numbers[numbers.isfinite()].view(1, 510, 128)


@pytest.mark.parametrize("codec", [Bf16(), Fp16()])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
def test_bytes_are_two_a_number(codec: Bf16 | Fp16, head_dim: int, tokens: int) -> None:
    stored = parts_bytes(codec.encode(normal(3, tokens, head_dim)))
    assert stored == 3 * tokens * codec.block_bytes(head_dim) == 3 * tokens * head_dim * 2


@pytest.mark.parametrize("name", HARD)
def test_numbers_are_the_nearest_of_sixteen_bits(name: str) -> None:
    x = HARD[name](normal(2, 33, 96))
    back, ulp = decoded(Bf16(), x), 2.0**-8
    assert ((back - x).abs() <= x.abs() * ulp).all()
    back = decoded(Fp16(), x)
    assert ((back - x).abs() <= (x.abs() * 2.0**-11).clamp(min=2.0**-25)).all()


def test_every_bf16_number_survives_bf16() -> None:
    numbers = every_bf16()
    assert torch.equal(decoded(Bf16(), numbers), numbers.float())
    assert torch.equal(decoded(Bf16(), numbers, torch.bfloat16), numbers)


def test_fp16_keeps_the_bf16_numbers_that_its_docstring_names() -> None:
    numbers = every_bf16()
    numbers = numbers.float()[numbers.float().abs() <= Fp16.largest][None, None]
    kept = (decoded(Fp16(), numbers) == numbers) | (numbers == 0)
    inside = numbers.abs() >= 2.0**-17
    assert kept[inside].all()
    assert not kept[~inside].all()
    assert (decoded(Fp16(), numbers) - numbers)[~inside].abs().max() <= 2.0**-25
    assert numbers.max() == 65280


def test_fp16_ends_at_65504_and_says_so() -> None:
    assert Fp16.largest == torch.finfo(torch.float16).max == 65504
    assert decoded(Fp16(), torch.tensor([[[65504.0, -65504.0]]])).tolist() == [[[65504.0, -65504.0]]]
    assert (
        decoded(Fp16(), torch.tensor([[[65536.0]]])).isinf().all()
    )  # hence `largest`: the cache refuses such a number
    assert Bf16().largest == float("inf")


@pytest.mark.parametrize("codec", [Bf16(), Fp16()])
def test_decoding_writes_into_a_part_of_a_buffer_in_its_dtype(codec: Bf16 | Fp16) -> None:
    x = normal(2, 5, 64).to(torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        room = torch.full((2, 9, 64), 7.0, dtype=dtype)
        codec.decode(codec.encode(x), room[:, 2:7])
        assert torch.equal(room[:, 2:7], x.to(dtype))
        assert (room[:, :2] == 7).all()
        assert (room[:, 7:] == 7).all()
