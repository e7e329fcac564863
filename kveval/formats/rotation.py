"""A Hadamard rotation of keys and queries, or of values: outlier channels are spread over their whole head.

QuaRot (Ashkboos et al. 2024, arXiv:2404.00456): an orthonormal rotation of queries and keys alike leaves their
dot products as they are, and a channel much larger than the others becomes a part of every channel, so that a group of
stored numbers has no outlier. The rotation needs no calibration and takes no bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kveval.errors import KvevalError

if TYPE_CHECKING:
    import torch

SMALLEST_BLOCK = 16  # narrower blocks hardly spread anything


def hadamard(n: int) -> NDArray[np.int8]:
    """Sylvester's Hadamard matrix (n, n) of 1 and -1 for ``n`` a power of two: symmetric, ``H @ H == n * I``."""
    assert n > 0, n
    assert n & (n - 1) == 0, f"{n} is no power of two"
    matrix = np.ones((1, 1), dtype=np.int8)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def rotation_block(dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides ``dim`` (128: all 128; 80: five times 16).

    Raises KvevalError where that is less than 16.
    """
    block = dim & -dim
    if block < SMALLEST_BLOCK:
        raise KvevalError(
            f"a Hadamard rotation cannot spread a head_dim of {dim}: the largest power of two that divides it is {block}, "
            f"and {SMALLEST_BLOCK} is the least; use the format without rotation"
        )
    return block


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``x`` (..., dim) times blocks of ``hadamard(block) / sqrt(block)``, computed in float32, in ``x``'s dtype.

    Orthonormal and symmetric: ``rotate(rotate(x))`` is ``x`` again, up to rounding. Raises KvevalError as
    ``rotation_block`` does.
    """
    block = rotation_block(x.shape[-1])
    rotated = x.float().reshape(-1, block) @ _matrix(block, x.device)
    return rotated.view(x.shape).to(x.dtype)


@lru_cache(maxsize=16)
def _matrix(block: int, device: torch.device) -> torch.Tensor:
    """The orthonormal rotation (block, block), float32."""
    import torch

    with torch.inference_mode(False):  # a tensor made in inference mode could not be used outside of it
        return torch.from_numpy(hadamard(block)).to(device=device, dtype=torch.float32) / block**0.5
