"""The Hadamard rotation: scipy's matrix, what it leaves alone, and what it does to an outlier channel."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hard import HEAD_DIMS, decoded, normal

from kveval.errors import KvevalError
from kveval.formats.integers import IntGroups
from kveval.formats.rotation import hadamard, rotate, rotation_block

DIMS = (*HEAD_DIMS, 16, 48, 112, 160, 192, 576)


@pytest.mark.parametrize("n", [1, 2, 4, 16, 128, 256])
def test_the_matrix_is_scipys(n: int) -> None:
    assert np.array_equal(hadamard(n), scipy.linalg.hadamard(n))


@pytest.mark.parametrize("n", [0, 3, 96])
def test_only_powers_of_two_have_one(n: int) -> None:
    with pytest.raises(AssertionError):
        hadamard(n)


@pytest.mark.parametrize(
    ("dim", "block"), [(64, 64), (80, 16), (96, 32), (112, 16), (128, 128), (192, 64), (256, 256), (576, 64)]
)
def test_blocks_are_the_largest_power_of_two_that_divides(dim: int, block: int) -> None:
    assert rotation_block(dim) == block
    x = normal(3, dim)
    matrix = scipy.linalg.block_diag(*[scipy.linalg.hadamard(block)] * (dim // block)) / np.sqrt(block)
    np.testing.assert_allclose(rotate(x).numpy(), x.double().numpy() @ matrix, atol=1e-5)


@pytest.mark.parametrize("dim", [1, 8, 24, 40, 72, 100, 129])
def test_a_head_dim_that_cannot_be_spread_is_refused_by_name(dim: int) -> None:
    with pytest.raises(KvevalError, match=f"head_dim of {dim}: .* is {dim & -dim},"):
        rotate(torch.zeros(2, dim))


@pytest.mark.parametrize("dim", DIMS)
def test_twice_is_not_at_all_and_dot_products_are_kept(dim: int) -> None:
    q, k = normal(5, dim), normal(7, dim, seed=4)
    torch.testing.assert_close(rotate(rotate(k)), k, rtol=0, atol=1e-5)
    assert not torch.allclose(rotate(k), k, atol=0.1)
    exact = q.double() @ k.double().T
    assert (rotate(q).double() @ rotate(k).double().T - exact).abs().max() < 1e-6 * dim
    torch.testing.assert_close(rotate(k).norm(dim=-1), k.norm(dim=-1))


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_an_outlier_channel_is_spread_over_its_block(dim: int) -> None:
    """One channel alone has max / rms = sqrt(block); rotated, all of its block are equal, up to the other channels."""
    block = rotation_block(dim)
    x = normal(2, 50, dim)
    x[..., 7] = 1e3
    inside = rotate(x)[..., :block]  # the block of channel 7

    def peak(y: torch.Tensor) -> torch.Tensor:
        return y.abs().amax(-1) / y.pow(2).mean(-1).sqrt()

    others = x.clone()
    others[..., 7] = 0
    assert (peak(x[..., :block]) > 0.9 * block**0.5).all()
    # Cauchy-Schwarz: the other channels add at most their own norm to any rotated channel, and the rms cannot shrink.
    bound = 1 + others[..., :block].norm(dim=-1) * block**0.5 / 1e3
    assert (peak(inside) <= bound).all()
    assert bound.max() < 1.4
    assert torch.allclose(rotate(x)[..., block:], rotate(others)[..., block:])  # no other block feels it


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_four_bits_lose_less_through_it(dim: int) -> None:
    x = normal(2, 64, dim)
    x[..., 7] *= 50.0
    codec = IntGroups(4, 32)
    plain = (decoded(codec, x) - x).norm()
    turned = (rotate(decoded(codec, rotate(x))) - x).norm()
    assert turned < 0.7 * plain
    without = normal(2, 64, dim)  # where there is no outlier there is nothing to win
    assert (rotate(decoded(codec, rotate(without))) - without).norm() > 0.9 * (decoded(codec, without) - without).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_takes_any_shape_in_its_own_dtype_and_leaves_its_input_alone(dtype: torch.dtype) -> None:
    room = normal(2, 4, 9, 64).to(dtype)
    x = room[:, :, 2:7]
    before = x.clone()
    turned = rotate(x)
    assert turned.dtype == dtype
    assert turned.shape == x.shape
    assert torch.equal(x, before)
    assert torch.equal(turned, rotate(x.float()).to(dtype))  # one rounding
    assert rotate(x[:, :, :0]).shape == (2, 4, 0, 64)


def test_a_matrix_made_in_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        rotate(torch.ones(1, 4096))
    x = torch.ones(1, 4096, requires_grad=True)
    rotate(x).sum().backward()
    assert x.grad is not None
